"""Finds and loads the compiled kernels, once, and says why not where that fails. Knows no tensors.

TIDEMILL_KERNELS=reference leaves them alone; TIDEMILL_CPU_ISA=portable (dotprod, avx2, avx512) takes another path than
the best one for this CPU.
"""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path

from tidemill.ops.cpu.build import LIBRARY, sources_hash

LIBRARY_PATH = Path(__file__).parent / LIBRARY
BUILD_COMMAND = "python -m tidemill.ops.cpu.build"

_POINTER, _INT, _LONG = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
_SIGNATURES = {
    "tidemill_sources": (ctypes.c_char_p, []),
    "tidemill_path": (ctypes.c_char_p, [_INT]),
    "tidemill_use": (_INT, [ctypes.c_char_p]),
    # x, x is bfloat16, rows, inputs, outputs, data, bits, table, scales, offsets, whether
    # these are zeros, wide, group, bias, out, threads
    "tidemill_linear": (
        _INT,
        [_POINTER, _INT, *[_LONG] * 3, _POINTER, _INT, *[_POINTER] * 3, _INT, _INT, _LONG, *[_POINTER] * 2, _INT],
    ),
    # x, rows, inputs, outputs, data, scales, scale stride, wide, group, bias, out, threads
    "tidemill_fp8_linear": (
        _INT,
        [_POINTER, _LONG, _LONG, _LONG, _POINTER, _POINTER, _LONG, _INT, _LONG, _POINTER, _POINTER, _INT],
    ),
}


class Unavailable(Exception):
    """Why the library cannot be used."""


@functools.cache
def available() -> str | None:
    """Why the kernels cannot run here; None where they can. Looked at once: layers ask before every product."""
    if os.environ.get("TIDEMILL_KERNELS") == "reference":
        return "TIDEMILL_KERNELS=reference is set"
    found = _loaded()
    return found if isinstance(found, str) else None


def library() -> ctypes.CDLL:
    """The loaded library; only after `available` said that there is one."""
    found = _loaded()
    if isinstance(found, str):
        raise Unavailable(found)
    return found


def paths() -> tuple[str, ...]:
    """The instruction sets that run on this CPU, best first."""
    names: list[str] = []
    here = library()
    while name := here.tidemill_path(len(names)):
        names.append(name.decode())
    return tuple(names)


def use(path: str) -> None:
    """Computes with this path from now on."""
    if library().tidemill_use(path.encode()):
        raise Unavailable(f"this CPU does not run {path!r}, but {', '.join(paths())}")


@functools.cache
def _loaded() -> ctypes.CDLL | str:
    try:
        return _load(LIBRARY_PATH)
    except Unavailable as reason:
        return str(reason)


def _load(path: Path) -> ctypes.CDLL:
    if not path.exists():
        raise Unavailable(f"the CPU's kernels are not compiled: `{BUILD_COMMAND}` does it, with a C++ compiler")
    try:
        found = ctypes.CDLL(str(path))
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(found, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        raise Unavailable(f"{path.name} does not load ({error}): `{BUILD_COMMAND}` compiles it anew") from error
    if found.tidemill_sources().decode() != sources_hash():
        raise Unavailable(f"{path.name} was built from other sources: `{BUILD_COMMAND}` compiles it anew")
    wanted = os.environ.get("TIDEMILL_CPU_ISA")
    if wanted and found.tidemill_use(wanted.encode()):
        raise Unavailable(f"TIDEMILL_CPU_ISA={wanted} is not a path that runs on this CPU")
    return found

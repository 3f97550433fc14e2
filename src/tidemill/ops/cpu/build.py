"""Compiles the CPU's kernels (native/*.cpp) into one shared library beside this file.

`python -m tidemill.ops.cpu.build` runs it, and so does installing the package (setup.py). Uses the standard library
alone, since it runs before anything else is installed, and knows nothing of what the kernels compute.

`--sanitize` builds with the address and undefined-behaviour sanitizers instead; then tests need their runtime in front:
LD_PRELOAD="$(c++ -print-file-name=libasan.so)" ASAN_OPTIONS=detect_leaks=0 python -m pytest tests/test_cpu_kernels.py
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

NATIVE = Path(__file__).parent / "native"
LIBRARY = "libtidemill.so"
FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-Wall",
    "-Wextra",
)
SANITIZE = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-g")
INSTRUCTION_SETS: dict[str, dict[str, tuple[str, ...]]] = {
    "aarch64": {"dotprod": ("-march=armv8.2-a+dotprod",)},
    "arm64": {"dotprod": ("-march=armv8.2-a+dotprod",)},
    "x86_64": {"avx2": ("-mavx2",), "avx512": ("-mavx512f", "-mavx512bw")},
    "AMD64": {"avx2": ("-mavx2",), "avx512": ("-mavx512f", "-mavx512bw")},
}
"""Flags of single files, by machine. The library asks the CPU before it runs what they compile to."""


class NoLibrary(Exception):
    """Why the kernels were not compiled."""


def compiler() -> list[str] | None:
    """The command of a C++ compiler: $CXX, or the first of the usual names."""
    if named := os.environ.get("CXX"):
        return shlex.split(named)
    found = next((name for name in ("c++", "g++", "clang++") if shutil.which(name)), None)
    return [found] if found else None


def sources_hash() -> str:
    """Of all native sources: a library of other ones is not loaded."""
    digest = hashlib.sha256()
    for path in sorted(NATIVE.iterdir()):
        if path.suffix in (".cpp", ".h"):
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def build(folder: Path, *, sanitize: bool = False) -> Path:
    """Compiles the library into a folder, replacing the one there whole. Raises NoLibrary."""
    command = compiler()
    if command is None:
        raise NoLibrary("there is no C++ compiler: none of c++, g++ and clang++ is on the PATH, and CXX is not set")
    flags = (*FLAGS, f'-DTIDEMILL_SOURCES="{sources_hash()}"', *(SANITIZE if sanitize else ()))
    special = INSTRUCTION_SETS.get(platform.machine(), {})
    folder.mkdir(parents=True, exist_ok=True)
    # In the folder itself, so that the finished library is put in place by a rename: a running process keeps its own.
    with tempfile.TemporaryDirectory(dir=folder, prefix=".build-") as scratch:
        steps = []
        for source in sorted(NATIVE.glob("*.cpp")):
            target = Path(scratch) / f"{source.stem}.o"
            steps.append([*command, *flags, *special.get(source.stem, ()), "-c", str(source), "-o", str(target)])
        _run_together(steps)
        library = Path(scratch) / LIBRARY
        objects = [step[-1] for step in steps]
        _run_together([[*command, *flags, "-shared", "-pthread", *objects, "-o", str(library)]])
        os.replace(library, folder / LIBRARY)
    return folder / LIBRARY


def _run_together(commands: list[list[str]]) -> None:
    try:
        running = [
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            for command in commands
        ]
    except OSError as error:
        raise NoLibrary(f"{commands[0][0]} cannot be started: {error}") from error
    said = [process.communicate()[0] for process in running]
    for command, process, output in zip(commands, running, said, strict=True):
        if process.returncode:
            raise NoLibrary(f"{shlex.join(command)} failed:\n{output.strip()}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tidemill.ops.cpu.build", description="Compiles the CPU's kernels.")
    parser.add_argument("--sanitize", action="store_true", help="with the address and undefined-behaviour sanitizers")
    chosen = parser.parse_args()
    try:
        print(build(Path(__file__).parent, sanitize=chosen.sanitize))
    except NoLibrary as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()

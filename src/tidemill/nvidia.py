"""NVIDIA cards as the driver's management library (NVML) sees them: names, memory held now, capabilities, versions.

Through ctypes, so that looking costs milliseconds, opens no CUDA context and imports no torch. A library that is
missing or broken means no cards, with the reason kept. Cards come in the order in which CUDA will number them for this
process. Knows nothing of what tidemill needs of a card.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

LIBRARY = "libnvidia-ml.so.1"
CUDA_LIBRARY = "libcuda.so.1"
CAPABILITY_ATTRIBUTES = (75, 76)
"""CUDA's numbers for a card's major and minor compute capability."""
NAME_BYTES = 96
VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Gpu:
    name: str
    total_bytes: int
    used_bytes: int
    """Held now, by whomever."""
    capability: tuple[int, int]
    uuid: str = ""

    @property
    def free_bytes(self) -> int:
        return max(0, self.total_bytes - self.used_bytes)


@dataclass(frozen=True)
class Driver:
    gpus: tuple[Gpu, ...] = ()
    version: str | None = None
    cuda: tuple[int, int] | None = None
    """The newest CUDA this driver runs."""
    problem: str | None = None
    """Why there are no cards, or why some are not listed."""


class NvmlError(Exception):
    """A call of the library that failed, in its own words."""


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def look(environment: Mapping[str, str], library: Any = None) -> Driver:
    """`library` stands in for the driver's own, in tests."""
    if library is None:
        try:
            library = ctypes.CDLL(LIBRARY)
        except OSError as error:
            return _without_nvml(error)
    nvml = _Nvml(library)
    try:
        nvml.call("nvmlInit_v2")
    except NvmlError as error:
        return Driver(problem=f"the NVIDIA driver does not answer: {error}")
    try:
        return _look(nvml, environment.get(VISIBLE))
    except NvmlError as error:
        return Driver(problem=f"the NVIDIA driver does not answer: {error}")
    finally:
        library.nvmlShutdown()


def _without_nvml(error: OSError) -> Driver:
    """Some containers are given CUDA alone."""
    try:
        return look_through_cuda(ctypes.CDLL(CUDA_LIBRARY))
    except OSError:
        missing = "No such file" in str(error)
        return Driver(problem=f"no NVIDIA driver is seen here ({f'{LIBRARY} is missing' if missing else error})")


def look_through_cuda(library: Any) -> Driver:
    """What CUDA itself tells, which follows the environment, but not how much of a card others hold."""
    if code := library.cuInit(0):
        return Driver(problem=f"the NVIDIA driver does not answer: cuInit: error {code}")

    def number(name: str, *arguments: int) -> int:
        value = ctypes.c_int()
        getattr(library, name)(ctypes.byref(value), *arguments)
        return value.value

    gpus = []
    for index in range(number("cuDeviceGetCount")):
        device, total, name = number("cuDeviceGet", index), ctypes.c_size_t(), ctypes.create_string_buffer(NAME_BYTES)
        library.cuDeviceTotalMem_v2(ctypes.byref(total), device)
        library.cuDeviceGetName(name, NAME_BYTES, device)
        major, minor = (number("cuDeviceGetAttribute", attribute, device) for attribute in CAPABILITY_ATTRIBUTES)
        gpus.append(Gpu(name.value.decode(errors="replace"), total.value, 0, (major, minor)))
    version = number("cuDriverGetVersion")
    problem = None if gpus else "the NVIDIA driver is there, but CUDA sees no card"
    return Driver(tuple(gpus), None, (version // 1000, version % 1000 // 10), problem)


def _look(nvml: _Nvml, visible: str | None) -> Driver:
    version, cuda = nvml.text("nvmlSystemGetDriverVersion"), nvml.number("nvmlSystemGetCudaDriverVersion_v2")
    handles = [nvml.handle("nvmlDeviceGetHandleByIndex_v2", index) for index in range(nvml.count())]
    problem = None if handles else "the NVIDIA driver is there, but no card"
    if visible is not None:
        wanted = handles
        handles = _visible(nvml, handles, visible)
        if wanted and not handles:
            cards = "the one card" if len(wanted) == 1 else f"all {len(wanted)} cards"
            problem = f"{VISIBLE} is {visible!r}, which hides {cards} of this machine"
    gpus = []
    for handle in handles:
        try:
            gpus.append(nvml.gpu(handle))
        except NvmlError as error:
            # CUDA would number the cards behind it otherwise than this list does.
            problem = f"card {len(gpus)} does not answer: {error}"
            break
    return Driver(tuple(gpus), version, (cuda // 1000, cuda % 1000 // 10), problem)


def _visible(nvml: _Nvml, handles: list[ctypes.c_void_p], visible: str) -> list[ctypes.c_void_p]:
    """What CUDA makes of the variable: indices or beginnings of UUIDs, up to the first that names nothing."""
    found: list[ctypes.c_void_p] = []
    for word in (part.strip() for part in visible.split(",")):
        if word.isdecimal() and int(word) < len(handles):
            found.append(handles[int(word)])
        elif word.startswith("MIG-"):
            try:
                found.append(nvml.handle("nvmlDeviceGetHandleByUUID", word.encode()))
            except NvmlError:
                break
        elif word.startswith("GPU-"):
            matches = [handle for handle in handles if nvml.text("nvmlDeviceGetUUID", handle).startswith(word)]
            if len(matches) != 1:
                break
            found.append(matches[0])
        else:
            break
    # CUDA shows no card at all where one is named twice.
    return found if len({handle.value for handle in found}) == len(found) else []


class _Nvml:
    """The library's calls with their out-parameters as results."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def call(self, name: str, *arguments: Any) -> None:
        try:
            function = getattr(self._library, name)
        except AttributeError as error:
            raise NvmlError(f"it lacks {name}; it is too old") from error
        if code := function(*arguments):
            raise NvmlError(f"{name}: {self._words(code)}")

    def _words(self, code: int) -> str:
        try:
            explain = self._library.nvmlErrorString
            explain.restype = ctypes.c_char_p
            words = explain(code)
        except AttributeError:
            words = None
        return f"{words.decode(errors='replace')} ({code})" if words else f"error {code}"

    def text(self, name: str, *arguments: Any) -> str:
        buffer = ctypes.create_string_buffer(NAME_BYTES)
        self.call(name, *arguments, buffer, ctypes.c_uint(NAME_BYTES))
        return buffer.value.decode(errors="replace")

    def number(self, name: str) -> int:
        value = ctypes.c_int()
        self.call(name, ctypes.byref(value))
        return value.value

    def count(self) -> int:
        value = ctypes.c_uint()
        self.call("nvmlDeviceGetCount_v2", ctypes.byref(value))
        return value.value

    def handle(self, name: str, which: int | bytes | ctypes.c_void_p) -> ctypes.c_void_p:
        handle = ctypes.c_void_p()
        self.call(name, ctypes.c_uint(which) if isinstance(which, int) else which, ctypes.byref(handle))
        return handle

    def gpu(self, handle: ctypes.c_void_p) -> Gpu:
        memory, major, minor = _Memory(), ctypes.c_int(), ctypes.c_int()
        self.call("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory))
        uuid = self.text("nvmlDeviceGetUUID", handle)
        # A slice of a card has memory of its own and the capability of the whole.
        whole = (
            self.handle("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", handle) if uuid.startswith("MIG-") else handle
        )
        self.call("nvmlDeviceGetCudaComputeCapability", whole, ctypes.byref(major), ctypes.byref(minor))
        used = memory.total - memory.free
        return Gpu(self.text("nvmlDeviceGetName", handle), memory.total, used, (major.value, minor.value), uuid)

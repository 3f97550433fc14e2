"""Stand-ins for the driver's libraries: the same calls, with cards made of numbers."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

GIB = 2**30


@dataclass
class Card:
    name: str = "NVIDIA H200"
    uuid: str = "GPU-aaaa"
    total: int = 140 * GIB
    used: int = 0
    capability: tuple[int, int] = (9, 0)
    lost: bool = False
    whole: str | None = None
    """The card that this is a slice of."""


class ErrorString:
    """A function of a C library takes the type of its result as an attribute."""

    restype: Any = ctypes.c_int

    def __call__(self, code: int) -> bytes:
        assert self.restype is ctypes.c_char_p
        return {9: b"Driver Not Loaded", 15: b"GPU is lost", 6: b"Not Found"}[code]


@dataclass
class FakeNvml:
    cards: list[Card] = field(default_factory=lambda: [Card()])
    cuda: int = 13000
    init: int = 0
    open: bool = False
    nvmlErrorString: ErrorString = field(default_factory=ErrorString)

    def nvmlInit_v2(self) -> int:
        self.open = self.init == 0
        return self.init

    def nvmlShutdown(self) -> int:
        self.open = False
        return 0

    def nvmlSystemGetDriverVersion(self, buffer: Any, size: Any) -> int:
        return self._write(buffer, "580.82.07")

    def nvmlSystemGetCudaDriverVersion_v2(self, value: Any) -> int:
        value._obj.value = self.cuda
        return 0

    def nvmlDeviceGetCount_v2(self, value: Any) -> int:
        value._obj.value = sum(card.whole is None for card in self.cards)
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: Any, handle: Any) -> int:
        handle._obj.value = index.value + 1
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: Any) -> int:
        return self._find(uuid.decode(), handle)

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, part: Any, handle: Any) -> int:
        return self._find(self._card(part).whole or "", handle)

    def nvmlDeviceGetName(self, handle: Any, buffer: Any, size: Any) -> int:
        return self._write(buffer, self._card(handle).name)

    def nvmlDeviceGetUUID(self, handle: Any, buffer: Any, size: Any) -> int:
        return self._write(buffer, self._card(handle).uuid)

    def nvmlDeviceGetMemoryInfo(self, handle: Any, memory: Any) -> int:
        card, found = self._card(handle), memory._obj
        if card.lost:
            return 15
        found.total, found.used, found.free = card.total, card.used, card.total - card.used
        return 0

    def nvmlDeviceGetCudaComputeCapability(self, handle: Any, major: Any, minor: Any) -> int:
        card = self._card(handle)
        if card.whole is not None:
            return 6
        major._obj.value, minor._obj.value = card.capability
        return 0

    def _card(self, handle: Any) -> Card:
        assert self.open, "nobody asks a library that is closed"
        return self.cards[handle.value - 1]

    def _find(self, uuid: str, handle: Any) -> int:
        for index, card in enumerate(self.cards):
            if card.uuid == uuid:
                handle._obj.value = index + 1
                return 0
        return 6

    def _write(self, buffer: Any, text: str) -> int:
        ctypes.memmove(buffer, text.encode() + b"\0", len(text) + 1)
        return 0


@dataclass
class FakeCuda:
    """One card, as CUDA's own library shows it."""

    init: int = 0

    def cuInit(self, flags: int) -> int:
        return self.init

    def cuDriverGetVersion(self, value: Any) -> int:
        value._obj.value = 12080
        return 0

    def cuDeviceGetCount(self, value: Any) -> int:
        value._obj.value = 1
        return 0

    def cuDeviceGet(self, value: Any, index: int) -> int:
        value._obj.value = index
        return 0

    def cuDeviceTotalMem_v2(self, value: Any, device: int) -> int:
        value._obj.value = 24 * GIB
        return 0

    def cuDeviceGetName(self, buffer: Any, size: int, device: int) -> int:
        ctypes.memmove(buffer, b"Some GPU\0", 9)
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: int, device: int) -> int:
        value._obj.value = {75: 8, 76: 9}[attribute]
        return 0

"""Layers that live in host memory and pass through the device, so that models larger than a card run.

The tensors of such a layer lie in one stretch of pinned host memory: one copy brings all of them. The device has two
places for them; while one layer computes, the next arrives on a stream of its own. A layer is built over its host
memory (to be loaded) and over each place (to be computed), and all of these allocate in the same order, so the bytes
fit. On a CPU the same happens with plain copies. Knows layers only as something that allocates and is called.
"""

from __future__ import annotations

import logging
import mmap
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from math import prod
from typing import Any

import torch

from tidemill.layers.parameter import Parameter, Placement
from tidemill.layers.rope import Rope
from tidemill.models.decoder import DecoderLayer, Flow, Layer
from tidemill.models.spec import DecoderSpec
from tidemill.plan.offload import STAGING_SLOTS

logger = logging.getLogger(__name__)

ALIGNMENT = 256
"""Bytes: what kernels may assume of a tensor's start."""

BuildLayer = Callable[[int, Placement], Layer]


@dataclass
class Arena:
    """One stretch of bytes, handed out from its start; without a buffer it only measures."""

    buffer: torch.Tensor | None = None
    used: int = 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        start, size = self.used, prod(shape) * dtype.itemsize
        self.used += -(-size // ALIGNMENT) * ALIGNMENT
        if self.buffer is None:
            return torch.empty(shape, dtype=dtype, device="meta")
        return self.buffer[start : start + size].view(dtype).view(shape)


@dataclass(frozen=True)
class ArenaPlacement(Placement):
    """Puts all that a layer allocates into one arena."""

    arena: Arena = field(default_factory=Arena)

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return self.arena.take(shape, dtype or self.dtype)


def _inside(place: Placement, device: torch.device, buffer: torch.Tensor | None) -> ArenaPlacement:
    given = {field_.name: getattr(place, field_.name) for field_ in fields(place)}
    return ArenaPlacement(**{**given, "device": device, "arena": Arena(buffer)})


class Conveyor:
    """Brings layers to the device in turn, the first again after the last, always as many ahead as there are slots."""

    def __init__(self, hosts: Sequence[torch.Tensor], slots: Sequence[torch.Tensor], device: torch.device) -> None:
        self._hosts, self._slots = hosts, slots
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._device = device
        self._filled = [torch.cuda.Event() for _ in slots] if self._stream is not None else []
        if self._stream is not None:
            weakref.finalize(self, _unpin, list(hosts)).atexit = False
        self._turn = 0
        """Layers called for so far, since the last start."""
        self._first: int | None = None
        """The layer that was called for at that start; None: nothing was brought yet."""

    def arrive(self, layer: int) -> int:
        """The slot that holds a layer, for work queued from now on."""
        if self._first is None or (self._first + self._turn) % len(self._hosts) != layer:
            # The first call, or a step that ended in the middle.
            self._first, self._turn = layer, 0
            for ahead in range(len(self._slots)):
                self._bring(layer + ahead, ahead)
        slot = self._turn % len(self._slots)
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_event(self._filled[slot])
        return slot

    def leave(self, layer: int) -> None:
        """All that reads the slot has been queued: behind it, the slot takes the next layer."""
        self._bring(layer + len(self._slots), self._turn % len(self._slots))
        self._turn += 1

    def _bring(self, layer: int, slot: int) -> None:
        host = self._hosts[layer % len(self._hosts)]
        place = self._slots[slot][: len(host)]
        if self._stream is None:
            place.copy_(host)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            place.copy_(host, non_blocking=True)
            self._filled[slot].record(self._stream)


class OffloadedLayer:
    """Called like any layer, and loaded like any; computes in whichever slot its weights arrive."""

    def __init__(self, number: int, host: Layer, staged: Sequence[Layer], conveyor: Conveyor) -> None:
        self._number, self._host, self._staged, self._conveyor = number, host, staged, conveyor

    def parameters(self) -> Iterator[Parameter]:
        return self._host.parameters()

    def __call__(self, x: torch.Tensor | None, residual: torch.Tensor, angles: Any, attention: Any) -> Flow:
        layer = self._staged[self._conveyor.arrive(self._number)]
        out = layer(x, residual, angles, attention)
        self._conveyor.leave(self._number)
        return out


class Offload:
    """Makes the layers of a decoder, the last `count` of them offloaded; to be given to `Decoder`."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._offloaded: list[OffloadedLayer] = []

    def make_layer(self, spec: DecoderSpec, index: int, ropes: Sequence[Rope], place: Placement) -> DecoderLayer:
        number = index - (len(spec.layers) - self._count)
        if number < 0:
            return Layer(spec, index, ropes, place)
        if not self._offloaded:
            first = len(spec.layers) - self._count

            def build(number: int, inside: Placement) -> Layer:
                return Layer(spec, first + number, ropes, inside)

            self._offloaded = build_offloaded(build, self._count, place)
        return self._offloaded[number]


def build_offloaded(build: BuildLayer, count: int, place: Placement) -> list[OffloadedLayer]:
    sizes = [_measure(build, number, place) for number in range(count)]
    hosts = [_host_memory(size, pinned=place.device.type == "cuda") for size in sizes]
    slots = [torch.empty(max(sizes), dtype=torch.uint8, device=place.device) for _ in range(min(STAGING_SLOTS, count))]
    conveyor = Conveyor(hosts, slots, place.device)
    offloaded = []
    for number, memory in enumerate(hosts):
        host = build(number, _inside(place, torch.device("cpu"), memory))
        staged = [build(number, _inside(place, place.device, slot)) for slot in slots]
        offloaded.append(OffloadedLayer(number, host, staged, conveyor))
    return offloaded


def _measure(build: BuildLayer, number: int, place: Placement) -> int:
    inside = _inside(place, torch.device("meta"), None)
    build(number, inside)
    return inside.arena.used


def _host_memory(size: int, pinned: bool) -> torch.Tensor:
    """torch's own pinned memory comes in powers of two, up to twice as much; this is pinned as it is."""
    memory = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
    if pinned:
        failure = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), size, 0)
        if int(failure) != 0:
            logger.warning("%.2f GiB of host memory could not be pinned (%s): copies wait", size / 2**30, failure)
    return memory


def _unpin(memories: list[torch.Tensor]) -> None:
    """Memory that is given back while CUDA still counts it as pinned could not be pinned again."""
    for memory in memories:
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())

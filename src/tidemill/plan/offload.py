"""Which layers stay in host memory: as many of the last ones as free what was asked for. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tidemill.errors import ConfigError, OutOfMemory
from tidemill.hardware import Hardware
from tidemill.plan.memory import GIB
from tidemill.plan.parts import RUNTIME_BYTES

STAGING_SLOTS = 2
"""Layers kept in host memory pass through so many places on the device."""


@dataclass(frozen=True)
class Offload:
    """How many of the last layers stay in host memory, and what that costs where."""

    layers: int = 0
    host_bytes: int = 0
    staging_bytes: int = 0

    @property
    def freed_bytes(self) -> int:
        """By how much less the device holds."""
        return self.host_bytes - self.staging_bytes


def plan_offload(layer_bytes: Sequence[int], wanted: int) -> Offload:
    """The fewest last layers whose leaving frees `wanted` bytes of the device, places to pass through deducted; all of
    them where that is not enough."""
    found = Offload()
    for layers in range(1, len(layer_bytes) + 1):
        if found.freed_bytes >= wanted:
            break
        streamed = layer_bytes[-layers:]
        found = Offload(layers, sum(streamed), min(STAGING_SLOTS, layers) * max(streamed))
    return found


def choose_offload(
    asked: float, layers: Sequence[int] | None, hardware: Hardware, *, on_cpu: str | None
) -> tuple[Offload, str | None]:
    """What --cpu-offload-gb comes to and the reason to tell. `layers`: bytes of each, None where they are not ours to
    move; `on_cpu`: why no card is used, None where one is."""
    if not 0 <= asked < float("inf"):
        raise ConfigError(
            f"cpu_offload_gb must be 0 or more GiB, got {asked}", param="cpu_offload_gb", fix="--cpu-offload-gb 4"
        )
    if asked == 0:
        return Offload(), None
    if on_cpu is not None or layers is None:
        cause = (
            f"on a CPU there is no other memory to use, and this runs on one: {on_cpu}"
            if on_cpu is not None
            else "a model that runs through transformers' own code keeps its layers itself"
        )
        raise ConfigError(
            f"cpu_offload_gb is {asked:g}, which cannot be followed",
            param="cpu_offload_gb",
            cause=cause,
            fix="leave --cpu-offload-gb out",
        )
    offload = plan_offload(layers, int(asked * GIB))
    if offload.host_bytes > hardware.available_bytes - RUNTIME_BYTES:
        raise OutOfMemory(
            f"cpu_offload_gb: {offload.layers} layers of {offload.host_bytes / GIB:.2f} GiB do not fit in host memory",
            param="cpu_offload_gb",
            cause=f"{hardware.available_bytes / GIB:.2f} GiB are available ({hardware.memory_why})",
            fix=f"--cpu-offload-gb {max(0, hardware.available_bytes - RUNTIME_BYTES - offload.staging_bytes) // GIB}",
        )
    reason = f"the card holds {offload.freed_bytes / GIB:.2f} GiB less, as asked for"
    if offload.freed_bytes < int(asked * GIB):
        reason = (
            f"{asked:g} GiB were asked for; with all layers in host memory and two of them passing through, the card "
            f"holds {max(0, offload.freed_bytes) / GIB:.2f} GiB less"
        )
    return offload, reason

"""What a format says about one matrix of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from tidemill.quant.scheme import Scheme

if TYPE_CHECKING:
    import torch

    from tidemill.quant.stored import StoredMatrix

Read = Callable[[str], "torch.Tensor"]


class Stored(Protocol):
    """A tensor of the directory; `dtype` as safetensors spells it."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> str: ...

    @property
    def file(self) -> str: ...


Directory = Mapping[str, Stored]


@dataclass(frozen=True)
class QuantisedMatrix:
    shape: tuple[int, int]
    """(outputs, inputs) of the dense matrix."""
    scheme: Scheme | None
    """How it stays in memory; None: no kernel reads it so, and it is widened while loading."""
    kind: str
    """For people: 'AWQ, 4 bits in groups of 128'."""
    tensors: tuple[str, ...]
    """What the file holds it as."""
    read: Callable[[Read], StoredMatrix]
    """From the named tensors, which the argument gives."""

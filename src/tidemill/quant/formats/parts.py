"""The tensors beside a quantised matrix: found by name, checked from headers; and scales as one per row and group.

Knows no format: all of them share it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tidemill.errors import BadCheckpoint
from tidemill.quant.formats.matrix import Directory, Stored

if TYPE_CHECKING:
    import torch

FLOATS = ("F32", "F16", "BF16", "F64")
EXPONENTS = ("U8", "F8_E8M0")
"""Scales that are powers of two are stored as their exponents."""
NOT_READ = (
    *(f".{part}_{kind}" for part in ("q", "k", "v", "kv", "output") for kind in ("scale", "zero_point")),
    *(f".{part}_global_scale" for part in ("q", "k", "v")),
)
"""How tensors end that are about rounding keys, values or outputs, which the engine rounds as it is told to itself."""
AGAIN = "download the checkpoint again, or serve the unquantised model with --quantization"


@dataclass(frozen=True)
class Module:
    """A module whose weight is stored quantised, in some tensors of its name."""

    name: str
    weight: str
    """What holds its codes."""
    tensors: Directory
    origin: str

    @property
    def stored(self) -> Stored:
        return self.tensors[self.weight]

    def required(self, part: str, what: str) -> tuple[str, Stored]:
        """The full name of a tensor, and what the header says about it."""
        name = f"{self.name}.{part}"
        return name, required(self.tensors, name, self.weight, what, self.origin)

    def present(self, *parts: str) -> tuple[str, ...]:
        """The full names of those that the checkpoint has."""
        return tuple(f"{self.name}.{part}" for part in parts if f"{self.name}.{part}" in self.tensors)


def required(tensors: Directory, name: str, matrix: str, what: str, origin: str) -> Stored:
    """`matrix` is a tensor that is there and means nothing without this one."""
    found = tensors.get(name)
    if found is None:
        raise BadCheckpoint(
            f"{origin}: {matrix} is quantised but its {what} are missing: there is no {name}",
            cause=f"{tensors[matrix].file} holds {matrix} as {tensors[matrix].dtype}",
            fix=AGAIN,
        )
    return found


def expect(name: str, stored: Stored, shape: tuple[int, ...], dtypes: tuple[str, ...], origin: str, why: str) -> None:
    expect_dtype(name, stored, dtypes, origin)
    if stored.shape != shape:
        raise wrong_shape(name, stored, shape, origin, why)


def expect_dtype(name: str, stored: Stored, dtypes: tuple[str, ...], origin: str) -> None:
    if stored.dtype not in dtypes:
        raise BadCheckpoint(
            f"{origin}: {name} is {stored.dtype}, expected {' or '.join(dtypes)}", cause=stored.file, fix=AGAIN
        )


def wrong_shape(name: str, stored: Stored, shape: tuple[int, ...], origin: str, why: str) -> BadCheckpoint:
    return BadCheckpoint(
        f"{origin}: {name} has shape {list(stored.shape)}, expected {list(shape)}",
        cause=f"{why}; {stored.file}",
        fix=AGAIN,
    )


@dataclass(frozen=True)
class Grid:
    """One scale for `rows` outputs and `columns` inputs; None: for all of them."""

    rows: int | None
    columns: int | None

    def counts(self, outputs: int, inputs: int) -> tuple[int, int]:
        """The last block of either may be smaller."""
        return -(-outputs // (self.rows or outputs)), -(-inputs // (self.columns or inputs))

    def check(self, name: str, stored: Stored, outputs: int, inputs: int, origin: str) -> None:
        """A scale per row may be stored as a vector, a single one as anything that holds one number."""
        rows, columns = self.counts(outputs, inputs)
        vector = columns == 1 and stored.shape == (rows,)
        single = rows * columns == 1 and stored.shape in ((), (1,))
        if stored.shape != (rows, columns) and not vector and not single:
            raise wrong_shape(name, stored, (rows, columns), origin, f"{self} of a matrix of {outputs} x {inputs}")

    def group_size(self, inputs: int) -> int | None:
        return None if self.columns is None or self.columns >= inputs else self.columns

    def per_row(self, numbers: torch.Tensor, outputs: int, inputs: int) -> torch.Tensor:
        """Scales or zeros as [outputs, groups]."""
        grid = numbers.reshape(self.counts(outputs, inputs))
        return grid.repeat_interleave(self.rows or outputs, dim=0)[:outputs]

    def __str__(self) -> str:
        if self.rows is None:
            return "one scale for the whole matrix"
        if self.rows > 1:
            return f"scales of blocks of {self.rows} x {self.columns}"
        return "a scale per row" if self.columns is None else f"scales of groups of {self.columns}"


def scales_of(stored: torch.Tensor) -> torch.Tensor:
    """float32. Of stored exponents the highest stands for no number."""
    import torch

    if stored.dtype in (torch.uint8, torch.float8_e8m0fnu):
        exponents = stored.view(torch.uint8).float() - 127
        return torch.exp2(exponents).masked_fill_(exponents == 128, torch.nan)
    return stored.float()

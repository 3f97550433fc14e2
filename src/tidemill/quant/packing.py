"""Which matrices of a model are packed, into which scheme, and how many bytes they take: for layers and planning alike.

Torch-free. Knows matrices by name and shape, neither files nor models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from tidemill.quant.scheme import INT8, Layout, Scheme, applies

Use = Literal["linear", "table", "expert"]
"""A linear layer's matrix; an embedding or a head; an expert that tokens are routed to."""


@dataclass(frozen=True)
class Matrix:
    name: str
    """As the checkpoint has it, with `.weight`."""
    outputs: int
    inputs: int
    use: Use = "linear"
    transposed: bool = False
    """Stored [inputs, outputs]: its groups would run the wrong way."""

    @property
    def numbers(self) -> int:
        return self.outputs * self.inputs


@dataclass(frozen=True)
class Packing:
    on_load: Scheme | None = None
    """Everything is rounded to this while it is loaded..."""
    stored: Mapping[str, Scheme] = field(default_factory=dict)
    """...or stays as it is stored, by name."""
    layout: Layout = "words"
    uses: frozenset[Use] = frozenset(("linear",))
    """What is packed at all: where the kernels are."""

    def scheme(self, matrix: Matrix) -> Scheme | None:
        """None: the matrix is dense."""
        if matrix.use not in self.uses:
            return None
        if self.on_load is None:
            return None if matrix.transposed else self.stored.get(matrix.name)
        # Rows of an embedding are read one by one, and a head decides between close numbers: 8 bits.
        wanted = INT8 if matrix.use == "table" and self.on_load.kind == "int" else self.on_load
        if matrix.use == "table" and wanted.kind == "fp8":
            return None
        return wanted.fitted(matrix.inputs) if applies(wanted, matrix.outputs, matrix.inputs) is None else None

    def nbytes(self, matrix: Matrix, dense_bytes: int) -> int:
        """`dense_bytes` is the size of one number where the matrix stays dense."""
        scheme = self.scheme(matrix)
        if scheme is None:
            return matrix.numbers * dense_bytes
        return scheme.bytes_for(matrix.outputs, matrix.inputs, self.layout)


DENSE = Packing()

"""Integers of a compressed-tensors checkpoint: packed into words of 32 bits, or one to a byte.

Packed ones are unsigned: what a file means by a code is 2^(bits - 1) less. So it is with packed zero points, which lie
along outputs. Codes fill words without a gap, going across their borders; before release 0.18 of the package a word had
as many whole codes as it holds, which is the same for 1, 2, 4 and 8 bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tidemill.errors import BadCheckpoint
from tidemill.quant.formats.compressed_config import Weights
from tidemill.quant.formats.matrix import Read, Stored
from tidemill.quant.formats.parts import AGAIN, FLOATS, Grid, Module, expect, expect_dtype

if TYPE_CHECKING:
    import torch

    from tidemill.quant.stored import StoredMatrix

WORD = 32
CODES_AT_A_TIME = 2**22
"""Codes that cross words are gathered as numbers of 64 bits."""


@dataclass(frozen=True)
class Integers:
    """The tensors of one matrix, which fit each other as far as headers tell."""

    shape: tuple[int, int]
    codes: str
    packed: bool
    gaps: bool
    """A word of packed codes has whole ones only."""
    bits: int
    grid: Grid
    scales: str
    zeros: str | None
    zeros_packed: bool
    order: str | None
    """The group of each input."""
    stored_shape: str | None
    origin: str

    @property
    def tensors(self) -> tuple[str, ...]:
        names = (self.codes, self.scales, self.zeros, self.order, self.stored_shape)
        return tuple(name for name in names if name is not None)

    def read(self, read: Read) -> StoredMatrix:
        from tidemill.quant.stored import StoredMatrix

        outputs, inputs = self.shape
        said = list(self.shape) if self.stored_shape is None else read(self.stored_shape).tolist()
        if said != list(self.shape):
            raise self._wrong(f"{self.stored_shape} says {said}")
        codes = self._unsigned(read(self.codes), self.packed)
        scales = self.grid.per_row(read(self.scales).float(), outputs, inputs)
        size, order = self.grid.group_size(inputs), None
        if self.order is not None:
            order = self._in_groups(read(self.order).long(), size)
            codes = codes[:, order]
        if self.zeros is None:
            return StoredMatrix(self._signed(codes), scales, None, size, order=order)
        if self.zeros_packed:
            zeros = unpack(read(self.zeros).t(), self.bits, outputs, self.gaps).t()
        else:
            zeros = self.grid.per_row(self._unsigned(read(self.zeros), packed=False), outputs, inputs)
        if self.bits > 4:
            codes, zeros = self._signed(codes), self._signed(zeros)
        return StoredMatrix(codes, scales, -zeros.float() * scales, size, order=order)

    def _signed(self, codes: torch.Tensor) -> torch.Tensor:
        import torch

        # Where an unsigned byte is too small, it wraps around to what a signed one means.
        return (codes - 2 ** (self.bits - 1)).view(torch.int8)

    def _unsigned(self, stored: torch.Tensor, packed: bool) -> torch.Tensor:
        import torch

        if packed:
            return unpack(stored, self.bits, self.shape[1], self.gaps)
        codes = stored.view(torch.uint8) + 2 ** (self.bits - 1)
        if codes.numel() and int(codes.max()) >= 2**self.bits:
            raise self._wrong(f"it has numbers that {self.bits} bits do not hold")
        return codes

    def _in_groups(self, group_of: torch.Tensor, size: int | None) -> torch.Tensor:
        """The order in which inputs of a group follow each other."""
        import torch

        if bool((group_of < 0).any()):
            # The package's writer leaves it at -1 where it has not moved anything.
            return torch.arange(self.shape[1])
        order = torch.argsort(group_of, stable=True)
        expected = torch.arange(self.shape[1]) // (size or self.shape[1])
        if not torch.equal(group_of[order].cpu(), expected):
            raise self._wrong(f"{self.order} does not give every group {size or self.shape[1]} inputs")
        return order

    def _wrong(self, what: str) -> BadCheckpoint:
        return BadCheckpoint(
            f"{self.origin}: {self.codes} is no matrix of {self.shape[0]} x {self.shape[1]}: {what}",
            cause=f"{self.bits} bits, {self.grid}",
            fix=AGAIN,
        )


def integers(module: Module, weights: Weights, group: str) -> Integers:
    """Checked from headers."""
    name, scales = module.required("weight_scale", "scales")
    expect_dtype(name, scales, FLOATS, module.origin)
    packed = module.stored.dtype == "I32"
    shape = module.stored.shape[0], _inputs(module, weights, scales) if packed else module.stored.shape[1]
    gaps = packed and module.stored.shape[1] != _words(shape[1], weights.bits, gaps=False)
    size = weights.grid.group_size(shape[1])
    if weights.grid.rows == 1 and size is not None and shape[1] % size:
        raise BadCheckpoint(
            f"{module.origin}: groups of {size} do not divide the {shape[1]} inputs of {module.weight}",
            cause=f"config_groups.{group}.weights.group_size; {module.stored.file}",
            fix="quantise the model again with groups that divide them, or with this layer in the ignore list",
        )
    weights.grid.check(name, scales, *shape, module.origin)
    # A file that has zero points means them, whatever its config calls its numbers.
    has_zeros = not weights.symmetric or bool(module.present("weight_zero_point"))
    zeros, zeros_packed = _zeros(module, weights, shape, packed, gaps) if has_zeros else (None, False)
    order = next(iter(module.present("weight_g_idx")), None)
    if order is not None:
        why = f"the group of each input of {module.weight}"
        expect(order, module.tensors[order], (shape[1],), ("I32", "I64"), module.origin, why)
    stored_shape = next(iter(module.present("weight_shape")), None)
    if stored_shape is not None:
        why = f"outputs and inputs of {module.weight}"
        expect(stored_shape, module.tensors[stored_shape], (2,), ("I32", "I64"), module.origin, why)
    return Integers(
        shape,
        module.weight,
        packed,
        gaps,
        weights.bits,
        weights.grid,
        name,
        zeros,
        zeros_packed,
        order,
        stored_shape,
        module.origin,
    )


def _inputs(module: Module, weights: Weights, scales: Stored) -> int:
    """Headers hold the words of a row only, so the last word may be full or not."""
    words, per_group = module.stored.shape[1], weights.grid.columns
    if per_group is not None and len(scales.shape) == 2:
        inputs = scales.shape[1] * per_group
        if words in (_words(inputs, weights.bits, gaps=False), _words(inputs, weights.bits, gaps=True)):
            return inputs
    fewest, most = (words - 1) * WORD // weights.bits + 1, words * WORD // weights.bits
    # Models have round sizes: of those that fill so many words, the one with the most factors of two.
    return max(range(fewest, most + 1), key=lambda inputs: inputs & -inputs, default=0)


def _zeros(module: Module, weights: Weights, shape: tuple[int, int], packed: bool, gaps: bool) -> tuple[str, bool]:
    name, stored = module.required("weight_zero_point", "zero points")
    if not packed or stored.dtype == "I8":
        expect_dtype(name, stored, ("I8",), module.origin)
        weights.grid.check(name, stored, *shape, module.origin)
        return name, False
    groups = weights.grid.counts(*shape)[1]
    why = f"zero points of {shape[0]} outputs, {weights.bits} bits each, and {groups} groups"
    expect(name, stored, (_words(shape[0], weights.bits, gaps), groups), ("I32",), module.origin, why)
    return name, True


def _words(codes: int, bits: int, gaps: bool) -> int:
    """How many hold so many codes."""
    return -(-codes // (WORD // bits)) if gaps else -(-codes * bits // WORD)


def unpack(words: torch.Tensor, bits: int, count: int, gaps: bool) -> torch.Tensor:
    """uint8 [rows, count] of int32 [rows, words]."""
    import torch

    rows = words.shape[0]
    if 8 % bits == 0:
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=words.device)
        bytes_ = words.contiguous().view(torch.uint8)
        return ((bytes_[:, :, None] >> shifts) & (2**bits - 1)).view(rows, -1)[:, :count]
    index = torch.arange(count, device=words.device)
    if gaps:
        first, shift = index // (WORD // bits), index % (WORD // bits) * bits
    else:
        first, shift = index * bits // WORD, index * bits % WORD
    codes = torch.empty((rows, count), dtype=torch.uint8, device=words.device)
    step = max(1, CODES_AT_A_TIME // count)
    for start in range(0, rows, step):
        wide = torch.nn.functional.pad(words[start : start + step].long() & (2**WORD - 1), (0, 1))
        pair = wide[:, first] | (wide[:, first + 1] << WORD)
        codes[start : start + step] = (pair >> shift) & (2**bits - 1)
    return codes

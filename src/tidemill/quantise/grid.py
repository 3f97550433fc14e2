"""Numbers that a quantised matrix can hold, and rounding to the nearest of them.

number = (code - zero) * scale, with one scale per group of inputs, or per row; zeros are 0 unless the grid is
asymmetric, which fits groups better that lie to one side. Of a few ranges, each group takes the one with the least
error: of the weights themselves, or, where the layer's inputs are known, of what they produce.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

SHARES = tuple(1.0 - 0.05 * step for step in range(9))
"""Ranges of four bits, as shares of the largest number..."""
FINE_SHARES = (1.0, 0.97, 0.94, 0.9)
"""...and of eight."""
SMALLEST_SCALE = 2.0**-24
FP8_LARGEST = 448.0
NUMBERS_AT_A_TIME = 2**22


@dataclass(frozen=True)
class Grid:
    kind: Literal["int", "fp8"]
    bits: int
    group_size: int | None
    """None: a whole row."""
    scale_dtype: torch.dtype
    """Codes are chosen for scales as they are stored."""
    asymmetric: bool = False

    @property
    def highest(self) -> float:
        return FP8_LARGEST if self.kind == "fp8" else float(2 ** (self.bits - 1) - 1)

    @property
    def shares(self) -> tuple[float, ...]:
        if self.kind == "fp8":
            # Floating point is as fine below as above: cutting gains nothing.
            return (1.0,)
        return SHARES if self.bits < 8 else FINE_SHARES

    def groups(self, inputs: int) -> int:
        return 1 if self.group_size is None else inputs // self.group_size

    def nearest(self, scaled: torch.Tensor) -> torch.Tensor:
        """Codes, as float32."""
        if self.kind == "fp8":
            return scaled.clamp(-self.highest, self.highest).to(torch.float8_e4m3fn).float()
        return scaled.round().clamp_(-self.highest - 1, self.highest)

    def steps_for(self, low: torch.Tensor, high: torch.Tensor) -> Steps:
        """Scales and zeros that put these numbers at the ends of the range."""
        if not self.asymmetric:
            return Steps(self._stored(torch.maximum(-low, high) / self.highest), None)
        scales = self._stored((high - low) / (2 * self.highest + 1))
        return Steps(scales, self.nearest(-self.highest - 1 - low / scales))

    def _stored(self, scales: torch.Tensor) -> torch.Tensor:
        return scales.clamp_(min=SMALLEST_SCALE).to(self.scale_dtype).float()


@dataclass(frozen=True)
class Steps:
    """[outputs, groups] each, float32."""

    scales: torch.Tensor
    zeros: torch.Tensor | None

    def spread(self, inputs: int) -> tuple[torch.Tensor, torch.Tensor | float]:
        """Per number of a matrix."""
        times = inputs // self.scales.shape[1]
        zeros = 0.0 if self.zeros is None else self.zeros.repeat_interleave(times, dim=1)
        return self.scales.repeat_interleave(times, dim=1), zeros

    def rows(self, index: slice | torch.Tensor) -> Steps:
        return Steps(self.scales[index], None if self.zeros is None else self.zeros[index])


@dataclass(frozen=True)
class Rounded:
    codes: torch.Tensor
    """[outputs, inputs] float32, each one of the grid's numbers."""
    steps: Steps

    def dense(self) -> torch.Tensor:
        scales, zeros = self.steps.spread(self.codes.shape[1])
        return (self.codes - zeros) * scales

    def rows(self, index: slice | torch.Tensor) -> Rounded:
        return Rounded(self.codes[index], self.steps.rows(index))


def choose_steps(weight: torch.Tensor, grid: Grid, gram: torch.Tensor | None = None) -> Steps:
    """Per group, those of least error; `gram` [inputs, inputs] is the sum of xᵀx over the layer's inputs."""
    step = max(1, NUMBERS_AT_A_TIME // weight.shape[1])
    found = [_choose(weight[start : start + step], grid, gram) for start in range(0, len(weight), step)]
    zeros = [part.zeros for part in found if part.zeros is not None]
    return Steps(torch.cat([part.scales for part in found]), torch.cat(zeros) if zeros else None)


def _choose(weight: torch.Tensor, grid: Grid, gram: torch.Tensor | None) -> Steps:
    grouped = weight.view(len(weight), grid.groups(weight.shape[1]), -1)
    # A range holds zero, so that its code is one of the grid's.
    low, high = grouped.amin(dim=-1).clamp_(max=0), grouped.amax(dim=-1).clamp_(min=0)
    best = grid.steps_for(low, high)
    least = _error(_off(grouped, grid, best), gram)
    for share in grid.shares[1:]:
        steps = grid.steps_for(low * share, high * share)
        error = _error(_off(grouped, grid, steps), gram)
        better = error < least
        zeros = None
        if best.zeros is not None and steps.zeros is not None:
            zeros = torch.where(better, steps.zeros, best.zeros)
        best = Steps(torch.where(better, steps.scales, best.scales), zeros)
        least = torch.minimum(error, least)
    return best


def _off(grouped: torch.Tensor, grid: Grid, steps: Steps) -> torch.Tensor:
    scales, zeros = steps.scales[..., None], 0.0 if steps.zeros is None else steps.zeros[..., None]
    return grid.nearest(grouped / scales + zeros).sub_(zeros).mul_(scales).sub_(grouped)


def _error(off: torch.Tensor, gram: torch.Tensor | None) -> torch.Tensor:
    """Of every group [rows, groups, inputs of it], as if the others were exact."""
    if gram is None:
        return off.square().sum(dim=-1)
    _, groups, size = off.shape
    if groups == 1:
        return (off.square() * gram.diagonal()).sum(dim=-1)
    blocks = gram.view(groups, size, groups, size).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    by_group = off.transpose(0, 1)
    return (torch.bmm(by_group, blocks) * by_group).sum(dim=-1).t()


def round_to_nearest(weight: torch.Tensor, grid: Grid, gram: torch.Tensor | None = None) -> Rounded:
    steps = choose_steps(weight, grid, gram)
    scales, zeros = steps.spread(weight.shape[1])
    return Rounded(grid.nearest(weight / scales + zeros), steps)


def output_error(off: torch.Tensor, gram: torch.Tensor) -> float:
    """Squared difference, over all inputs the gram was made of, of what a matrix that is off by so much produces."""
    return float(((off @ gram) * off).sum())

"""AWQ: inputs that matter get finer weights, by a scale that is folded into what comes before.

After Lin et al., "AWQ: Activation-aware Weight Quantization": a column whose inputs are large is multiplied by s before
rounding and its input divided by s, so that its error shrinks. s is a power of the input's magnitude; which power is
searched for by the error of the layer's output, and no scale at all is among the candidates.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tidemill.quantise.grid import Grid, output_error, round_to_nearest
from tidemill.quantise.sites import Fold

POWERS = tuple(step / 12 for step in range(1, 13))
SMALLEST = 1e-4


def find_scales(
    weights: Sequence[torch.Tensor], gram: torch.Tensor, squares: torch.Tensor, grid: Grid
) -> torch.Tensor | None:
    """The s [inputs] of least error for matrices that share their input; None where none is better than no scale.

    `gram` is the sum of xᵀx, `squares` its diagonal as s may follow it."""
    weight = torch.cat(tuple(weights)) if len(weights) > 1 else weights[0]
    magnitudes = squares.sqrt()
    magnitudes = magnitudes / magnitudes.mean().clamp(min=SMALLEST)
    best, least = None, output_error(round_to_nearest(weight, grid, gram).dense() - weight, gram)
    for power in POWERS:
        s = magnitudes.clamp(min=SMALLEST) ** power
        s = s / (s.max() * s.min()).sqrt()
        rounded = round_to_nearest(weight * s, grid, gram / torch.outer(s, s))
        error = output_error(rounded.dense() / s - weight, gram)
        if error < least:
            best, least = s, error
    return best


def fold(folded: Fold, grid: Grid) -> bool:
    """Finds s for the readers of one input and moves it before them; says whether there was one worth it."""
    gram = folded.readers[0].gram
    if gram is None or not bool((gram.diagonal() > 0).any()):
        return False
    squares = gram.diagonal() if folded.shared is None else folded.shared(gram.diagonal())
    s = find_scales([reader.dense for reader in folded.readers], gram, squares, grid)
    if s is None:
        return False
    real = folded.divide(s)
    for reader in folded.readers:
        reader.dense.mul_(real)
        assert reader.gram is not None
        reader.gram = reader.gram / torch.outer(real, real)
    return True

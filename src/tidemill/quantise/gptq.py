"""GPTQ: columns are rounded one by one, and what is lost in one is made up for by those not yet rounded.

After Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers": the inverse
of the inputs' second moments tells how an error in one column is best spread over the others; its Cholesky factor gives
all the inverses that the elimination needs. Columns go by falling weight of their inputs. Scales are chosen before, for
groups of neighbouring columns, so that whoever reads the result needs no order.
"""

from __future__ import annotations

import torch

from tidemill.errors import TidemillError
from tidemill.quantise.grid import Grid, Rounded, choose_steps

BLOCK = 128
DAMPING = 0.05
"""More than the usual 0.01: with few samples, the tail of the second moments is noise."""
TRIES = 4


def gptq(weight: torch.Tensor, grid: Grid, gram: torch.Tensor, damping: float = DAMPING) -> Rounded:
    """`gram` [inputs, inputs] is the sum of xᵀx over what the layer is given."""
    steps = choose_steps(weight, grid, gram)
    # Inputs that are never there cannot be made up for, and need not be.
    never = gram.diagonal() <= 0
    order = torch.argsort(gram.diagonal(), descending=True, stable=True)
    factor = _inverse_factor(gram[order][:, order], never[order], damping)
    # A column of the matrix lies as a row here, so that it is read at once.
    left = weight.t()[order].contiguous()
    codes = torch.empty_like(left)
    group = order // (weight.shape[1] // steps.scales.shape[1])
    scales = steps.scales.t()[group]
    zeros = torch.zeros_like(scales) if steps.zeros is None else steps.zeros.t()[group]
    for start in range(0, len(left), BLOCK):
        stop = min(start + BLOCK, len(left))
        errors = torch.empty_like(left[start:stop])
        for column in range(start, stop):
            code = grid.nearest(left[column] / scales[column] + zeros[column])
            codes[column] = code
            error = (left[column] - (code - zeros[column]) * scales[column]) / factor[column, column]
            left[column:stop] -= torch.outer(factor[column, column:stop], error)
            errors[column - start] = error
        left[stop:] -= factor[start:stop, stop:].t() @ errors
    stored = torch.empty_like(weight)
    stored[:, order] = codes.t()
    return Rounded(stored, steps)


def _inverse_factor(gram: torch.Tensor, never: torch.Tensor, damping: float) -> torch.Tensor:
    """The upper Cholesky factor of the inverse."""
    gram = gram.clone()
    diagonal = gram.diagonal()
    diagonal[never] = 1.0
    mean = float(diagonal[~never].mean()) if not bool(never.all()) else 1.0
    for attempt in range(TRIES):
        damped = gram.clone()
        damped.diagonal().add_(damping * 10**attempt * mean)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if int(failed):
            continue
        upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
        if not int(failed) and bool(torch.isfinite(upper).all()):
            return upper
    raise TidemillError(
        "gptq cannot invert the second moments of a layer's inputs",
        cause=f"even {damping * 10 ** (TRIES - 1):g} of their mean added to the diagonal does not make them definite",
        fix="calibrate on more text (--samples), or use --method awq or rtn",
    )

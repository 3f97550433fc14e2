"""One layer: from dense weights and what was seen of its inputs to the tensors that are stored, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from tidemill.layers.parameter import Parameter
from tidemill.models.decoder import Layer
from tidemill.quantise.awq import fold
from tidemill.quantise.compressed import dense_of, is_quantised, tensors_of
from tidemill.quantise.gptq import gptq
from tidemill.quantise.grid import FP8_LARGEST, Grid, Rounded, round_to_nearest
from tidemill.quantise.settings import Target
from tidemill.quantise.sites import Sites, Watched
from tidemill.quantise.source import Source

INT8_LARGEST = 127.5
"""Half of the range, as compressed-tensors counts it."""


@dataclass(frozen=True)
class Recipe:
    target: Target
    grid: Grid
    method: str
    chosen: frozenset[str]
    """Prefixes of the matrices that are quantised."""

    @property
    def looks_at_inputs(self) -> bool:
        return self.method != "rtn"


def quantise_layer(layer: Layer, sites: Sites, source: Source, recipe: Recipe) -> dict[str, torch.Tensor]:
    """All tensors of the layer, as they are stored. What the linear layers saw is forgotten on the way."""
    changed: dict[str, torch.Tensor] = {}
    if recipe.method == "awq":
        for folded in sites.folds:
            involved = (*folded.readers, *(() if folded.maker is None else (folded.maker,)))
            # A matrix that stays dense is stored as it was.
            if all(prefix in recipe.chosen for linear in involved for prefix in linear.parts):
                fold(folded, recipe.grid)
        changed = _folded_into(layer, sites)
    tensors: dict[str, torch.Tensor] = {}
    for linear in sites.linears:
        if not recipe.chosen.isdisjoint(linear.parts):
            rounded = _round(linear, recipe)
            for prefix, rows, order in linear.prefixes():
                if prefix in recipe.chosen:
                    part = rounded.rows(rows)
                    if order is not None:
                        part = part.rows(torch.argsort(order).to(part.codes.device))
                    tensors |= tensors_of(prefix, part, recipe.grid, recipe.target)
        linear.gram = None
    for parameter in layer.parameters():
        name = parameter.name
        if not is_quantised(name.removesuffix(".weight"), tensors):
            tensors[name] = changed[name].to(source.dtype_of(name)).cpu() if name in changed else source.kept(name)
    return tensors


def _round(linear: Watched, recipe: Recipe) -> Rounded:
    if recipe.method == "gptq" and linear.gram is not None:
        return gptq(linear.dense, recipe.grid, linear.gram)
    return round_to_nearest(linear.dense, recipe.grid, linear.gram)


def _folded_into(layer: Layer, sites: Sites) -> dict[str, torch.Tensor]:
    """Norms and biases as they are now, by name."""
    found: dict[str, torch.Tensor] = {}
    for norm in (layer.input_norm, layer.mlp_norm):
        if norm is not None and norm.spec.learned:
            found[f"{norm.name}.weight"] = norm.weight - (1.0 if norm.spec.unit_offset else 0.0)
            if norm.bias is not None:
                found[f"{norm.name}.bias"] = norm.bias
    for linear in sites.linears:
        for prefix, rows, order in linear.prefixes():
            if linear.bias is not None:
                part = linear.bias[rows]
                found[f"{prefix}.bias"] = part if order is None else part[torch.argsort(order).to(part.device)]
    return found


def refill(parameters: list[Parameter], tensors: Mapping[str, torch.Tensor], recipe: Recipe) -> None:
    """A layer as whoever reads the stored tensors computes it."""
    for parameter in parameters:
        prefix = parameter.name.removesuffix(".weight")
        if prefix != parameter.name and is_quantised(prefix, tensors):
            parameter.fill(dense_of(prefix, tensors, recipe.grid))
        else:
            parameter.fill(tensors[parameter.name])


def rounding_of_inputs(target: Target) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """What a reader does to the inputs of a linear layer, one scale per token; None: nothing."""
    if not target.activations:
        return None
    largest = FP8_LARGEST if target.kind == "fp8" else INT8_LARGEST

    def rounded(x: torch.Tensor) -> torch.Tensor:
        scales = (x.abs().amax(dim=-1, keepdim=True) / largest).clamp_(min=torch.finfo(torch.float32).tiny)
        scaled = x / scales
        if target.kind == "fp8":
            return scaled.to(torch.float8_e4m3fn).float() * scales
        return scaled.round_().clamp_(-128, 127) * scales

    return rounded

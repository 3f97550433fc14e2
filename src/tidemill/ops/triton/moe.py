"""A mixture of experts on the GPU: which of two ways computes it.

A few tokens hit each expert once at most, so their experts are read one (token, choice) pair after the other
(`moe_pairs.py`). More tokens share experts: their pairs are sorted, and each expert multiplies tiles of rows
(`moe_tiles.py`). The choice depends on shapes alone, so a step can be captured in a graph.
"""

from __future__ import annotations

import torch

from tidemill.ops.triton.moe_pairs import mix_by_pairs
from tidemill.ops.triton.moe_tiles import mix_by_tiles
from tidemill.ops.triton.tuning import launch_config


def mix_experts(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    activation: str,
) -> torch.Tensor:
    """As `reference.mix_experts`. The weighted outputs are added in float32, in the order of the choices."""
    x, experts, weights = x.contiguous(), experts.contiguous(), weights.contiguous()
    if len(x) == 0:
        return torch.empty_like(x)
    mix = mix_by_pairs if len(x) <= most_tokens_by_pairs(up, experts.shape[1]) else mix_by_tiles
    return mix(x, experts, weights, up, down, activation)


def most_tokens_by_pairs(up: torch.Tensor, top_k: int) -> int:
    """Beyond it, too many pairs share an expert, which would be read once for each of them."""
    default = {"tokens": max(1, len(up) // (4 * top_k))}
    return launch_config("moe_by_pairs", shape_key(up, top_k), default)["tokens"]


def shape_key(up: torch.Tensor, top_k: int) -> str:
    experts, both, width = up.shape
    return f"{width}x{both // 2}x{experts}x{top_k}"

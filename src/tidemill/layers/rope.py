"""Rotary position embedding with every scaling transformers knows.

Angles depend on the position, and for `dynamic` and `longrope` also on how long the sequence was when the token was
computed. transformers takes that length per forward pass; here it is per token, max(prompt length, position + 1), which
is the same for one sequence and does not change with batching, chunking or recomputation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from tidemill.errors import UnsupportedModel
from tidemill.layers.rope_config import ROPE_PARAMETERS, RopeConfig


@dataclass(frozen=True)
class Angles:
    """Of every token of a step: cos and sin, [tokens, dim / 2] each, in float32."""

    positions: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor


class Rope:
    def __init__(self, config: RopeConfig, max_len: int, device: torch.device) -> None:
        self.config = config
        self.device = device
        frequencies, self.scale = inverse_frequencies(config)
        self._table = self._cos_sin(frequencies.to(device), max_len)
        self._long_table = None
        if config.kind == "longrope":
            long_frequencies, _ = inverse_frequencies(config, long=True)
            self._long_table = self._cos_sin(long_frequencies.to(device), max_len)

    def angles(self, positions: torch.Tensor, lengths: torch.Tensor) -> Angles:
        """`lengths` is read only where the kind depends on it."""
        if self._long_table is not None:
            threshold = self.config.parameters["original_max_position_embeddings"]
            table = torch.where(
                (lengths > threshold)[:, None],
                self._long_table.index_select(0, positions),
                self._table.index_select(0, positions),
            )
        elif self.config.kind == "dynamic" and positions.is_cuda:
            # Both, as asking the GPU which of them is needed would wait for it.
            table = torch.where(
                (lengths > self.config.max_position)[:, None],
                self._dynamic(positions, lengths),
                self._table.index_select(0, positions),
            )
        elif self.config.kind == "dynamic" and bool((lengths > self.config.max_position).any()):
            table = self._dynamic(positions, lengths)
        else:
            table = self._table.index_select(0, positions)
        cos, sin = table.chunk(2, dim=-1)
        return Angles(positions, cos, sin)

    def _cos_sin(self, frequencies: torch.Tensor, max_len: int) -> torch.Tensor:
        # In place: a context of a million tokens has tables of half a gigabyte.
        table = torch.empty(max_len, 2 * len(frequencies), device=self.device)
        positions = torch.arange(max_len, device=self.device, dtype=torch.float32)
        cos, sin = table.chunk(2, dim=-1)
        torch.mul(positions[:, None], frequencies[None, :], out=sin)
        torch.cos(sin, out=cos)
        sin.sin_()
        return table.mul_(self.scale)

    def _dynamic(self, positions: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        config, dim = self.config, self.config.dim
        factor = float(config.parameters["factor"])
        stretched = factor * lengths.clamp(min=config.max_position).double() / config.max_position - (factor - 1)
        base = config.theta * stretched ** (dim / (dim - 2))
        exponents = torch.arange(0, dim, 2, device=self.device).float() / dim
        frequencies = 1.0 / (base.float()[:, None] ** exponents[None, :])
        angles = positions[:, None].float() * frequencies
        return torch.cat((angles.cos(), angles.sin()), dim=-1) * self.scale


def inverse_frequencies(config: RopeConfig, long: bool = False) -> tuple[torch.Tensor, float]:
    """The frequency of each pair of dimensions, and the factor on cos and sin."""
    exponents = torch.arange(0, config.dim, 2).float() / config.dim
    plain = 1.0 / (config.theta**exponents)
    parameters, kind = config.parameters, config.kind
    if kind in ("default", "dynamic"):
        return plain, 1.0
    if kind == "linear":
        return plain / parameters["factor"], 1.0
    if kind == "llama3":
        return _llama3(plain, parameters), 1.0
    if kind == "yarn":
        return _yarn(config, exponents)
    if kind == "longrope":
        return _longrope(config, exponents, long)
    if kind == "gguf_factors":
        return plain / torch.tensor(parameters["factors"], dtype=torch.float32), 1.0
    raise UnsupportedModel(f"rope type {kind!r} is not supported", cause=f"known are {', '.join(ROPE_PARAMETERS)}")


def _llama3(plain: torch.Tensor, parameters: Any) -> torch.Tensor:
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    original, factor = parameters["original_max_position_embeddings"], parameters["factor"]
    wavelength = 2 * math.pi / plain
    smooth = (original / wavelength - low) / (high - low)
    scaled = torch.where(wavelength > original / low, plain / factor, plain)
    between = (wavelength <= original / low) & (wavelength >= original / high)
    return torch.where(between, (1 - smooth) * scaled / factor + smooth * scaled, scaled)


def _yarn(config: RopeConfig, exponents: torch.Tensor) -> tuple[torch.Tensor, float]:
    parameters, dim = config.parameters, config.dim
    original = parameters["original_max_position_embeddings"]
    factor = parameters.get("factor") or config.max_position / original

    def magnitude(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    scale = parameters.get("attention_factor")
    if scale is None:
        mscale, mscale_all = parameters.get("mscale"), parameters.get("mscale_all_dim")
        scale = magnitude(mscale) / magnitude(mscale_all) if mscale and mscale_all else magnitude(1.0)

    def turning_dim(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(config.theta))

    low, high = turning_dim(parameters.get("beta_fast") or 32), turning_dim(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = ((torch.arange(dim // 2).float() - low) / (high - low if high != low else 0.001)).clamp(0, 1)
    positions = config.theta**exponents
    return (1.0 / (factor * positions)) * ramp + (1.0 / positions) * (1 - ramp), float(scale)


def _longrope(config: RopeConfig, exponents: torch.Tensor, long: bool) -> tuple[torch.Tensor, float]:
    parameters = config.parameters
    original = parameters["original_max_position_embeddings"]
    factor = parameters.get("factor") or config.max_position / original
    scale = parameters.get("attention_factor")
    if scale is None:
        scale = 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(original))
    stretch = torch.tensor(parameters["long_factor" if long else "short_factor"], dtype=torch.float32)
    return 1.0 / (stretch * config.theta**exponents), float(scale)

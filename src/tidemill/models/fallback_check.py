"""Compares a loaded model with transformers' own attention before it serves anybody: a handful of tokens, three passes.

transformers computes two short sequences whole. Then they pass through the paged cache in pieces, beside a stranger
that claims the farthest position there is. The scores must agree, and no buffer of the model may have changed: a model
that counts positions itself, carries a state from token to token or looks at its whole batch is found here, whatever
its class says of itself.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch

from tidemill.errors import TidemillError
from tidemill.layers.attention import PagedAttention, Ragged
from tidemill.layers.cache_layout import CacheLayout
from tidemill.layers.parameter import Placement
from tidemill.models.fallback_attention import first_line, refusal
from tidemill.models.shape import ModelShape

LENGTH = 4
BLOCK_SIZE = 2
BLOCKS_EACH = LENGTH // BLOCK_SIZE
TOLERANCE = {torch.float32: 1e-4}
COARSE_TOLERANCE = 0.3
"""Distance of the scores, as a share of their size. Rounding to bfloat16 may make a router choose other experts."""


class Checked(Protocol):
    model: Any

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, lengths: torch.Tensor, attention: PagedAttention
    ) -> torch.Tensor: ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor: ...


def check(checked: Checked, shape: ModelShape, place: Placement) -> None:
    try:
        distance, changed = _compare(checked, shape, place)
    except TidemillError:
        raise
    except Exception as error:
        raise refusal(f"a trial pass failed: {first_line(error)}") from error
    if not distance <= TOLERANCE.get(place.dtype, COARSE_TOLERANCE):
        raise refusal(
            f"over the paged cache its scores are {distance:.1%} away from transformers' own: it counts positions "
            "itself, mixes tokens outside of attention, or computes attention in a way of its own"
        )
    if changed is not None:
        raise refusal(f"a pass changes its buffer {changed}, so an answer would depend on what ran before")


@torch.inference_mode()
def _compare(checked: Checked, shape: ModelShape, place: Placement) -> tuple[float, str | None]:
    """How far the scores are apart, and a buffer that a pass has changed."""
    tokens = ((torch.arange(2 * LENGTH + 1) * 7919 + 11) % shape.vocab_size).to(place.device)
    one, other, stranger = tokens[:LENGTH], tokens[LENGTH:-1], tokens[-1:]
    want = _by_transformers(checked.model, torch.stack((one, other)))
    before = {name: buffer.clone() for name, buffer in checked.model.named_buffers()}
    attention = PagedAttention(_caches(shape.layout, place), shape.layout)
    places = torch.arange(LENGTH, device=place.device)
    farthest = torch.tensor([shape.longest_context - 1], device=place.device)

    attention.plan(_ragged(shape.layout, [(0, 0, 3), (1, 0, 2)], place))
    first = _scores(checked, torch.cat((one[:3], other[:2])), torch.cat((places[:3], places[:2])), attention)
    attention.plan(_ragged(shape.layout, [(2, 0, 1), (0, 3, 1), (1, 2, 2)], place))
    positions = torch.cat((farthest, places[3:], places[2:]))
    second = _scores(checked, torch.cat((stranger, one[3:], other[2:])), positions, attention)

    got = torch.stack((torch.cat((first[:3], second[1:2])), torch.cat((first[3:], second[2:]))))
    now = dict(checked.model.named_buffers())
    changed = [name for name, buffer in now.items() if name not in before or not torch.equal(buffer, before[name])]
    return float((got - want).norm() / want.norm().clamp(min=1e-30)), next(iter(changed), None)


def _by_transformers(model: Any, pair: torch.Tensor) -> torch.Tensor:
    ours = model.config._attn_implementation
    model.config._attn_implementation = "eager"
    try:
        return model(input_ids=pair, use_cache=False).logits.float()
    finally:
        model.config._attn_implementation = ours


def _scores(checked: Checked, tokens: torch.Tensor, positions: torch.Tensor, attention: PagedAttention) -> torch.Tensor:
    lengths = torch.clamp(positions + 1, min=LENGTH)
    return checked.logits(checked.forward(tokens, positions, lengths, attention))


def _caches(layout: CacheLayout, place: Placement) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    """Room for three sequences in every group of layers."""
    blocks = (3 * BLOCKS_EACH * len(layout.windows), BLOCK_SIZE)
    sizes = [(shape.kv_heads, shape.key_dim, shape.value_dim) for shape in layout.shapes]
    return [
        (place.empty(*blocks, heads, keys).zero_(), place.empty(*blocks, heads, values).zero_())
        for heads, keys, values in sizes
    ]


def _ragged(layout: CacheLayout, pieces: list[tuple[int, int, int]], place: Placement) -> Ragged:
    """`pieces` are (sequence, first position, tokens); sequences own their blocks, in each group of layers others."""
    tables, slots = [], []
    for group in range(len(layout.windows)):
        owned = (3 * group + np.array([piece[0] for piece in pieces])) * BLOCKS_EACH
        tables.append(owned[:, None] + np.arange(BLOCKS_EACH))
        found = [
            table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
            for table, (_, start, count) in zip(tables[-1], pieces, strict=True)
            for position in range(start, start + count)
        ]
        slots.append(torch.tensor(found, device=place.device))
    return Ragged([count for _, _, count in pieces], [start + count for _, start, count in pieces], tables, slots)

"""Token sequences on their way through a model, one layer at a time: what each layer is given, for all of them.

Holds one vector per token, whatever the model's size. Knows no checkpoint and nothing of quantisation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tidemill.layers.attention import PagedAttention, Ragged
from tidemill.layers.cache_layout import CacheLayout
from tidemill.layers.parameter import Placement
from tidemill.layers.rope import Rope
from tidemill.models.decoder import Decoder, Layer
from tidemill.models.spec import DecoderSpec
from tidemill.runtime.kv_cache import KVCache

BATCH_TOKENS = 2048
LOGIT_ROWS = 256


@dataclass
class _Batch:
    tokens: torch.Tensor
    lengths: list[int]
    hidden: torch.Tensor

    @property
    def positions(self) -> torch.Tensor:
        return torch.cat([torch.arange(length) for length in self.lengths]).to(self.tokens.device)

    @property
    def totals(self) -> torch.Tensor:
        """Per token, how long its sequence is."""
        return torch.tensor(self.lengths, device=self.tokens.device).repeat_interleave(
            torch.tensor(self.lengths, device=self.tokens.device)
        )


class Stream:
    def __init__(self, spec: DecoderSpec, sequences: Sequence[Sequence[int]], place: Placement) -> None:
        self.spec, self.place = spec, place
        self._batches = [
            _Batch(
                torch.tensor([token for sequence in chosen for token in sequence], device=place.device),
                [len(sequence) for sequence in chosen],
                torch.empty(0),
            )
            for chosen in _batches(sequences)
        ]

    def embed(self, outside: Decoder) -> None:
        """`outside`: the decoder without its layers."""
        for batch in self._batches:
            hidden = outside.embedding(batch.tokens)
            if outside.project_in is not None:
                hidden = outside.project_in(hidden)
            if outside.positions is not None and self.spec.positions is not None:
                hidden = hidden + outside.positions(batch.positions + self.spec.positions.offset)
            batch.hidden = hidden

    def through(self, layer: Layer, index: int, ropes: Sequence[Rope]) -> None:
        """On to the next layer."""
        for batch, hidden in zip(self._batches, self._run(layer, index, ropes), strict=True):
            batch.hidden = hidden

    def show(self, layer: Layer, index: int, ropes: Sequence[Rope]) -> None:
        """Lets a layer see its inputs, and goes on waiting before it."""
        for _ in self._run(layer, index, ropes):
            pass

    def _run(self, layer: Layer, index: int, ropes: Sequence[Rope]) -> Iterator[torch.Tensor]:
        cache = self.spec.layers[index].attention.cache
        layout = CacheLayout((cache,), ((0, 0),) * len(self.spec.layers), (cache.window,))
        for batch in self._batches:
            longest, count = max(batch.lengths), len(batch.lengths)
            attention = PagedAttention(KVCache(layout, count, longest, self.place).slots, layout, self.spec.alibi)
            starts = torch.arange(count, device=self.place.device) * longest
            slots = starts.repeat_interleave(torch.tensor(batch.lengths, device=self.place.device)) + batch.positions
            table = np.arange(count, dtype=np.int64)[:, None]
            attention.plan(Ragged(batch.lengths, batch.lengths, [table], [slots]))
            angles = [rope.angles(batch.positions, batch.totals) for rope in ropes]
            x, residual = layer(None, batch.hidden, angles, attention)
            yield residual if x is None else x + residual

    def token_losses(self, outside: Decoder) -> list[torch.Tensor]:
        """Per sequence, minus the logarithm of the probability of each token but the first."""
        found: list[torch.Tensor] = []
        for batch in self._batches:
            hidden = batch.hidden if outside.norm is None else outside.norm(batch.hidden)
            hidden = hidden if outside.project_out is None else outside.project_out(hidden)
            start = 0
            for length in batch.lengths:
                own, tokens = hidden[start : start + length - 1], batch.tokens[start + 1 : start + length]
                found.append(
                    torch.cat(
                        [
                            torch.nn.functional.cross_entropy(
                                outside.logits(own[row : row + LOGIT_ROWS]).float(),
                                tokens[row : row + LOGIT_ROWS],
                                reduction="none",
                            )
                            for row in range(0, length - 1, LOGIT_ROWS)
                        ]
                    ).cpu()
                )
                start += length
        return found


def _batches(sequences: Sequence[Sequence[int]]) -> Iterator[list[Sequence[int]]]:
    """Neighbours, together no more tokens than a batch."""
    chosen: list[Sequence[int]] = []
    for sequence in sequences:
        if chosen and sum(map(len, chosen)) + len(sequence) > BATCH_TOKENS:
            yield chosen
            chosen = []
        chosen.append(sequence)
    if chosen:
        yield chosen

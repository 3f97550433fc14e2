"""Log-probabilities of tokens, computed on the device and read later: nothing here waits."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tidemill.core.step import TokenLogprob

SCORED_AT_ONCE = 128
"""Rows whose log-probabilities are computed at a time: bounds the memory it takes."""


class Scores:
    """Of each row of float32 logits: its token's log-probability and rank, and its `num_top` best alternatives.

    The numbers travel to the host behind whatever computes the logits; `read` is legal once that is done.
    """

    def __init__(self, logits: torch.Tensor, tokens: torch.Tensor, num_top: Sequence[int]) -> None:
        self._num_top = list(num_top)
        logprobs = logits.log_softmax(dim=-1)
        chosen = logprobs.gather(1, tokens[:, None])
        ranks = (logprobs > chosen).sum(dim=-1) + 1
        most = max(self._num_top)
        top_values, top_ids = logprobs.topk(most, dim=-1) if most else (logprobs[:, :0], logprobs[:, :0].long())
        self._parts = [to_host(part) for part in (tokens, chosen[:, 0], ranks, top_ids, top_values)]

    def read(self) -> list[TokenLogprob]:
        return [
            TokenLogprob(token, value, rank, list(zip(ids[:count], values[:count], strict=True)))
            for token, value, rank, ids, values, count in zip(
                *(part.tolist() for part in self._parts), self._num_top, strict=True
            )
        ]


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in pinned memory that fills while the host goes on; the tensor itself where it is on the host already."""
    if tensor.device.type == "cpu":
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)

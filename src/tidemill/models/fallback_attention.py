"""Where a transformers model meets the paged cache: the attention function that transformers calls in every layer.

Reads what the model asks for and refuses what the paged cache cannot do; nothing a model passes is ignored. Layers are
counted in the order of their calls, which is the order they were traced in (`fallback_trace.py`), so that a model may
number its layers as it likes or pass one twice. Knows neither configs nor weights.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface

from tidemill.errors import UnsupportedModel
from tidemill.layers.attention import PagedAttention

TOLD_OTHERWISE = frozenset(("position_ids", "sliding_window", "is_causal"))
"""Arguments that say again what is known from elsewhere: keys come rotated, and who sees what comes from the masks."""


@dataclass(frozen=True)
class Asked:
    """What a layer wants computed over its queries, keys and values."""

    scale: float
    soft_cap: float | None


def read_arguments(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, arguments: dict[str, Any]) -> Asked:
    """The tensors are [1, heads, tokens, dim]; the arguments are what else a layer passes to its attention function."""
    if query.shape[0] != 1 or key.shape[2] != query.shape[2] or value.shape[2] != query.shape[2]:
        raise refusal("a layer attends to something else than the tokens of its sequence, such as an encoder's output")
    if query.shape[1] % key.shape[1] or key.shape[1] != value.shape[1]:
        raise refusal(f"{query.shape[1]} heads of queries over {key.shape[1]} of keys and {value.shape[1]} of values")
    rest = {name: argument for name, argument in arguments.items() if name not in TOLD_OTHERWISE}
    scale, soft_cap = rest.pop("scaling", None), rest.pop("softcap", None)
    for name, argument in rest.items():
        if argument is None or (not isinstance(argument, torch.Tensor) and not argument):
            continue
        raise refusal(f"its attention takes {name!r}, which changes the scores in a way the paged attention has not")
    return Asked(
        scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
        soft_cap=None if soft_cap is None else float(soft_cap),
    )


def refusal(cause: str) -> UnsupportedModel:
    return UnsupportedModel(
        "this model cannot run through transformers here",
        cause=cause,
        fix="ask about another model with: tidemill models support MODEL; or run this one with: transformers serve",
    )


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300] if lines else ''}".rstrip(": ")


class AttentionSeam:
    """One model's attention function, under a name of its own, so that two models of a process do not mix.

    transformers never forgets a name: what it keeps is this object, which holds a cache only during a forward pass. No
    masks are registered under the name, and transformers then makes none.
    """

    def __init__(self, num_layers: int) -> None:
        self.name = f"tidemill-{uuid.uuid4().hex}"
        self.num_layers = num_layers
        self.lengths: torch.Tensor | None = None
        """During a forward pass, per token, how long its sequence counts as, see `layers/rope.py`."""
        self._attention: PagedAttention | None = None
        self._layer = 0
        AttentionInterface.register(self.name, self._attend)

    @contextmanager
    def over(self, attention: PagedAttention, lengths: torch.Tensor) -> Iterator[None]:
        """A forward pass over this cache, for which a step is planned."""
        self._attention, self.lengths, self._layer = attention, lengths, 0
        try:
            yield
        finally:
            self._attention = self.lengths = None
        if self._layer != self.num_layers:
            raise refusal(f"it called attention {self._layer} times in a pass, and {self.num_layers} times when traced")

    def _attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **arguments: Any,
    ) -> tuple[torch.Tensor, None]:
        attention = self._attention
        if attention is None or self._layer >= self.num_layers:
            raise refusal("attention was called outside of a traced pass")
        if attention_mask is not None:
            raise refusal("it makes a mask of its own, and the paged attention has only causal ones and windows")
        asked = read_arguments(query, key, value, arguments)
        # Most models compute in one type throughout; what differs is rounded to that of the cache.
        q, k, v = (tensor[0].transpose(0, 1).to(attention.dtype) for tensor in (query, key, value))
        out = attention.run(q.contiguous(), k, v, self._layer, asked.scale, soft_cap=asked.soft_cap)
        self._layer += 1
        return out[None].to(query.dtype), None

"""Rotary embeddings whose frequencies depend on how long a sequence is, one sequence at a time.

transformers takes the longest position of a forward pass for all of its tokens (`dynamic`, `longrope`), so an answer
would depend on who shares the batch. Here the model's own module is asked once per length that matters: each token's
angles are those of its own sequence, as in `layers/rope.py`. Knows nothing of frequencies.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from tidemill.models.fallback_attention import AttentionSeam


class PerSequenceRope(torch.nn.Module):
    """Stands in the place of a rotary embedding and asks it; outside of a step over the paged cache, just that."""

    def __init__(self, rope: torch.nn.Module, seam: AttentionSeam) -> None:
        super().__init__()
        self.rope = rope
        self._seam = seam

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor, *rest: Any, **named: Any) -> Any:
        lengths = self._seam.lengths
        if lengths is None:
            return self._fresh()(x, position_ids, *rest, **named)
        layer_type = rest[0] if rest else named.get("layer_type")
        regimes = self._regimes(lengths, layer_type)
        found: list[torch.Tensor] = []
        for regime in regimes.unique().tolist():
            members = (regimes == regime).nonzero()[:, 0]
            # The module reads the length from the longest position: one more token says it, and is dropped again.
            longest = lengths[members].max().view(1, 1) - 1
            some = torch.cat((position_ids[:, members], longest.to(position_ids)), dim=1)
            answer = self._fresh()(x, some, *rest, **named)
            parts = (answer,) if isinstance(answer, torch.Tensor) else answer
            if not found:
                found = [part.new_empty(1, len(lengths), *part.shape[2:]) for part in parts]
            for whole, part in zip(found, parts, strict=True):
                whole[:, members] = part[:, :-1]
        return found[0] if isinstance(answer, torch.Tensor) else tuple(found)

    def _regimes(self, lengths: torch.Tensor, layer_type: str | None) -> torch.Tensor:
        """Equal for tokens that may be asked for together: all short ones, all long ones, or the equally long."""
        rope: Any = self.rope
        kind, parameters = rope.rope_type, rope.config.rope_parameters
        if layer_type is not None:
            kind, parameters = kind[layer_type], parameters[layer_type]
        if kind == "longrope":
            return (lengths > parameters["original_max_position_embeddings"]).long()
        if "dynamic" in str(kind):
            return lengths * (lengths > rope.config.max_position_embeddings)
        return torch.zeros_like(lengths)

    def _fresh(self) -> torch.nn.Module:
        """The module as it was loaded: what it remembers of one length must not meet another."""
        fresh = copy.copy(self.rope)
        fresh._buffers = dict(self.rope._buffers)
        return fresh


def separate_sequences(model: torch.nn.Module, seam: AttentionSeam) -> None:
    """Put every rotary embedding that looks at lengths behind a `PerSequenceRope`."""
    for name, module in list(model.named_modules()):
        kinds = getattr(module, "rope_type", None)
        kinds = list(kinds.values()) if isinstance(kinds, dict) else [kinds]
        if any(kind == "longrope" or "dynamic" in str(kind) for kind in kinds):
            model.set_submodule(name, PerSequenceRope(module, seam))

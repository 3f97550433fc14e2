"""What planning needs to know of a model, whatever will run it: sizes and what its layers keep of a token."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from tidemill.layers.cache_layout import CacheLayout, arrange
from tidemill.layers.spec import CacheShape


@dataclass(frozen=True)
class ModelShape:
    architecture: str
    vocab_size: int
    hidden_size: int
    max_position: int
    """The model's own limit..."""
    longest_context: int
    """...and how far its rotary embedding can be stretched."""
    widest_layer: int
    """Numbers per token that the widest half of a layer holds beside the residual."""
    caches: tuple[CacheShape, ...]
    rope_width: int = 0
    """float32 numbers per position in the tables of its rotary embeddings."""
    query_width: int = 0
    """Numbers of a token's queries, over all heads, as they meet the cache; 0: not known."""
    scores_by_hand: bool = False
    """Its attention caps or slants the scores, and holds some of them."""

    @cached_property
    def layout(self) -> CacheLayout:
        return arrange(self.caches)

"""How layers share the pages of the KV cache.

All layers that see everything can live by one block table; a layer with a sliding window needs only its window's
blocks, so it wants a table of its own. Layers are put into groups that see equally far, each group with one table, and
a page holds one block of tokens for one group: `slots` layers of it. All groups draw from one pool of pages, so memory
goes where the traffic needs it. Torch-free: planning reads it too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tidemill.errors import UnsupportedModel
from tidemill.layers.spec import CacheShape

MAX_WASTE = 1 / 8
"""Groups need not divide evenly: at most this share of the layers a page could hold may stay empty."""


@dataclass(frozen=True)
class CacheLayout:
    shapes: tuple[CacheShape, ...]
    """Per slot of a page, what it holds of a token."""
    places: tuple[tuple[int, int], ...]
    """Per layer, its group and its slot in that group's pages."""
    windows: tuple[int | None, ...]
    """Per group, how many of the last positions its layers see."""

    @property
    def numbers_per_token(self) -> int:
        """What a page holds of each of its tokens."""
        return sum(shape.numbers for shape in self.shapes)


def arrange(caches: Sequence[CacheShape]) -> CacheLayout:
    """Groups of equal size; one group of all layers where they keep differently much of a token."""
    kinds: dict[int | None, list[int]] = {}
    for layer, cache in enumerate(caches):
        kinds.setdefault(cache.window, []).append(layer)
    if len({(cache.kv_heads, cache.key_dim, cache.value_dim) for cache in caches}) > 1:
        # Pages are interchangeable only if every layer needs as much.
        if len(kinds) > 1:
            raise UnsupportedModel(
                "its layers differ both in how much they keep of a token and in how far they see",
                cause="pages of the cache are of one size, and a group of layers sees equally far",
                fix="use a model of another architecture: tidemill models support MODEL tells",
            )
        return CacheLayout(tuple(caches), tuple((0, layer) for layer in range(len(caches))), tuple(kinds))
    slots = _layers_per_page([len(layers) for layers in kinds.values()])
    places: dict[int, tuple[int, int]] = {}
    windows: list[int | None] = []
    for window, layers in kinds.items():
        for index, layer in enumerate(layers):
            if index % slots == 0:
                windows.append(window)
            places[layer] = (len(windows) - 1, index % slots)
    ordered = tuple(places[layer] for layer in range(len(caches)))
    return CacheLayout(tuple(caches[:slots]), ordered, tuple(windows))


def plain_numbers_per_token(caches: Sequence[CacheShape]) -> int:
    """What a cache without windows and compression would keep of a token: what to compare an arrangement with."""
    return sum(cache.uncompressed or cache.numbers for cache in caches)


def _layers_per_page(counts: Sequence[int]) -> int:
    """The largest page that divides every kind of layer with little left over: fewer tables mean less work a step."""
    for slots in range(min(counts), 1, -1):
        if sum(-count % slots for count in counts) <= MAX_WASTE * sum(counts):
            return slots
    return 1

"""The parts of a decoder layer, as data: what `layers/` builds and what planning reads.

Torch-free. Names of tensors are relative to their layer, without `.weight` and `.bias`. Knows no family and no
config.json.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class NormSpec:
    eps: float
    kind: Literal["rms", "layer"] = "rms"
    bias: bool = False
    unit_offset: bool = False
    """The checkpoint holds w and the model multiplies by 1 + w."""
    learned: bool = True
    """Without: neither weight nor bias."""


@dataclass(frozen=True)
class HeadNormSpec:
    """Normalises queries and keys, head by head, before they are rotated."""

    norm: NormSpec
    query: str
    key: str
    per_head: bool = False
    """Every head has its own weights: one tensor [heads, head_dim], or one tensor per head where the names contain
    `{head}`."""


@dataclass(frozen=True)
class AttentionSpec:
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    qkv: tuple[str, ...]
    """Three matrices (query, key, value), or one that stacks them."""
    out: str
    bias: bool = False
    out_bias: bool = False
    grouped: bool = False
    """The one matrix holds, for each key/value head in turn, its queries, its key and its value."""
    transposed: bool = False
    """Matrices are stored [inputs, outputs]."""
    rope: int | None = 0
    """Which of the model's rotary embeddings; None: none."""
    neighbours: bool = False
    """The rotation pairs dimensions 2i and 2i + 1 instead of i and i + half."""
    window: int | None = None
    """How many of the last positions a token sees, itself included; None: all."""
    soft_cap: float | None = None
    alibi: tuple[float, ...] | None = None
    """Per head, how much a score falls with each position of distance."""
    head_norm: HeadNormSpec | None = None
    query_growth: tuple[float, int] | None = None
    """(beta, length): queries grow by 1 + beta * log(1 + position // length)."""

    def qkv_parts(self, prefix: str) -> dict[str, int]:
        """Name -> rows of the matrices that are stacked into one."""
        sizes = (self.heads * self.head_dim, self.kv_heads * self.head_dim, self.kv_heads * self.head_dim)
        names = [f"{prefix}.{name}" for name in self.qkv]
        return dict(zip(names, sizes if len(names) == 3 else (sum(sizes),), strict=True))

    @property
    def cache(self) -> CacheShape:
        return CacheShape(self.kv_heads, self.head_dim, self.head_dim, self.window)

    @property
    def width(self) -> int:
        """Numbers per token that a step holds at once."""
        return (3 * self.heads + 2 * self.kv_heads) * self.head_dim


@dataclass(frozen=True)
class LatentAttentionSpec:
    """Multi-head latent attention (DeepSeek): the cache holds one compressed vector and one rotated key per token."""

    heads: int
    query_rank: int | None
    kv_rank: int
    plain_dim: int
    rope_dim: int
    value_dim: int
    scale: float
    norm_eps: float
    bias: bool = False
    neighbours: bool = True
    rope: int = 0
    window: None = None

    @property
    def cache(self) -> CacheShape:
        plain = self.heads * (self.plain_dim + self.rope_dim + self.value_dim)
        return CacheShape(1, self.kv_rank + self.rope_dim, 0, None, plain)

    @property
    def width(self) -> int:
        return 3 * self.heads * (self.kv_rank + self.rope_dim)


@dataclass(frozen=True)
class CacheShape:
    """What one layer keeps of a token. A value_dim of 0: the values are the first numbers of the key."""

    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None
    uncompressed: int = 0
    """Numbers a plain cache would keep; 0: as many as this one."""

    @property
    def numbers(self) -> int:
        return self.kv_heads * (self.key_dim + self.value_dim)


@dataclass(frozen=True)
class MlpSpec:
    inner: int
    activation: str
    up: tuple[str, ...]
    """Gate and up of a gated MLP, or the one matrix that stacks them; the one matrix of a plain one."""
    down: str
    gated: bool = True
    bias: bool = False
    transposed: bool = False

    def up_parts(self, prefix: str) -> dict[str, int]:
        """Name -> rows of the matrices that are stacked into one."""
        outputs = 2 * self.inner if self.gated else self.inner
        return {f"{prefix}.{name}": outputs // len(self.up) for name in self.up}

    @property
    def width(self) -> int:
        return (3 if self.gated else 2) * self.inner


@dataclass(frozen=True)
class MoeSpec:
    """A mixture of experts: each token goes to `top_k` of them. Expert names contain `{expert}`."""

    experts: int
    top_k: int
    inner: int
    activation: str
    router: str
    up: tuple[str, str]
    down: str
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    renormalise: bool = True
    """The chosen experts' weights are made to sum to 1..."""
    scaling: float = 1.0
    """...and multiplied by this."""
    choice_bias: str | None = None
    """A tensor added to the scores for choosing only."""
    groups: int = 1
    """Experts stand in groups, and only the best `top_groups` of them are looked at..."""
    top_groups: int = 1
    group_score: Literal["best", "best_two"] = "best"
    """...a group counting as its best expert, or as the sum of its best two."""
    shared: MlpSpec | None = None
    """An expert that every token goes to..."""
    shared_gate: str | None = None
    """...weighted by the sigmoid of this projection, where there is one."""

    @property
    def width(self) -> int:
        return 3 * self.inner * self.top_k + (self.shared.width if self.shared is not None else 0)

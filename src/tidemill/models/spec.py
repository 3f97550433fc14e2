"""A whole decoder, as data: every family is a description in these words, and `decoder.py` builds them all.

Torch-free, so that planning and start-up checks cost nothing. Knows no config.json: each family file translates its
own.
"""

from __future__ import annotations

from dataclasses import dataclass

from tidemill.layers.rope_config import RopeConfig
from tidemill.layers.spec import AttentionSpec, LatentAttentionSpec, MlpSpec, MoeSpec, NormSpec
from tidemill.models.shape import ModelShape


@dataclass(frozen=True)
class LayerSpec:
    """One layer. Without `parallel`: attention, then MLP, each around a residual.

    `parallel`: both read the layer's input, normalised by `input_norm` (and the MLP's by `mlp_norm` where it is given),
    and are added together. `normalise_after`: the norms stand behind the residual additions, as in the first
    transformers.
    """

    attention: AttentionSpec | LatentAttentionSpec
    mlp: MlpSpec | MoeSpec
    input_norm: str
    mlp_norm: str | None
    after_attention: str | None = None
    after_mlp: str | None = None
    parallel: bool = False
    normalise_after: bool = False
    residual_scale: float = 1.0


@dataclass(frozen=True)
class LearnedPositions:
    name: str
    count: int
    offset: int = 0
    """Position p has row p + offset."""


@dataclass(frozen=True)
class DecoderSpec:
    architecture: str
    vocab_size: int
    hidden_size: int
    max_position: int
    norm: NormSpec
    layers: tuple[LayerSpec, ...]
    layer_prefix: str = "model.layers.{layer}"
    embedding: str = "model.embed_tokens"
    final_norm: str | None = "model.norm"
    head: str = "lm_head"
    tie_embeddings: bool = False
    tied_unless_stored: bool = False
    """The checkpoint, not the config, says whether the head is tied: by holding one or not."""
    head_bias: bool = False
    normalise_head: bool = False
    """The rows of the output matrix count with length one."""
    ropes: tuple[RopeConfig, ...] = ()
    positions: LearnedPositions | None = None
    embedding_size: int | None = None
    """Width of the embedding where it is not the hidden size: projected by these two."""
    project_in: str = ""
    project_out: str = ""
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_soft_cap: float | None = None

    @property
    def shape(self) -> ModelShape:
        stretched = [] if self.positions is not None else [rope.longest_context for rope in self.ropes]
        return ModelShape(
            architecture=self.architecture,
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            max_position=self.max_position,
            longest_context=max(self.max_position, *stretched, 0),
            widest_layer=max(max(layer.attention.width, self._mlp_width(layer.mlp)) for layer in self.layers),
            caches=tuple(layer.attention.cache for layer in self.layers),
            rope_width=sum(rope.dim * (2 if rope.kind == "longrope" else 1) for rope in self.ropes),
            query_width=max(layer.attention.heads * layer.attention.cache.key_dim for layer in self.layers),
            scores_by_hand=any(
                isinstance(layer.attention, AttentionSpec) and (layer.attention.soft_cap or layer.attention.alibi)
                for layer in self.layers
            ),
        )

    def _mlp_width(self, mlp: MlpSpec | MoeSpec) -> int:
        """What a token's experts answer is held until it is added up."""
        return mlp.width + (mlp.top_k * self.hidden_size if isinstance(mlp, MoeSpec) else 0)

    @property
    def alibi(self) -> tuple[float, ...] | None:
        """One set of slopes serves all layers."""
        attention = self.layers[0].attention
        return attention.alibi if isinstance(attention, AttentionSpec) else None

    @property
    def turn(self) -> int | None:
        """The length beyond which a growing sequence is computed anew, where the model has one."""
        return next((rope.turn for rope in self.ropes if rope.turn is not None), None)

    def regime(self, num_prompt: int) -> bytes:
        """What of the rotations depends on a prompt's length; blocks are shared only between equal regimes."""
        return b"".join(rope.regime(num_prompt) for rope in self.ropes)

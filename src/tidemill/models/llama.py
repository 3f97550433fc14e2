"""The Llama family: Llama, Mistral, Qwen2, Qwen3, SmolLM and whatever else differs only in its config.

Pre-norm decoder with grouped-query attention, rotary positions and a gated MLP. Bias, q/k norm, sliding window and tied
embeddings come from the config.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tidemill.layers.attention import PagedAttention
from tidemill.layers.linear import Embedding, Head, Linear
from tidemill.layers.norm import RMSNorm
from tidemill.layers.parameter import Parameter, Placement
from tidemill.layers.rope import Rope
from tidemill.models.config import DecoderConfig
from tidemill.ops import reference


class Attention:
    def __init__(self, config: DecoderConfig, layer: int, place: Placement) -> None:
        prefix = f"model.layers.{layer}.self_attn"
        self.layer = layer
        self.heads, self.kv_heads, self.dim = config.num_heads, config.num_kv_heads, config.head_dim
        q_size, kv_size = self.heads * self.dim, self.kv_heads * self.dim
        self.qkv = Linear(
            config.hidden_size,
            {f"{prefix}.q_proj": q_size, f"{prefix}.k_proj": kv_size, f"{prefix}.v_proj": kv_size},
            bias=config.attention_bias,
            place=place,
        )
        self.out = Linear(q_size, {f"{prefix}.o_proj": config.hidden_size}, bias=config.output_bias, place=place)
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            self.q_norm = RMSNorm(f"{prefix}.q_norm", self.dim, config.norm_eps, place)
            self.k_norm = RMSNorm(f"{prefix}.k_norm", self.dim, config.norm_eps, place)

    def parameters(self) -> Iterator[Parameter]:
        for part in (self.qkv, self.out, self.q_norm, self.k_norm):
            if part is not None:
                yield from part.parameters()

    def __call__(
        self, x: torch.Tensor, rope: Rope, angles: tuple[torch.Tensor, torch.Tensor], attention: PagedAttention
    ) -> torch.Tensor:
        q_size, kv_size = self.heads * self.dim, self.kv_heads * self.dim
        q, k, v = self.qkv(x).split((q_size, kv_size, kv_size), dim=-1)
        q, k, v = (t.unflatten(-1, (-1, self.dim)) for t in (q, k, v))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rope.apply(q, angles), rope.apply(k, angles)
        return self.out(attention.run(q, k, v, self.layer).flatten(1))


class Mlp:
    def __init__(self, config: DecoderConfig, layer: int, place: Placement) -> None:
        prefix, width, inner = f"model.layers.{layer}.mlp", config.hidden_size, config.intermediate_size
        self.activation = config.activation
        gate_up = {f"{prefix}.gate_proj": inner, f"{prefix}.up_proj": inner}
        self.gate_up = Linear(width, gate_up, bias=config.mlp_bias, place=place)
        self.down = Linear(inner, {f"{prefix}.down_proj": width}, bias=config.mlp_bias, place=place)

    def parameters(self) -> Iterator[Parameter]:
        yield from self.gate_up.parameters()
        yield from self.down.parameters()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(reference.act_and_mul(self.gate_up(x), self.activation))


class Layer:
    def __init__(self, config: DecoderConfig, layer: int, place: Placement) -> None:
        prefix = f"model.layers.{layer}"
        self.input_norm = RMSNorm(f"{prefix}.input_layernorm", config.hidden_size, config.norm_eps, place)
        self.attention = Attention(config, layer, place)
        self.mlp_norm = RMSNorm(f"{prefix}.post_attention_layernorm", config.hidden_size, config.norm_eps, place)
        self.mlp = Mlp(config, layer, place)

    def parameters(self) -> Iterator[Parameter]:
        for part in (self.input_norm, self.attention, self.mlp_norm, self.mlp):
            yield from part.parameters()


class LlamaModel:
    """`forward` gives hidden states for every token of a step, `logits` turns chosen ones into scores."""

    def __init__(self, config: DecoderConfig, max_len: int, place: Placement) -> None:
        self.config = config
        self.embedding = Embedding("model.embed_tokens", config.vocab_size, config.hidden_size, place)
        self.layers = [Layer(config, index, place) for index in range(config.num_layers)]
        self.norm = RMSNorm("model.norm", config.hidden_size, config.norm_eps, place)
        tied = self.embedding if config.tie_embeddings else None
        self.head = Head("lm_head", config.vocab_size, config.hidden_size, place, tied)
        self.rope = Rope(config.rope, max_len, place.device)

    def parameters(self) -> Iterator[Parameter]:
        yield from self.embedding.parameters()
        for layer in self.layers:
            yield from layer.parameters()
        yield from self.norm.parameters()
        yield from self.head.parameters()

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, lengths: torch.Tensor, attention: PagedAttention
    ) -> torch.Tensor:
        residual = self.embedding(tokens)
        angles = self.rope.angles(positions, lengths)
        x = self.layers[0].input_norm(residual)
        for index, layer in enumerate(self.layers):
            x = layer.attention(x, self.rope, angles, attention)
            x, residual = layer.mlp_norm.add(x, residual)
            x = layer.mlp(x)
            following = self.layers[index + 1].input_norm if index + 1 < len(self.layers) else self.norm
            x, residual = following.add(x, residual)
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(hidden)

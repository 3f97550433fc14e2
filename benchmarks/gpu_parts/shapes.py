"""The models that are measured, as shapes: configs, folders without weights, and what a step must move and compute.

Counts are the least any engine needs, so that they can serve as floors. Knows no torch and no engine.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BYTES = 2
"""Of a bf16 number."""

LLAMA_3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@dataclass(frozen=True)
class Shape:
    name: str
    architecture: str
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    head_dim: int = 128
    experts: int = 0
    top_k: int = 0
    tied: bool = False
    extra: tuple[tuple[str, Any], ...] = ()

    def config(self) -> dict[str, Any]:
        model_type = self.architecture.removesuffix("ForCausalLM").lower()
        found = {
            "architectures": [self.architecture],
            "model_type": model_type,
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab,
            "tie_word_embeddings": self.tied,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "torch_dtype": "bfloat16",
            "bos_token_id": 1,
            "eos_token_id": 2,
            **dict(self.extra),
        }
        if self.experts:
            found |= {"num_local_experts": self.experts, "num_experts_per_tok": self.top_k}
        return found

    def write(self, folder: Path) -> Path:
        """A folder with a config and a tokenizer of single words (w0 w1 ...), and no weights."""
        path = folder / self.name
        if not path.is_dir():
            path.mkdir(parents=True)
            (path / "config.json").write_text(json.dumps(self.config()))
            words = {f"w{token}": token for token in range(self.vocab)}
            tokenizer = {
                "version": "1.0",
                "truncation": None,
                "padding": None,
                "added_tokens": [],
                "normalizer": None,
                "pre_tokenizer": {"type": "WhitespaceSplit"},
                "post_processor": None,
                "decoder": None,
                "model": {"type": "WordLevel", "vocab": words, "unk_token": "w0"},
            }
            (path / "tokenizer.json").write_text(json.dumps(tokenizer))
        return path

    @property
    def attention_linears(self) -> list[tuple[int, int]]:
        """(outputs, inputs) of a layer's projections, fused as engines fuse them."""
        wide = self.heads * self.head_dim
        return [(wide + 2 * self.kv_heads * self.head_dim, self.hidden), (self.hidden, wide)]

    @property
    def mlp_linears(self) -> list[tuple[int, int]]:
        """Of one expert, where there are several."""
        return [(2 * self.inner, self.hidden), (self.hidden, self.inner)]

    @property
    def layer_numbers(self) -> int:
        """Numbers of a layer's linears that one token is multiplied with."""
        times = self.top_k if self.experts else 1
        router = self.experts * self.hidden
        return _numbers(self.attention_linears) + times * _numbers(self.mlp_linears) + router

    @property
    def kv_bytes_per_token(self) -> int:
        return self.layers * 2 * self.kv_heads * self.head_dim * BYTES

    def prompt_flops(self, tokens: int) -> float:
        """All linears for every token, the head for the last one, and the lower half of attention."""
        linear = 2.0 * self.layer_numbers * self.layers * tokens + 2.0 * self.vocab * self.hidden
        return linear + self.layers * 4.0 * self.heads * self.head_dim * tokens * tokens / 2

    def experts_touched(self, tokens: int) -> float:
        """Expected with routers that prefer nobody."""
        return self.experts * (1 - (1 - self.top_k / self.experts) ** tokens)

    def routed_bytes(self, tokens: int) -> float:
        """Weights that a step of so many tokens must read: all but the experts nobody was sent to."""
        touched = self.experts_touched(tokens)
        layer = _numbers(self.attention_linears) + touched * _numbers(self.mlp_linears) + self.experts * self.hidden
        return BYTES * (self.layers * layer + self.vocab * self.hidden)


def _numbers(linears: list[tuple[int, int]]) -> int:
    return sum(outputs * inputs for outputs, inputs in linears)


LLAMA_8B = Shape(
    "llama-3.1-8b",
    "LlamaForCausalLM",
    hidden=4096,
    inner=14336,
    layers=32,
    heads=32,
    kv_heads=8,
    vocab=128256,
    extra=(("max_position_embeddings", 131072), ("rope_theta", 500000.0), ("rope_scaling", LLAMA_3_ROPE)),
)
QWEN3_0_6B = Shape(
    "qwen3-0.6b",
    "Qwen3ForCausalLM",
    hidden=1024,
    inner=3072,
    layers=28,
    heads=16,
    kv_heads=8,
    vocab=151936,
    tied=True,
    extra=(("max_position_embeddings", 40960), ("rope_theta", 1000000.0)),
)
MIXTRAL_8_LAYERS = Shape(
    "mixtral-8-layers",
    "MixtralForCausalLM",
    hidden=4096,
    inner=14336,
    layers=8,
    heads=32,
    kv_heads=8,
    vocab=32000,
    experts=8,
    top_k=2,
    extra=(("max_position_embeddings", 32768), ("rope_theta", 1000000.0), ("sliding_window", None)),
)

"""Which architectures run natively, by the name config.json gives them. Imports a family only when it is asked for.

Torch-free: a description costs nothing, so planning and `tidemill models support` use the same one as the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

from tidemill.errors import BadCheckpoint, UnsupportedModel
from tidemill.models.config import RawConfig
from tidemill.models.spec import DecoderSpec


@dataclass(frozen=True)
class Native:
    file: str
    """The file of this room that describes it."""
    examples: str
    """What people call the checkpoints."""


NATIVE: dict[str, Native] = {
    "BaiChuanForCausalLM": Native("baichuan", "Baichuan 1"),
    "BaichuanForCausalLM": Native("baichuan", "Baichuan 2 7B and 13B"),
    "Cohere2ForCausalLM": Native("cohere", "Command R7B, Command A"),
    "CohereForCausalLM": Native("cohere", "Command-R, Command-R+, Aya"),
    "DeepseekV2ForCausalLM": Native("deepseek", "DeepSeek-V2, V2-Lite, Coder-V2"),
    "DeepseekV3ForCausalLM": Native("deepseek", "DeepSeek-V3, R1"),
    "FalconForCausalLM": Native("falcon", "Falcon 7B, 40B, 11B, RW"),
    "GPT2LMHeadModel": Native("gpt2", "GPT-2, DistilGPT-2"),
    "GPTJForCausalLM": Native("gptj", "GPT-J 6B"),
    "GPTNeoForCausalLM": Native("gpt_neo", "GPT-Neo 125M to 2.7B"),
    "GPTNeoXForCausalLM": Native("gpt_neox", "GPT-NeoX 20B, Pythia, Dolly 2"),
    "Gemma2ForCausalLM": Native("gemma", "Gemma 2 2B, 9B, 27B"),
    "Gemma3ForCausalLM": Native("gemma", "Gemma 3 270M, 1B"),
    "GemmaForCausalLM": Native("gemma", "Gemma 2B, 7B"),
    "GraniteForCausalLM": Native("granite", "Granite 3.0 to 3.3"),
    "InternLM2ForCausalLM": Native("internlm", "InternLM 2, 2.5"),
    "InternLM3ForCausalLM": Native("internlm", "InternLM 3"),
    "LlamaForCausalLM": Native("llama", "Llama 2, 3, 3.1, 3.2; TinyLlama, Yi, Orca-2, SmolLM, DeepSeek-LLM"),
    "Ministral3ForCausalLM": Native("llama", "Ministral 3 3B, 8B (text)"),
    "MistralForCausalLM": Native("llama", "Mistral 7B, Mistral-Nemo, Mistral-Small 24B"),
    "MixtralForCausalLM": Native("mixtral", "Mixtral 8x7B, 8x22B"),
    "OPTForCausalLM": Native("opt", "OPT 125M to 66B"),
    "Phi3ForCausalLM": Native("phi3", "Phi-3, Phi-3.5-mini, Phi-4, Phi-4-mini"),
    "PhiForCausalLM": Native("phi", "Phi-1.5, Phi-2"),
    "Qwen2ForCausalLM": Native("llama", "Qwen 1.5, 2, 2.5"),
    "Qwen2MoeForCausalLM": Native("qwen_moe", "Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B"),
    "Qwen3ForCausalLM": Native("llama", "Qwen3 0.6B to 32B"),
    "Qwen3MoeForCausalLM": Native("qwen_moe", "Qwen3-30B-A3B, Qwen3-235B-A22B"),
    "StableLmForCausalLM": Native("stablelm", "StableLM 2, StableLM-3B"),
}
"""By the architecture's name in config.json."""

MODEL_TYPES: dict[str, str] = {
    "baichuan": "BaichuanForCausalLM",
    "cohere": "CohereForCausalLM",
    "cohere2": "Cohere2ForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "falcon": "FalconForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "gpt_neo": "GPTNeoForCausalLM",
    "gpt_neox": "GPTNeoXForCausalLM",
    "gptj": "GPTJForCausalLM",
    "granite": "GraniteForCausalLM",
    "internlm2": "InternLM2ForCausalLM",
    "internlm3": "InternLM3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "opt": "OPTForCausalLM",
    "phi": "PhiForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "stablelm": "StableLmForCausalLM",
}
"""config.json's model_type -> architecture, for configs that name none or another one."""

TEXT_PARTS: dict[str, dict[str, str]] = {
    "Gemma3ForConditionalGeneration": {"gemma3_text": "Gemma3ForCausalLM"},
    "Mistral3ForConditionalGeneration": {"mistral": "MistralForCausalLM", "ministral3": "Ministral3ForCausalLM"},
}
"""Models of text and images whose text part runs alone: architecture -> model_type of its text_config -> that part."""


def architectures_of(raw: Mapping[str, Any]) -> list[str]:
    names = raw.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise BadCheckpoint(
            f"config.json: architectures is {names!r:.80}, expected a list of names",
            fix='correct it, as in "architectures": ["LlamaForCausalLM"]',
        )
    known = MODEL_TYPES.get(str(raw.get("model_type")))
    if known is not None and (not names or (names[0] in NATIVE and names[0].lower() != known.lower())):
        # Where the two disagree, transformers follows the type, and so do the weights' other users.
        return [known]
    if not names:
        raise BadCheckpoint(
            "config.json names no architecture", fix='add "architectures": ["LlamaForCausalLM"] or such'
        )
    return names


def native_text(raw: Mapping[str, Any]) -> RawConfig | None:
    """The config of the part that runs natively, or None where none does."""
    for name in architectures_of(raw):
        if name in NATIVE:
            return RawConfig(raw, name)
        text = raw.get("text_config")
        if name in TEXT_PARTS and isinstance(text, Mapping) and text.get("model_type") in TEXT_PARTS[name]:
            # What the whole model says counts where its text part is silent.
            return RawConfig({**raw, **text}, TEXT_PARTS[name][text["model_type"]])
    return None


def describe(raw: Mapping[str, Any]) -> DecoderSpec:
    """The description of a checkpoint's model, from its config alone."""
    text = native_text(raw)
    if text is None:
        raise UnsupportedModel(
            f"architecture {architectures_of(raw)[0]} is not native",
            cause=f"native are {', '.join(NATIVE)}",
            fix="leave --model-impl out: other architectures run through transformers",
        )
    try:
        spec = _family(text.architecture)(text)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # Values that no family expects: config.json is anybody's file.
        raise BadCheckpoint(
            f"config.json does not describe a {text.architecture}",
            cause=f"{type(error).__name__}: {error}"[:300],
            fix="fetch config.json of the model again",
        ) from error
    # Of a model of text and images, the outer and the inner config may differ on this.
    return replace(spec, tied_unless_stored=text.architecture not in architectures_of(raw))


def _family(architecture: str) -> Callable[[RawConfig], DecoderSpec]:
    module = import_module(f"tidemill.models.{NATIVE[architecture].file}")
    return module.describe

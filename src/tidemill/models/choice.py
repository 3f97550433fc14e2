"""Which implementation runs a checkpoint, decided from its config: a native description, or transformers itself.

Torch-free: what only transformers can tell is asked in a child process (`fallback_probe.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tidemill.errors import ConfigError, UnsupportedModel
from tidemill.models.registry import TEXT_PARTS, architectures_of, describe, native_text
from tidemill.models.shape import ModelShape
from tidemill.models.spec import DecoderSpec

MODEL_IMPLS = ("auto", "native", "transformers")


@dataclass(frozen=True)
class Choice:
    impl: Literal["native", "transformers"]
    why: str
    shape: ModelShape
    spec: DecoderSpec | None
    """The description, where the model is native."""
    notable: bool
    """Whoever starts it should know."""


def choose(
    raw: Mapping[str, Any],
    path: Path,
    kind: str,
    impl: str = "auto",
    trust_remote_code: bool = False,
    on_progress: Callable[[str, int, int], None] | None = None,
) -> Choice:
    if impl not in MODEL_IMPLS:
        raise ConfigError(
            f"model_impl {impl!r} is unknown", param="model_impl", fix=f"use one of {', '.join(MODEL_IMPLS)}"
        )
    architecture = architectures_of(raw)[0]
    if impl != "transformers" and native_text(raw) is not None:
        spec = describe(raw)
        part = architecture in TEXT_PARTS
        why = f"{architecture}: its text part is native; images are refused" if part else f"{architecture} is native"
        return Choice("native", why, spec.shape, spec, notable=part)
    if impl == "native":
        raise ConfigError(
            f"{architecture} has no native implementation",
            param="model_impl",
            cause="--model-impl native asks for one",
            fix="leave --model-impl out: other architectures run through transformers",
        )
    if kind == "gguf":
        raise UnsupportedModel(
            "a GGUF file cannot run through transformers here",
            cause="--model-impl transformers reads Hugging Face folders",
            fix="leave --model-impl out, or point at the model's safetensors folder",
        )
    from tidemill.models.fallback_probe import probe

    if on_progress is not None:
        on_progress("asking transformers about the model", 0, 1)
    shape = probe(path, trust_remote_code)
    if on_progress is not None:
        on_progress("asking transformers about the model", 1, 1)
    asked = "asked for" if impl == "transformers" else f"{architecture} is not native: it runs on the fallback"
    why = f"{asked}, through transformers' own code, slower than a native model"
    return Choice("transformers", why, shape, None, notable=True)

"""What planning must know of a model that only transformers knows, found by building it without memory and tracing it.

Also where a checkpoint that cannot run this way is refused: by its class, its config, or what the trace shows. Runs a
checkpoint's own code only where it is trusted. Reads no weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tidemill.errors import TidemillError, UnsupportedModel
from tidemill.layers.rope_config import RopeConfig
from tidemill.models.config import DEFAULT_MAX_POSITION
from tidemill.models.fallback_attention import first_line, refusal
from tidemill.models.fallback_trace import ATTENTION_NAME, Traced, computes_attention_itself, trace
from tidemill.models.shape import ModelShape

STATEFUL_LAYERS = ("linear_attention", "conv", "hybrid", "hybrid_sliding")
"""Values of layer_types for layers that keep a state which is not keys and values."""
LENGTH_NAMES = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length", "seq_length")


@dataclass(frozen=True)
class FallbackSpec:
    """What `models/spec.py` is to a native model, as far as anybody but the model itself needs it."""

    shape: ModelShape
    decoder: str
    """The submodule that turns token ids into hidden states."""
    ropes: tuple[RopeConfig, ...]
    alibi: None = None

    @property
    def turn(self) -> int | None:
        """The length beyond which a growing sequence is computed anew, where the model has one."""
        return next((rope.turn for rope in self.ropes if rope.turn is not None), None)

    def regime(self, num_prompt: int) -> bytes:
        """What of the rotations depends on a prompt's length; blocks are shared only between equal regimes."""
        return b"".join(rope.regime(num_prompt) for rope in self.ropes)


def describe_transformers(folder: Path, trust_remote_code: bool) -> FallbackSpec:
    config = read_config(folder, trust_remote_code)
    kind = _class_of(config, folder, trust_remote_code)
    _refuse_class(kind, config)

    def build(attention: str) -> torch.nn.Module:
        return AutoModelForCausalLM.from_config(
            config, attn_implementation=attention, trust_remote_code=trust_remote_code
        )

    architecture = (config.architectures or [kind.__name__])[0]
    traced = _traced(build, kind)
    text = config.get_text_config()
    max_position = _max_position(text)
    ropes = tuple(_ropes(text, max_position, kind))
    shape = ModelShape(
        architecture=architecture,
        vocab_size=traced.vocab_size,
        hidden_size=traced.hidden_size,
        max_position=max_position,
        longest_context=max([max_position, *(rope.longest_context for rope in ropes)]),
        widest_layer=traced.widest_layer,
        caches=traced.caches,
    )
    _check_windows(shape)
    return FallbackSpec(shape, traced.decoder, ropes)


def read_config(folder: Path, trust_remote_code: bool) -> Any:
    """The config as transformers reads it, after refusing what no causal language model of transformers can be."""
    raw, _ = transformers.PreTrainedConfig.get_config_dict(str(folder), local_files_only=True)
    own_code = raw.get("auto_map") or {}
    if own_code and not trust_remote_code and not _is_known(raw):
        files = sorted({str(name).rpartition(".")[0] + ".py" for name in own_code.values() if isinstance(name, str)})
        raise UnsupportedModel(
            f"{_architecture(raw)} is not part of transformers: the checkpoint brings its own code",
            cause=f"running it means running {', '.join(files)}, which nobody here has read",
            fix="read the code, then add --trust-remote-code; from the hub pin what you read: --revision <commit>",
        )
    try:
        config = AutoConfig.from_pretrained(str(folder), trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception as error:
        raise UnsupportedModel(
            f"{_architecture(raw)} cannot run through transformers {transformers.__version__}",
            cause=first_line(error),
            fix="pip install --upgrade transformers, if a newer one knows this model; correct config.json otherwise",
        ) from error
    if config.is_encoder_decoder:
        raise _not_a_decoder(_architecture(raw), "it is an encoder and a decoder, and only decoders run here")
    if type(config) not in AutoModelForCausalLM._model_mapping and not _own_class(config):
        raise _not_a_decoder(_architecture(raw), f"transformers has no causal language model of {config.model_type!r}")
    if getattr(config, "quantization_config", None) is not None:
        raise UnsupportedModel(
            f"{_architecture(raw)} is quantised, and through transformers only plain weights run here",
            cause="its config.json has a quantization_config",
            fix="use the checkpoint it was quantised from, or a .gguf of the model",
        )
    return config


def _is_known(raw: dict[str, Any]) -> bool:
    """transformers has this model, so the checkpoint's own code is not needed."""
    name = str(raw.get("model_type"))
    return name in CONFIG_MAPPING and CONFIG_MAPPING[name] in AutoModelForCausalLM._model_mapping


def _own_class(config: Any) -> str | None:
    """The class in the checkpoint's own code, as file.Class."""
    return (getattr(config, "auto_map", None) or {}).get("AutoModelForCausalLM")


def _class_of(config: Any, folder: Path, trust_remote_code: bool) -> type:
    """The class that transformers will make. Imports its module here, where tensors made by that have numbers."""
    own = _own_class(config)
    if own is not None and trust_remote_code:
        try:
            return get_class_from_dynamic_module(own, str(folder), local_files_only=True)
        except Exception as error:
            raise refusal(f"the checkpoint's own code cannot be imported: {first_line(error)}") from error
    found: Any = AutoModelForCausalLM._model_mapping[type(config)]
    return found[0] if isinstance(found, tuple) else found


def _architecture(raw: dict[str, Any]) -> str:
    return str((raw.get("architectures") or [raw.get("model_type", "this model")])[0])


def _refuse_class(kind: type, config: Any) -> None:
    """What a class says of itself, before it is built."""
    name = (config.architectures or [kind.__name__])[0]
    if name != kind.__name__ and hasattr(transformers, name):
        raise _not_a_decoder(name, f"it is no causal language model; transformers would make it a {kind.__name__}")
    layers = set(getattr(config.get_text_config(), "layer_types", None) or ())
    if getattr(kind, "_is_stateful", False) or layers & set(STATEFUL_LAYERS):
        kinds = sorted(layers & set(STATEFUL_LAYERS))
        raise UnsupportedModel(
            f"{name} does not run here, neither natively nor through transformers",
            cause="it keeps a running state per sequence"
            + (f" ({', '.join(kinds)} layers)" if kinds else "")
            + ", and the paged cache keeps keys and values",
            fix="use a model whose layers are all attention, or run it with: transformers serve",
        )


def _not_a_decoder(name: str, cause: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"{name} does not generate text here", cause=cause, fix="use a causal language model, such as smollm2"
    )


def _traced(build: Callable[[str], torch.nn.Module], kind: type) -> Traced:
    try:
        return trace(build)
    except TidemillError:
        raise
    except Exception as error:
        if isinstance(error, KeyError) and ATTENTION_NAME in str(error):
            raise computes_attention_itself(kind.__name__) from error
        raise refusal(f"a trial pass of {kind.__name__} without weights failed: {first_line(error)}") from error


def _max_position(text: Any) -> int:
    lengths = [getattr(text, name, None) for name in LENGTH_NAMES]
    return next((length for length in lengths if isinstance(length, int) and length > 0), DEFAULT_MAX_POSITION)


def _ropes(text: Any, max_position: int, kind: type) -> list[RopeConfig]:
    """Rotary embeddings as far as a sequence's length matters; newer configs give one per kind of layer."""
    parameters = getattr(text, "rope_parameters", None) or {}
    each = list(parameters.values()) if parameters and all(isinstance(v, dict) for v in parameters.values()) else []
    found = []
    for one in each or ([parameters] if parameters else []):
        original = one.get("original_max_position_embeddings") or max_position
        name, full = str(one.get("rope_type") or "default"), {**one, "original_max_position_embeddings": original}
        name = "dynamic" if "dynamic" in name else name
        turns = name == "longrope" and _computes_anew(kind)
        found.append(RopeConfig(name, float(one.get("rope_theta") or 0.0), 0, max_position, full, turns))
    return found


def _computes_anew(kind: type) -> bool:
    """Phi-3 and its relatives drop what they have computed when a sequence outgrows the original length: their way of
    preparing the next pass of a generation looks at it."""
    prepare = getattr(kind, "prepare_inputs_for_generation", None)
    code = getattr(prepare, "__code__", None)
    return code is not None and "original_max_position_embeddings" in code.co_names


def _check_windows(shape: ModelShape) -> None:
    """Layers that share pages see equally far, so a layout may not give a layer another window than its own."""
    for (group, _), cache in zip(shape.layout.places, shape.caches, strict=True):
        if shape.layout.windows[group] != cache.window:
            raise refusal("its layers differ both in their windows and in the size of their keys")

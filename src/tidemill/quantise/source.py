"""The model that is quantised: its checkpoint under the architecture's names, its description, and its matrices."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from tidemill.errors import ConfigError, UnsupportedModel
from tidemill.layers.linear import Linear
from tidemill.layers.mlp import Mlp
from tidemill.layers.moe import Moe
from tidemill.layers.parameter import Parameter, Placement
from tidemill.layers.self_attention import SelfAttention
from tidemill.models.decoder import Decoder, Layer
from tidemill.models.names import stored_names, with_stored_head
from tidemill.models.registry import architectures_of, describe, native_text
from tidemill.models.spec import DecoderSpec
from tidemill.runtime.loader import with_own_head
from tidemill.weights.checkpoint import Checkpoint, open_checkpoint
from tidemill.weights.dtypes import DTYPES
from tidemill.weights.location import ModelFiles
from tidemill.weights.renamed import RenamedCheckpoint

DENSE_DTYPES = ("F64", "F32", "F16", "BF16")
META = Placement(torch.float32, torch.device("meta"))


@dataclass(frozen=True)
class Source:
    checkpoint: Checkpoint
    spec: DecoderSpec
    config: dict[str, Any]
    """config.json of what is written, without its quantisation."""
    dtype: torch.dtype
    """What scales are stored in, and what readers compute in."""
    notes: tuple[str, ...]
    """What stays dense, and what others cannot read, for people."""

    @property
    def files(self) -> ModelFiles:
        return self.checkpoint.files

    def dtype_of(self, name: str) -> torch.dtype:
        """What a tensor that stays dense is stored in: what it was; of a GGUF, float16, and float32 for vectors."""
        info = self.checkpoint.tensors[name]
        if self.files.kind == "gguf":
            return self.dtype if len(info.shape) > 1 else torch.float32
        found: torch.dtype = getattr(torch, DTYPES[info.dtype][0])
        return found

    def kept(self, name: str) -> torch.Tensor:
        """A tensor as it is stored again."""
        return self.checkpoint.read(name).to(self.dtype_of(name))

    def layer(self, index: int, place: Placement) -> Layer:
        """Not yet filled. Rotary tables are the stream's, which knows its lengths; here only their shape counts."""
        ropes = Decoder(replace(self.spec, layers=()), 1, META).ropes
        return Layer(self.spec, index, ropes, place)

    def outside(self, length: int, place: Placement) -> Decoder:
        """Everything but the layers, for sequences of up to so many tokens. Not yet filled."""
        return Decoder(replace(self.spec, layers=()), length, place)

    def parameters(self) -> Iterator[Parameter]:
        """Of the whole model, without memory."""
        yield from self.outside(1, META).parameters()
        for index in range(len(self.spec.layers)):
            yield from self.layer(index, META).parameters()

    def matrices(self) -> dict[str, tuple[int, int]]:
        """Prefix -> (outputs, inputs) of every matrix that can be quantised."""
        found: dict[str, tuple[int, int]] = {}
        for index in range(len(self.spec.layers)):
            for linear in linears_of(self.layer(index, META)):
                weight = linear.weight
                found |= {prefix: (count, weight.shape[1]) for prefix, count in linear.parts.items()}
        return found

    def others(self) -> list[str]:
        """What readers may take for linear layers, and what is none here or stays dense."""
        # transformers calls every head so, whatever the checkpoint does.
        names = list(dict.fromkeys((self.spec.head, "lm_head")))
        if self.spec.embedding_size not in (None, self.spec.hidden_size):
            names += [self.spec.project_in, self.spec.project_out]
        for index in range(len(self.spec.layers)):
            layer = self.layer(index, META)
            plain = {prefix for linear in linears_of(layer) for prefix in linear.parts}
            for parameter in layer.parameters():
                prefix = parameter.name.removesuffix(".weight")
                if len(parameter.target.shape) == 2 and parameter.name != prefix and prefix not in plain:
                    names.append(prefix)
        return names


def linears_of(layer: Layer) -> list[Linear]:
    """Those that can be quantised: of plain attention and plain MLPs, a mixture's shared one included."""
    mlp = layer.mlp.shared if isinstance(layer.mlp, Moe) else layer.mlp
    attention = layer.attention
    found = [attention.qkv, attention.out] if isinstance(attention, SelfAttention) else []
    return found + ([mlp.up, mlp.down] if isinstance(mlp, Mlp) else [])


def open_source(files: ModelFiles) -> Source:
    """Everything is refused from headers that cannot be quantised."""
    checkpoint = open_checkpoint(files)
    _refuse_quantised(checkpoint)
    text = native_text(checkpoint.config)
    if text is None:
        raise UnsupportedModel(
            f"{architectures_of(checkpoint.config)[0]} cannot be quantised",
            cause="its layers are known to transformers only; tidemill walks through those it runs itself",
            fix=f"serve it quantised on load instead: tidemill serve {files.origin} --quantization int8",
        )
    spec = describe(checkpoint.config)
    if (names := stored_names(spec, checkpoint.tensors)) is not None:
        checkpoint = RenamedCheckpoint(checkpoint, names)
    spec = with_own_head(with_stored_head(spec, checkpoint.tensors), checkpoint)
    _refuse_transposed(spec)
    dtype = _dtype(checkpoint)
    source = Source(
        checkpoint, spec, _config(checkpoint, text.raw, spec, dtype), dtype, tuple(_notes(spec, checkpoint.config))
    )
    if not source.matrices():
        raise UnsupportedModel(
            f"{files.origin} has no layers that can be quantised",
            cause="; ".join(source.notes),
            fix=f"serve it quantised on load instead: tidemill serve {files.origin} --quantization int8",
        )
    return source


def _refuse_quantised(checkpoint: Checkpoint) -> None:
    if checkpoint.files.kind == "gguf":
        return
    settings = checkpoint.config.get("quantization_config")
    if checkpoint.format is not None or settings:
        method = settings.get("quant_method") if isinstance(settings, dict) else None
        raise UnsupportedModel(
            f"{checkpoint.files.origin} is quantised already",
            cause=f"its weights are {checkpoint.format or method or settings}; rounding twice loses twice",
            fix="give the unquantised checkpoint; of quantised ones, only .gguf files are taken",
        )


def _refuse_transposed(spec: DecoderSpec) -> None:
    for layer in spec.layers:
        if getattr(layer.attention, "transposed", False) or getattr(layer.mlp, "transposed", False):
            raise UnsupportedModel(
                f"{spec.architecture} cannot be quantised",
                cause="its matrices are Conv1D layers, stored transposed, which compressed-tensors knows nothing of",
                fix="serve it quantised on load instead: --quantization int8",
            )


def _notes(spec: DecoderSpec, config: Mapping[str, Any]) -> Iterator[str]:
    kinds = Counter(type(part).__name__ for layer in spec.layers for part in (layer.attention, layer.mlp))
    if count := kinds["LatentAttentionSpec"]:
        yield f"latent attention of {count} layers stays dense"
    if count := kinds["MoeSpec"]:
        yield f"routers and experts of {count} layers stay dense, which transformers 5 does not read beside packed ones"
    if spec.architecture.startswith("Falcon"):
        yield "transformers has linear layers of its own for this family, which compressed-tensors does not fill"
    scaling = config.get("rope_scaling") or {}
    if "gguf_factors" in (scaling.get("rope_type"), scaling.get("type")):
        yield "its rotary factors come from the GGUF: tidemill reads them, transformers does not"


def _dtype(checkpoint: Checkpoint) -> torch.dtype:
    if checkpoint.files.kind == "gguf":
        return torch.float16
    sizes: Counter[str] = Counter()
    for info in checkpoint.tensors.values():
        if info.dtype in DENSE_DTYPES:
            sizes[info.dtype] += info.nbytes
    most = sizes.most_common(1)[0][0] if sizes else "F32"
    found: torch.dtype = getattr(torch, DTYPES["F32" if most == "F64" else most][0])
    return found


def _config(checkpoint: Checkpoint, text: Any, spec: DecoderSpec, dtype: torch.dtype) -> dict[str, Any]:
    config = {
        key: value
        for key, value in text.items()
        if not key.endswith(("text_config", "vision_config")) and key not in ("torch_dtype", "quantization_config")
    }
    if checkpoint.files.kind == "gguf":
        config = {key: value for key, value in config.items() if value is not None}
    config["architectures"] = [spec.architecture]
    config["tie_word_embeddings"] = spec.tie_embeddings
    config["dtype"] = str(dtype).removeprefix("torch.")
    return config


def chosen(matrices: dict[str, tuple[int, int]], ignore: tuple[str, ...], head: str) -> dict[str, tuple[int, int]]:
    """What is left of the matrices without those a user names: whole names, their ends (down_proj), or re:PATTERN."""
    left = dict(matrices)
    for name in ignore:
        matching = [prefix for prefix in matrices if _matcher(name)(prefix)]
        if not matching and name != head:
            ends = sorted({prefix.rsplit(".", 1)[-1] for prefix in matrices})
            raise ConfigError(
                f"--ignore {name} names no matrix of this model",
                param="ignore",
                cause=f"there are {len(matrices):,}, such as {next(iter(matrices))}; they end in {', '.join(ends)}",
                fix=f"--ignore {ends[0]}, a whole name, or re:PATTERN",
            )
        for prefix in matching:
            left.pop(prefix, None)
    if not left:
        raise ConfigError(
            "--ignore leaves nothing to quantise",
            param="ignore",
            cause=f"all {len(matrices):,} matrices are named",
            fix="name fewer",
        )
    return left


def _matcher(name: str) -> Callable[[str], bool]:
    if not name.startswith("re:"):
        return lambda prefix: f".{prefix}".endswith(f".{name}") or prefix.startswith(f"{name}.")
    try:
        pattern = re.compile(name.removeprefix("re:"))
    except re.error as error:
        raise ConfigError(
            f"--ignore {name} is no pattern", param="ignore", cause=str(error), fix=r"--ignore 're:.*\.down_proj$'"
        ) from error
    return lambda prefix: pattern.match(prefix) is not None

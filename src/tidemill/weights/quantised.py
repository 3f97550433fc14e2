"""Folders of quantised weights, seen as checkpoints of dense names: `model.layers.0.self_attn.q_proj.weight` and so on.

Which tensors make up a matrix is the format's business (`quant/formats`); here formats are found, and packed weights
whose format nobody names are refused, since without their scales they load as noise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from importlib import import_module
from math import prod
from typing import TYPE_CHECKING, Any

from tidemill.errors import BadCheckpoint, UnsupportedModel
from tidemill.quant.formats.compressed_config import notes
from tidemill.quant.formats.matrix import QuantisedMatrix
from tidemill.quant.formats.parts import NOT_READ
from tidemill.quant.scheme import Scheme
from tidemill.weights.checkpoint import Checkpoint, TensorInfo

if TYPE_CHECKING:
    import torch

    from tidemill.quant.stored import StoredMatrix

FORMATS = {
    "awq": "awq",
    "gptq": "gptq",
    "bitsandbytes": "bitsandbytes",
    "compressed-tensors": "compressed",
    "fp8": "fp8",
    "fbgemm_fp8": "fp8",
    "modelopt": "fp8",
    "mxfp4": "mxfp4",
}
"""What config.json calls a format -> its module in `quant/formats`."""
PACKED_DTYPES = frozenset(("I8", "U8", "I16", "U16", "I32", "U32", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F4"))
CAUSAL_MASKS = ("attn.bias", "attention.bias")
"""Old checkpoints store them beside the weights, as bytes."""


class QuantisedFolder:
    """Presents matrices under their dense names, and hides what they are stored as."""

    def __init__(self, checkpoint: Checkpoint, format: str, matrices: Mapping[str, QuantisedMatrix]) -> None:
        self._checkpoint, self._matrices = checkpoint, matrices
        self.files, self.config = checkpoint.files, checkpoint.config
        self.generation_config = checkpoint.generation_config
        self.format: str | None = format
        hidden = {name for matrix in matrices.values() for name in matrix.tensors}
        self.tensors: dict[str, TensorInfo] = {
            name: info
            for name, info in checkpoint.tensors.items()
            if name not in hidden and not name.endswith(NOT_READ)
        }
        for name, matrix in matrices.items():
            parts = [checkpoint.tensors[part] for part in matrix.tensors]
            nbytes = sum(part.nbytes for part in parts)
            self.tensors[name] = TensorInfo(name, matrix.shape, matrix.kind, nbytes, parts[0].file)
        self.schemes: dict[str, Scheme] = {
            name: matrix.scheme for name, matrix in matrices.items() if matrix.scheme is not None
        }

    def read(self, name: str) -> torch.Tensor:
        if name in self._matrices:
            return self.read_stored(name).dense()
        return self._checkpoint.read(name)

    def read_stored(self, name: str) -> StoredMatrix:
        return self._matrices[name].read(self._checkpoint.read)


def opened(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint itself where it is dense, and its dense face where it is quantised."""
    settings = quantisation_of(checkpoint.config)
    if settings is None:
        return checkpoint
    origin = checkpoint.files.origin
    method = str(settings.get("quant_method", "")).lower()
    if method not in FORMATS:
        raise UnsupportedModel(
            f"{origin} is quantised as {method or settings!r:.80}, which is not read",
            cause=f"its quantization_config says so; read are {', '.join(FORMATS)}, and GGUF files",
            fix="serve the unquantised checkpoint with --quantization int4, or a .gguf of the model",
        )
    module = import_module(f"tidemill.quant.formats.{FORMATS[method]}")
    # bitsandbytes tells shapes in small tensors, not in headers.
    more = (checkpoint.read,) if method == "bitsandbytes" else ()
    matrices: dict[str, QuantisedMatrix] = module.matrices(settings, checkpoint.tensors, origin, *more)
    if not matrices:
        raise BadCheckpoint(
            f"{origin}: config.json announces {method} weights, and none of its tensors are such",
            cause=f"it holds {len(checkpoint.tensors)} tensors, such as {min(checkpoint.tensors)}",
            fix="remove quantization_config from config.json if the weights are dense, or fetch them again",
        )
    return QuantisedFolder(checkpoint, method, matrices)


def quantisation_of(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """config.json's word on quantised weights, under any of its names."""
    settings = config.get("quantization_config") or config.get("compression_config")
    if not settings:
        return None
    if not isinstance(settings, Mapping):
        raise BadCheckpoint(
            f"config.json: quantization_config is {settings!r:.80}, expected an object",
            fix="fetch config.json of the model again",
        )
    if "quant_method" not in settings and "compression_config" in config:
        return {"quant_method": "compressed-tensors", **settings}
    return settings


def described(checkpoint: Checkpoint) -> str:
    """What the quantised matrices are, for people: 'Q4_1 (210 matrices), Q6_K (1)'."""
    kinds = Counter(checkpoint.tensors[name].dtype for name in checkpoint.schemes if name in checkpoint.tensors)
    return ", ".join(f"{kind} ({count})" for kind, count in kinds.most_common(4))


def not_followed(checkpoint: Checkpoint) -> tuple[str, ...]:
    """What config.json asks for beyond the weights, and the engine decides by itself."""
    settings = quantisation_of(checkpoint.config)
    return () if settings is None or checkpoint.format != "compressed-tensors" else notes(settings)


def refuse_unknown(checkpoint: Checkpoint) -> None:
    """Packed tensors that no format has a part for."""
    if checkpoint.files.kind != "folder":
        return
    for name, info in checkpoint.tensors.items():
        if info.dtype not in PACKED_DTYPES or name.endswith(CAUSAL_MASKS) or prod(info.shape) <= 1:
            continue
        raise BadCheckpoint(
            f"{checkpoint.files.origin}: tensor {info.name} is {info.dtype}, packed numbers whose scales nobody names",
            cause=f"{checkpoint.format} has no part for it"
            if checkpoint.format
            else "config.json has no quantization_config",
            fix="fetch config.json of the model again; a quantised checkpoint says there how it was made",
        )

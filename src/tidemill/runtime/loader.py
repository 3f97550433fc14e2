"""Fills a model from a checkpoint: a copy loop over the parameters the model declares.

Everything that can disagree is checked from the headers before the first byte is copied.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Protocol

import torch

from tidemill.errors import BadCheckpoint
from tidemill.layers.parameter import Parameter
from tidemill.models.spec import DecoderSpec
from tidemill.weights.checkpoint import Checkpoint

logger = logging.getLogger(__name__)

LAYER = re.compile(r".*?\.\d+\.")
NO_WEIGHTS = (
    "lm_head.weight",
    "embed_out.weight",
    "rotary_emb.inv_freq",
    "attn.bias",
    "attn.masked_bias",
    "attention.bias",
    "attention.masked_bias",
)
"""What checkpoints hold besides: heads that are tied to the embedding, and tables and masks of old implementations."""


class Loadable(Protocol):
    def parameters(self) -> Iterator[Parameter]: ...


def load_weights(
    model: Loadable,
    checkpoint: Checkpoint,
    on_progress: Callable[[str, int, int], None] | None = None,
    check: bool = False,
) -> None:
    """`check` also looks at every number once it is loaded."""
    parameters = list(model.parameters())
    _check(parameters, checkpoint)
    total = sum(parameter.target.numel() for parameter in parameters)
    done = 0
    for parameter in parameters:
        parameter.fill(checkpoint.read(parameter.name))
        if check:
            refuse_not_finite(parameter, checkpoint)
        done += parameter.target.numel()
        if on_progress is not None:
            on_progress("loading weights", done, total)


def _check(parameters: list[Parameter], checkpoint: Checkpoint) -> None:
    origin = checkpoint.files.origin
    for parameter in parameters:
        info = checkpoint.tensors.get(parameter.name)
        if info is None:
            raise BadCheckpoint(
                f"{origin} has no tensor {parameter.name}, which its config asks for",
                cause=f"the checkpoint holds {len(checkpoint.tensors)} tensors, this one is not among them",
                fix="fetch the checkpoint again, or correct config.json",
            )
        if tuple(info.shape) != parameter.stored_shape:
            raise BadCheckpoint(
                f"{info.file}: tensor {info.name} has shape {tuple(info.shape)}, "
                f"the config makes it {parameter.stored_shape}",
                fix="config.json and the weights belong to different models: fetch both again",
            )
    unused = set(checkpoint.tensors) - {parameter.name for parameter in parameters}
    unused = {name for name in unused if not name.endswith(NO_WEIGHTS)}
    layers = {found[0] for parameter in parameters if (found := LAYER.match(parameter.name))}
    for name in sorted(unused):
        if name.endswith((".weight", ".bias")) and (found := LAYER.match(name)) and found[0] in layers:
            raise BadCheckpoint(
                f"{checkpoint.tensors[name].file}: tensor {name} has no place in this model",
                cause="its layer is there, but config.json announces no such part of it",
                fix="config.json and the weights belong to different models: fetch both again",
            )
    if unused:
        logger.warning("%d tensors of %s are not used, such as %s", len(unused), origin, sorted(unused)[0])


def with_own_head(spec: DecoderSpec, checkpoint: Checkpoint) -> DecoderSpec:
    """A config may call the head tied although the checkpoint holds another one: then that one counts, as it does in
    transformers."""
    head, embedding = f"{spec.head}.weight", f"{spec.embedding}.weight"
    if not spec.tie_embeddings or not {head, embedding} <= set(checkpoint.tensors):
        return spec
    if torch.equal(checkpoint.read(head), checkpoint.read(embedding)):
        return spec
    logger.warning("%s holds a head of its own, which is used although config.json ties it", checkpoint.files.origin)
    return replace(spec, tie_embeddings=False)


def refuse_not_finite(parameter: Parameter, checkpoint: Checkpoint) -> None:
    """Raises where a loaded parameter holds NaN or infinity: by the file's fault, or by the precision it runs in."""
    wrong = _num_not_finite(parameter.target)
    if not wrong:
        return
    _refuse_stored(parameter.name, checkpoint)
    info, stored = checkpoint.tensors[parameter.name], checkpoint.read(parameter.name)
    dtype = str(parameter.target.dtype).removeprefix("torch.")
    raise BadCheckpoint(
        f"{info.file}: {wrong:,} of {stored.numel():,} values of tensor {info.name} do not fit in {dtype}",
        cause=f"they are finite in the file, as {info.dtype}, and infinite once loaded",
        fix="--dtype bfloat16, or --dtype float32",
    )


def check_stored(checkpoint: Checkpoint, on_progress: Callable[[str, int, int], None] | None = None) -> None:
    """The same for files that somebody else loads."""
    for done, name in enumerate(checkpoint.tensors, 1):
        _refuse_stored(name, checkpoint)
        if on_progress is not None:
            on_progress("checking weights", done, len(checkpoint.tensors))


def _refuse_stored(name: str, checkpoint: Checkpoint) -> None:
    info, stored = checkpoint.tensors[name], checkpoint.read(name)
    if wrong := _num_not_finite(stored):
        raise BadCheckpoint(
            f"{info.file}: {wrong:,} of {stored.numel():,} values of tensor {info.name} are NaN or infinite",
            cause="the file is corrupt, or was saved so",
            fix="fetch the file again; if that does not help, the model itself is broken",
        )


def _num_not_finite(tensor: torch.Tensor) -> int:
    if not tensor.is_floating_point() or not tensor.numel():
        return 0
    wide = tensor.float() if tensor.element_size() == 1 else tensor
    # One pass that allocates nothing answers for almost every tensor there is: a NaN is both extremes.
    if torch.stack(torch.aminmax(wide)).isfinite().all():
        return 0
    return tensor.numel() - int(torch.isfinite(wide).sum())

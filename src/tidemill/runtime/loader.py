"""Fills a model from a checkpoint, or with random numbers: a copy loop over the parameters the model declares.

Everything that can disagree is checked from the headers before the first byte is copied. How bytes reach a GPU fast is
`staging.py`'s.
"""

from __future__ import annotations

import logging
import re
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Protocol, cast

import torch

from tidemill.errors import BadCheckpoint
from tidemill.layers.parameter import Parameter, Placement
from tidemill.models.spec import DecoderSpec
from tidemill.quant.on_load import PackedRows
from tidemill.runtime.staging import CHUNK_BYTES, MOST_THREADS, Stager, in_parallel
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

DUMMY_SPREAD = 0.02

Progress = Callable[[str, int, int], None]


class Loadable(Protocol):
    def parameters(self) -> Iterator[Parameter]: ...


def load_weights(
    model: Loadable,
    checkpoint: Checkpoint,
    on_progress: Progress | None = None,
    check: bool = False,
    device: torch.device | None = None,
) -> None:
    """`check` also looks at every number once it is loaded. A `device` that is a GPU is loaded by several threads."""
    parameters = list(model.parameters())
    check_tensors(parameters, checkpoint)
    if device is not None and device.type == "cuda":
        filled = fill_in_parallel(parameters, checkpoint, device, min(MOST_THREADS, torch.get_num_threads()), check)
    else:
        filled = _fill_in_order(parameters, checkpoint, check)
    _report(filled, parameters, on_progress)
    _give_back(device)


def _fill_in_order(parameters: list[Parameter], checkpoint: Checkpoint, check: bool) -> Iterator[Parameter]:
    for parameter in parameters:
        if keeps_stored(parameter, checkpoint):
            parameter.fill_packed(checkpoint.read_stored(parameter.name))
        else:
            parameter.fill(checkpoint.read(parameter.name))
        if check:
            refuse_not_finite(parameter, checkpoint)
        yield parameter


def fill_in_parallel(
    parameters: list[Parameter],
    checkpoint: Checkpoint,
    device: torch.device,
    threads: int,
    check: bool = False,
    chunk_bytes: int = CHUNK_BYTES,
) -> Iterator[Parameter]:
    """Stored bytes go to the device as they are; whatever rearranges, widens or quantises them runs there."""
    # Views of mapped files are made in no time, but a folder opens its files when they are first asked for.
    reading = nullcontext() if checkpoint.files.kind == "gguf" else threading.Lock()
    # Quantising takes many times the memory of what it reads: one at a time, all in the same memory.
    changing = threading.Lock()

    def change(fill: Callable[[], None]) -> None:
        with changing:
            fill()
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()

    def fill(stager: Stager, parameter: Parameter) -> None:
        if keeps_stored(parameter, checkpoint):
            with reading:
                packed = checkpoint.read_stored(parameter.name)
            change(lambda: parameter.fill_packed(packed))
        else:
            fill_dense(stager, parameter)
        if check:
            refuse_not_finite(parameter, checkpoint)

    def fill_dense(stager: Stager, parameter: Parameter) -> None:
        with reading:
            stored = checkpoint.read(parameter.name)
        target = parameter.target
        if isinstance(target, torch.Tensor) and target.device.type != device.type:
            # A layer that stays in host memory.
            parameter.fill(stored)
        elif isinstance(target, torch.Tensor) and _takes_bytes(parameter, target, stored):
            stager.copy(stored, target)
        else:
            staged = stager.copy(stored)
            change(lambda: parameter.fill(staged))

    return in_parallel(fill, parameters, device, threads, chunk_bytes)


def keeps_stored(parameter: Parameter, checkpoint: Checkpoint) -> bool:
    """Whether a parameter's memory holds the very codes of the file."""
    target = parameter.target
    return isinstance(target, PackedRows) and target.weight.scheme == checkpoint.schemes.get(parameter.name)


def _takes_bytes(parameter: Parameter, target: torch.Tensor, stored: torch.Tensor) -> bool:
    """Whether a target is filled by the very bytes of the file."""
    changed = parameter.transposed or parameter.rows is not None or parameter.adjust is not None
    return not changed and target.dtype == stored.dtype and target.is_contiguous()


def fill_dummy(model: Loadable, place: Placement, on_progress: Progress | None = None) -> None:
    """Small random numbers in place of weights, the same at every start, made where they will live."""
    parameters = list(model.parameters())

    def fill() -> Iterator[Parameter]:
        for parameter in parameters:
            parameter.fill(_dummy(parameter, place))
            yield parameter

    _report(fill(), parameters, on_progress)
    _give_back(place.device)


def _give_back(device: torch.device | None) -> None:
    """What loading needed in passing is planned to be the cache's."""
    if device is not None and device.type == "cuda":
        torch.cuda.empty_cache()


def _dummy(parameter: Parameter, place: Placement) -> torch.Tensor:
    numbers = torch.empty(parameter.stored_shape, dtype=place.dtype, device=place.device)
    if numbers.dim() < 2:
        return numbers.fill_(0.0 if parameter.name.endswith(".bias") else 1.0)
    generator = torch.Generator(place.device).manual_seed(zlib.crc32(parameter.name.encode()))
    return numbers.normal_(0.0, DUMMY_SPREAD, generator=generator)


def _report(filled: Iterator[Parameter], parameters: list[Parameter], on_progress: Progress | None) -> None:
    total, done = sum(parameter.target.numel() for parameter in parameters), 0
    for parameter in filled:
        done += parameter.target.numel()
        if on_progress is not None:
            on_progress("loading weights", done, total)


def check_tensors(parameters: list[Parameter], checkpoint: Checkpoint) -> None:
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
        # AutoGPTQ writes a bias of zeros beside every matrix, wanted or not.
        if checkpoint.format == "gptq" and name.endswith(".bias") and not checkpoint.read(name).any():
            continue
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
    target = parameter.target
    # A packed target shows what it could not hold in its scales.
    wrong = _num_not_finite(target.scales if isinstance(target, PackedRows) else cast(torch.Tensor, target))
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


def check_stored(checkpoint: Checkpoint, on_progress: Progress | None = None) -> None:
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

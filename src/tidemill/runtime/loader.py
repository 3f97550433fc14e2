"""Fills a model from a checkpoint: a copy loop over the parameters the model declares.

Everything that can disagree is checked from the headers before the first byte is copied.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Protocol

from tidemill.errors import BadCheckpoint
from tidemill.layers.parameter import Parameter
from tidemill.weights.checkpoint import Checkpoint

logger = logging.getLogger(__name__)


class Loadable(Protocol):
    def parameters(self) -> Iterator[Parameter]: ...


def load_weights(
    model: Loadable, checkpoint: Checkpoint, on_progress: Callable[[str, int, int], None] | None = None
) -> None:
    parameters = list(model.parameters())
    _check(parameters, checkpoint)
    total = sum(parameter.target.numel() for parameter in parameters)
    done = 0
    for parameter in parameters:
        parameter.target.copy_(checkpoint.read(parameter.name))
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
        if tuple(info.shape) != tuple(parameter.target.shape):
            raise BadCheckpoint(
                f"{info.file}: tensor {info.name} has shape {tuple(info.shape)}, "
                f"the config makes it {tuple(parameter.target.shape)}",
                fix="config.json and the weights belong to different models: fetch both again",
            )
    unused = set(checkpoint.tensors) - {parameter.name for parameter in parameters}
    unused = {name for name in unused if not name.endswith("rotary_emb.inv_freq") and name != "lm_head.weight"}
    if unused:
        logger.warning("%d tensors of %s are not used, such as %s", len(unused), origin, sorted(unused)[0])

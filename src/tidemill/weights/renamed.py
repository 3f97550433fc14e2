"""A checkpoint under other names: the same tensors, called as a model calls them.

For files whose names carry another prefix than the architecture's class (old GPT-2, the text part of a multimodal
model). Which name is which is the model's business; here it is only looked up.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tidemill.errors import BadCheckpoint
from tidemill.weights.checkpoint import Checkpoint, TensorInfo

if TYPE_CHECKING:
    import torch

    from tidemill.quant.stored import StoredMatrix


class RenamedCheckpoint:
    """Presents exactly the tensors in `names`, a mapping of presented name -> stored name.

    A TensorInfo keeps the stored name, so that an error names what is really in the file.
    """

    def __init__(self, checkpoint: Checkpoint, names: Mapping[str, str]) -> None:
        self._checkpoint, self._names = checkpoint, dict(names)
        self.files = checkpoint.files
        self.config = checkpoint.config
        self.generation_config = checkpoint.generation_config
        absent = [stored for stored in self._names.values() if stored not in checkpoint.tensors]
        if absent:
            raise BadCheckpoint(
                f"{checkpoint.files.origin} has no tensor {absent[0]}",
                cause=f"{len(absent)} of {len(self._names)} names that were looked for are not in it",
                fix="check that the weights belong to this config.json",
            )
        self.tensors: dict[str, TensorInfo] = {
            presented: checkpoint.tensors[stored] for presented, stored in self._names.items()
        }

        self.format = checkpoint.format
        self.schemes = {
            presented: checkpoint.schemes[stored]
            for presented, stored in self._names.items()
            if stored in checkpoint.schemes
        }

    def read_stored(self, name: str) -> StoredMatrix:
        return self._checkpoint.read_stored(self._names[name])

    def read(self, name: str) -> torch.Tensor:
        if name not in self._names:
            raise BadCheckpoint(
                f"{self.files.origin} has no tensor {name}",
                cause=f"{len(self._names)} of its tensors have a name here, none has this one",
                fix="check that the weights belong to this config.json",
            )
        return self._checkpoint.read(self._names[name])

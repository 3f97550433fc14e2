"""Which files of a Hugging Face folder hold the weights: one file, or the shards that an index names.

Knows file names, the index's JSON and how to say what a folder without weights is; does not open the files themselves.
Safetensors and pickles are laid out alike, so both are found here.
"""

from __future__ import annotations

import logging
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tidemill.errors import BadCheckpoint, UnsupportedModel
from tidemill.weights.checkpoint import TensorInfo
from tidemill.weights.json_file import read_json

logger = logging.getLogger(__name__)

_SAFETENSORS, _PICKLE = "model.safetensors", "pytorch_model.bin"
_PICKLE_ENDINGS = (".bin", ".pt", ".pth")
# In safetensors or pickles: adapters, and Mistral's and Meta's copies of the weights in layouts of their own.
_OTHER_LAYOUTS = ("adapter_", "consolidated")
_NO_WEIGHTS = ("training_args", "optimizer", "scheduler", "scaler", "rng_state", "openvino")
_OTHER_FRAMEWORKS = (".ckpt", ".h5", ".msgpack", ".onnx", ".npz", ".ot")


@dataclass(frozen=True)
class Shards:
    files: tuple[str, ...]
    index: str | None = None
    promised: Mapping[str, str] = field(default_factory=dict)
    """Tensor -> file, as the index says."""


def safetensors_shards(folder: Path) -> Shards | None:
    return _find(folder, _SAFETENSORS, (".safetensors",))


def pickled_shards(folder: Path) -> Shards | None:
    return _find(folder, _PICKLE, _PICKLE_ENDINGS)


def _find(folder: Path, usual: str, endings: tuple[str, ...]) -> Shards | None:
    """By index, by the usual name, or whatever else has the ending and is neither adapter nor leftover."""
    index = f"{usual}.index.json"
    if (folder / index).exists():
        shards = _indexed(folder, index)
    elif (folder / usual).exists():
        shards = Shards((usual,))
    else:
        names = sorted(path.name for path in folder.iterdir() if path.suffix in endings)
        own = tuple(name for name in names if not name.startswith((*_OTHER_LAYOUTS, *_NO_WEIGHTS)))
        if not own:
            return None
        shards = Shards(own)
    if adapter := _adapter(path.name for path in folder.iterdir()):
        logger.warning("%s is not applied: a LoRA adapter beside a model; to use it, merge it", folder / adapter)
    return shards


def _adapter(names: Iterable[str]) -> str | None:
    return min((name for name in names if name.startswith("adapter_model.")), default=None)


def no_weights(folder: Path) -> UnsupportedModel | BadCheckpoint:
    """What a folder is that has neither safetensors nor pickles of a whole model."""
    names = sorted(path.name for path in folder.iterdir())
    if adapter := _adapter(names):
        return UnsupportedModel(
            f"{folder} is a LoRA adapter, not a model",
            cause=f"it holds {adapter} and no model weights",
            fix="merge it into its base model and serve the folder merged: pip install peft && python -c 'import sys; "
            "from peft import AutoPeftModelForCausalLM as Adapted; "
            'Adapted.from_pretrained(sys.argv[1]).merge_and_unload().save_pretrained("merged")\' '
            f"{shlex.quote(str(folder))}",
        )
    if copy := next((name for name in names if name.startswith("consolidated")), None):
        author = "Mistral" if copy.endswith(".safetensors") else "Meta"
        return UnsupportedModel(
            f"{folder} holds only {copy}, the weights in {author}'s own layout",
            cause="its tensors and its params.json are named otherwise than in Hugging Face's layout, which is read",
            fix="fetch the other files of the same repository: hf download org/name --exclude 'consolidated*'",
        )
    others = [name for name in names if name.endswith(_OTHER_FRAMEWORKS)]
    return BadCheckpoint(
        f"{folder} has no weights that can be read",
        cause=f"there is neither a .safetensors file nor {_PICKLE}" + (f", only {', '.join(others)}" if others else ""),
        fix="finish the download (hf download org/name)",
    )


def _indexed(folder: Path, index: str) -> Shards:
    """What an index promises, after checking that every file it names is there."""
    weight_map = read_json(folder / index, required=True).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise BadCheckpoint(
            f"{folder / index} names no tensors",
            cause="its weight_map is missing or empty",
            fix=f"download {index} again",
        )
    odd = [
        name for name, file in weight_map.items() if not (isinstance(file, str) and file and Path(file).name == file)
    ]
    if odd:
        raise BadCheckpoint(
            f"{folder / index} places tensor {odd[0]} in {weight_map[odd[0]]!r}",
            cause="a shard is the name of a file beside the index",
            fix=f"download {index} again",
        )
    files = tuple(sorted(set(weight_map.values())))
    missing = [file for file in files if not (folder / file).is_file()]
    if missing:
        raise BadCheckpoint(
            f"{folder} lacks {missing[0]}" + (f" and {len(missing) - 1} more shards" if missing[1:] else ""),
            cause=f"{index} names {len(files)} shards, {len(missing)} of them are not there",
            fix="finish the download (hf download org/name), or copy the missing files",
        )
    return Shards(files, index, weight_map)


def gather(folder: Path, shards: Shards, found: Iterable[TensorInfo]) -> dict[str, TensorInfo]:
    """The tensors of all shards by name, after checking that each is where it belongs and there once."""
    tensors: dict[str, TensorInfo] = {}
    for info in found:
        if (other := tensors.setdefault(info.name, info)) is not info:
            raise BadCheckpoint(
                f"tensor {info.name} is in both {other.file} and {info.file}",
                cause="the files of two checkpoints were mixed, so nothing says which one is meant",
                fix=f"delete the file of {folder} that does not belong, or download the model into an empty folder",
            )
    if not tensors:
        raise BadCheckpoint(
            f"{folder} holds no tensors", cause=f"{', '.join(shards.files)}: empty", fix="download the model again"
        )
    for name, file in shards.promised.items():
        actual = tensors.get(name)
        if actual is None or actual.file != file:
            elsewhere = "" if actual is None else f", but it is in {actual.file}"
            raise BadCheckpoint(
                f"tensor {name} is missing from {file}",
                cause=f"{shards.index} promises it there{elsewhere}",
                fix=f"download {file} and {shards.index} again, or delete {folder} and download the model again",
            )
    return tensors

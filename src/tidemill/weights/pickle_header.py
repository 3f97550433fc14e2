"""What a pickled checkpoint holds, found without executing it and without torch.

torch.save writes a zip: one pickle that describes the tensors, and a member per storage. Unpickling calls whatever the
file names, so here every name resolves to an inert stand-in of ours or is refused, in a machine of ours
(`pickle_machine`); the stand-ins record shapes and types, and their claims are checked against the zip's directory.
Does not read a single weight (`pickle_folder` does).
"""

from __future__ import annotations

import logging
import math
import pickle
import shlex
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tidemill.errors import BadCheckpoint, TidemillError, UnsupportedModel
from tidemill.weights.checkpoint import TensorInfo
from tidemill.weights.dtypes import DTYPES
from tidemill.weights.lfs import refuse_lfs_pointer
from tidemill.weights.location import GGUF_START, misnamed_gguf
from tidemill.weights.pickle_machine import ForeignInstruction, PickleMachine

logger = logging.getLogger(__name__)

_ZIP_START = b"PK\x03\x04"
# A pickle of names and shapes takes a few hundred bytes a tensor; more is not a description of weights.
_MAX_PICKLE = 32_000_000
_WEIGHTS_ALONE = "save the weights alone: model.save_pretrained(folder), or torch.save(model.state_dict(), file)"
_STORAGES = {
    "BoolStorage": "BOOL",
    "ByteStorage": "U8",
    "CharStorage": "I8",
    "ShortStorage": "I16",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "IntStorage": "I32",
    "FloatStorage": "F32",
    "LongStorage": "I64",
    "DoubleStorage": "F64",
    "ComplexFloatStorage": "C64",
}
_BY_TORCH_NAME = {torch_name: name for name, (torch_name, _) in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class _Dtype:
    name: str


@dataclass(frozen=True, slots=True)
class _Storage:
    member: str
    dtype: str
    count: int


@dataclass(frozen=True, slots=True)
class _Tensor:
    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str


def _tensor_v2(storage: Any, offset: Any, shape: Any, stride: Any, *unused: object) -> _Tensor:
    return _tensor_v3(storage, offset, shape, stride, None, None, _Dtype(storage.dtype))


def _tensor_v3(
    storage: Any, offset: Any, shape: Any, stride: Any, grad: object, hooks: object, dtype: Any, *unused: object
) -> _Tensor:
    if not isinstance(storage, _Storage) or not isinstance(dtype, _Dtype):
        raise pickle.UnpicklingError("a tensor without a storage or a type")
    if not isinstance(shape, tuple) or not isinstance(stride, tuple) or len(shape) != len(stride):
        raise pickle.UnpicklingError("a tensor without a shape and as many strides")
    if not all(type(number) is int and number >= 0 for number in (offset, *shape, *stride)):
        raise pickle.UnpicklingError("a tensor whose shape, strides and offset are no numbers from zero up")
    return _Tensor(storage, offset, shape, stride, dtype.name)


def _parameter(tensor: Any, *unused: object) -> Any:
    return tensor


def _empty_dictionary() -> dict[str, Any]:
    """Entries come one by one after it; made of an argument, it would copy as often as a file asks for it."""
    return {}


_STAND_INS: Mapping[str, Any] = {
    "collections.OrderedDict": _empty_dictionary,
    "torch._utils._rebuild_tensor_v2": _tensor_v2,
    "torch._utils._rebuild_tensor_v3": _tensor_v3,
    "torch._utils._rebuild_parameter": _parameter,
    # Bytes without a type, beside which the tensor says its own.
    "torch.storage.UntypedStorage": _Dtype("U8"),
    **{f"torch.{storage}": _Dtype(name) for storage, name in _STORAGES.items()},
    **{f"torch.{torch_name}": _Dtype(name) for torch_name, name in _BY_TORCH_NAME.items()},
}


def read_pickle_header(path: Path) -> list[TensorInfo]:
    """Every tensor of one file, after checking that the file holds all of them."""
    refuse_lfs_pointer(path)
    try:
        with path.open("rb") as handle:
            start = handle.read(len(_ZIP_START))
    except OSError as error:
        raise BadCheckpoint(f"{path} cannot be read", cause=str(error), fix="check its permissions") from error
    if start == GGUF_START:
        raise misnamed_gguf(path)
    if start != _ZIP_START:
        raise _not_a_zip(path, start)
    data, sizes = _open_zip(path)
    tensors = _tensors(path, _unpickle(path, data))
    return [_checked(path, name, tensor, sizes) for name, tensor in tensors.items()]


def _open_zip(path: Path) -> tuple[bytes, dict[str, int]]:
    """The pickle, and the size of every storage by its key."""
    length = path.stat().st_size
    try:
        with zipfile.ZipFile(path) as archive:
            # torch maps members as they are, so a compressed one could not be read.
            whole = {
                entry.filename: entry.file_size
                for entry in archive.infolist()
                if entry.compress_type == zipfile.ZIP_STORED and entry.header_offset + entry.file_size <= length
            }
            found = [name for name in whole if name == "data.pkl" or name.endswith("/data.pkl")]
            if len(found) != 1:
                raise _broken(path, f"it is a zip with {len(found)} data.pkl among {len(whole)} files")
            if whole[found[0]] > _MAX_PICKLE:
                raise _broken(path, f"its description takes {whole[found[0]]} bytes, more than {_MAX_PICKLE}")
            data = archive.read(found[0])
    except BadCheckpoint:
        raise
    except Exception as error:
        # zipfile meets a damaged directory with any of a dozen exceptions.
        raise _broken(path, f"{type(error).__name__}: {error}") from error
    storages = f"{found[0].removesuffix('data.pkl')}data/"
    return data, {name.removeprefix(storages): size for name, size in whole.items() if name.startswith(storages)}


def _unpickle(path: Path, data: bytes) -> Any:
    def find_name(module: str, name: str) -> Any:
        stand_in = _STAND_INS.get(f"{module}.{name}")
        if stand_in is None:
            raise UnsupportedModel(
                f"{path} is not loaded: it asks for {module}.{name}",
                cause="unpickling calls what the file names, and only what makes tensors is safe; nothing was executed",
                fix="use the model's safetensors, or a copy of it that you trust",
            )
        return stand_in

    try:
        return PickleMachine(data, find_name, _storage).run()
    except TidemillError:
        raise
    except ForeignInstruction as error:
        raise UnsupportedModel(
            f"{path} is not loaded: it holds what no dictionary of tensors has",
            cause=str(error),
            fix=f"{_WEIGHTS_ALONE}; if it is a download, download it again",
        ) from error
    except Exception as error:
        # A damaged pickle may raise anything: it is a program for a small machine, and this one lost its way.
        raise _broken(path, f"its pickle cannot be followed: {type(error).__name__}: {error}") from error


def _storage(reference: Any) -> _Storage:
    kind, dtype, key, _, count = reference
    if kind != "storage" or not isinstance(dtype, _Dtype):
        raise pickle.UnpicklingError("a reference to something else than a storage")
    if not isinstance(key, str) or type(count) is not int:
        raise pickle.UnpicklingError("a storage without a name or a size")
    return _Storage(key, dtype.name, count)


def _tensors(path: Path, value: Any) -> dict[str, _Tensor]:
    nested = [key for key, entry in value.items() if isinstance(entry, dict)] if isinstance(value, dict) else []
    if nested or not isinstance(value, dict):
        what = f"its entry '{nested[0]}' is itself a dictionary" if nested else f"it holds a {type(value).__name__}"
        raise UnsupportedModel(
            f"{path} is not a dictionary of tensors",
            cause=f"{what}, as in the checkpoint of a training run",
            fix=_WEIGHTS_ALONE,
        )
    if nameless := [key for key, entry in value.items() if isinstance(entry, _Tensor) and not isinstance(key, str)]:
        raise _broken(path, f"a tensor has the number {nameless[0]} where its name should be")
    tensors = {key: entry for key, entry in value.items() if isinstance(entry, _Tensor)}
    if others := [str(key) for key, entry in value.items() if not isinstance(entry, _Tensor)]:
        logger.warning("%d entries of %s are no tensors and are not read, such as %s", len(others), path, others[0])
    return tensors


def _checked(path: Path, name: str, tensor: _Tensor, sizes: Mapping[str, int]) -> TensorInfo:
    """A tensor whose storage is in the file, whole, and which lies inside its storage."""
    storage, width = tensor.storage, DTYPES[tensor.dtype][1]
    nbytes = storage.count * DTYPES[storage.dtype][1]
    if sizes.get(storage.member) != nbytes:
        found = sizes.get(storage.member, "no")
        raise _broken(path, f"tensor {name} lies in a storage of {nbytes} bytes, of which the file has {found}")
    count = math.prod(tensor.shape)
    last = tensor.offset + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride, strict=True))
    if count and (last + 1) * width > nbytes:
        raise _broken(path, f"tensor {name} of {tensor.dtype} {tensor.shape} ends after its storage of {nbytes} bytes")
    if count * width > nbytes:
        # Read, it would take the memory that its shape claims, which has no bound.
        raise UnsupportedModel(
            f"{path} is not loaded: tensor {name} repeats its numbers",
            cause=f"its shape {tensor.shape} has {count} elements, its storage of {nbytes} bytes fewer",
            fix="save it whole: torch.save({name: t.contiguous() for name, t in model.state_dict().items()}, file)",
        )
    return TensorInfo(name, tensor.shape, tensor.dtype, count * width, path.name)


def _not_a_zip(path: Path, start: bytes) -> UnsupportedModel | BadCheckpoint:
    if not start.startswith(b"\x80"):
        return _broken(
            path, "the file is empty" if not start else f"it starts with {start!r}, which torch never writes"
        )
    return UnsupportedModel(
        f"{path} is in the format torch.save had before 1.6, which is not read",
        cause="it is one bare pickle, whose tensors cannot be found without executing it",
        fix="python -c 'import sys, torch; p = sys.argv[1]; "
        f'torch.save(torch.load(p, weights_only=True, map_location="cpu"), p)\' {shlex.quote(str(path))}',
    )


def _broken(path: Path, cause: str) -> BadCheckpoint:
    return BadCheckpoint(f"{path} is truncated or corrupt", cause=cause, fix=f"delete {path} and download it again")

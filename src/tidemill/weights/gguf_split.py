"""A GGUF cut into files, as llama-gguf-split writes them: `name-00001-of-00003.gguf` and so on.

The first part holds all metadata, and any part some tensors. Presents them as one file, after checking that every part
is there and belongs to the others. Knows nothing of what the tensors are.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tidemill.errors import BadCheckpoint
from tidemill.weights.gguf_file import GgufFile, GgufTensor, read_gguf
from tidemill.weights.location import part_name

_NUMBER, _COUNT, _TENSORS = "split.no", "split.count", "split.tensors.count"


def open_gguf(path: Path) -> GgufFile:
    """A whole file, or the first part of several with the others behind it."""
    first = read_gguf(path)
    count = int(first.metadata.get(_COUNT, 1))
    # Merged files keep the key and say 0.
    if count <= 1:
        return first
    number, ending = int(first.metadata.get(_NUMBER, 0)), f"-00001-of-{count:05}.gguf"
    if number != 0 or not path.name.endswith(ending):
        raise BadCheckpoint(
            f"{path.name} is part {number + 1} of {count} of a split GGUF, under another name",
            cause="parts are found by their names, and the first one holds the metadata",
            fix=f"rename the first part to end in {ending}, and the others likewise",
        )
    paths = [path.with_name(part_name(path.name, number)) for number in range(2, count + 1)]
    _refuse_missing(path, paths)
    others = tuple(_read_part(first, part, number) for number, part in enumerate(paths, 1))
    return replace(first, others=others, tensors=_joined(first, others))


def _refuse_missing(path: Path, paths: list[Path]) -> None:
    missing = [part.name for part in paths if not part.is_file()]
    if missing:
        raise BadCheckpoint(
            f"{path.parent} lacks {missing[0]}" + (f" and {len(missing) - 1} more parts" if missing[1:] else ""),
            cause=f"{path.name} is the first of {len(paths) + 1} parts, which are needed together",
            fix=f"finish the download, or copy the missing files to {path.parent}",
        )


def _read_part(first: GgufFile, path: Path, number: int) -> GgufFile:
    part = read_gguf(path)
    for key, expected in (
        (_NUMBER, number),
        (_COUNT, first.metadata[_COUNT]),
        (_TENSORS, first.metadata.get(_TENSORS)),
    ):
        if (found := part.metadata.get(key)) != expected:
            raise _foreign(path, first, f"its {key} is {found}, expected {expected}")
    if part.big_endian != first.big_endian:
        raise _foreign(path, first, "its byte order is another")
    return part


def _joined(first: GgufFile, others: tuple[GgufFile, ...]) -> dict[str, GgufTensor]:
    tensors = dict(first.tensors)
    for number, part in enumerate(others, 1):
        for name, tensor in part.tensors.items():
            if name in tensors:
                raise _foreign(part.path, first, f"tensor {name} is also in {first.file_of(tensors[name])}")
            tensors[name] = replace(tensor, part=number)
    promised = first.metadata.get(_TENSORS)
    if promised is not None and promised != len(tensors):
        raise BadCheckpoint(
            f"{first.path.name} and its parts hold {len(tensors)} tensors, and {promised} are promised",
            cause=f"{_TENSORS} is {promised}: some part belongs to another model, or was written incompletely",
            fix="download all parts again",
        )
    return tensors


def _foreign(path: Path, first: GgufFile, cause: str) -> BadCheckpoint:
    return BadCheckpoint(
        f"{path.name} does not belong to {first.path.name}",
        cause=cause,
        fix=f"delete {path} and download it again with the other parts of the same model",
    )

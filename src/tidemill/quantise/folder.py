"""The folder that is written: shards that survive an interruption, and a config.json that is there only at the end.

While work is under way, finished shards wait in OUT/.partial beside a note of what they are made of. They move out when
all are there, config.json last of all, so that nothing takes an unfinished folder for a model. Knows nothing of tensors
but their names and bytes.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from tidemill.errors import ConfigError, TidemillError

PARTIAL = ".partial"
NOTE = "made-of.json"
INDEX = "model.safetensors.index.json"


class OutFolder:
    def __init__(self, path: Path, num_shards: int, made_of: Mapping[str, Any], force: bool) -> None:
        """`made_of`: everything that decides what the shards hold; work done with anything else is not gone on with."""
        self.path, self.num_shards = path, num_shards
        self.partial = path / PARTIAL
        try:
            self._claim(dict(made_of), force)
        except OSError as error:
            raise _cannot_write(path, error) from error

    def _claim(self, made_of: dict[str, Any], force: bool) -> None:
        note = self.partial / NOTE
        if self.path.exists() and not self.path.is_dir():
            raise ConfigError(f"{self.path} is a file", param="out", fix="name a folder that does not exist yet")
        if note.is_file() and not force:
            self._refuse_other(json.loads(note.read_text(encoding="utf-8")), made_of)
            return
        if self.path.exists() and any(self.path.iterdir()):
            if not force:
                raise ConfigError(
                    f"{self.path} is not empty",
                    param="out",
                    cause=f"it holds {min(entry.name for entry in self.path.iterdir())}",
                    fix="name another folder, or --force to write over the model in it",
                )
            self._clear()
        self.partial.mkdir(parents=True, exist_ok=True)
        write_text(note, json.dumps(made_of, indent=2, sort_keys=True))

    def _clear(self) -> None:
        """Removes a model and what is left of an unfinished one; other files stay."""
        for name in ("config.json", INDEX):
            (self.path / name).unlink(missing_ok=True)
        for shard in self.path.glob("model*.safetensors"):
            shard.unlink()
        shutil.rmtree(self.partial, ignore_errors=True)

    def _refuse_other(self, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        for key in dict.fromkeys((*now, *before)):
            if before.get(key) != now.get(key):
                raise ConfigError(
                    f"{self.path} holds unfinished work of another kind",
                    param="out",
                    cause=f"{key} was {before.get(key)!r:.80}, now it is {now.get(key)!r:.80}",
                    fix="repeat the earlier command to go on with it, --force to start over, or name another folder",
                )

    def shard(self, index: int) -> str:
        return f"model-{index + 1:05}-of-{self.num_shards:05}.safetensors"

    def find(self, index: int) -> Path | None:
        """A finished shard; it may have moved out already."""
        for folder in (self.partial, self.path):
            if (folder / self.shard(index)).is_file():
                return folder / self.shard(index)
        return None

    def load(self, index: int) -> dict[str, torch.Tensor]:
        found = self.find(index)
        assert found is not None, "only finished shards are read"
        return load_file(found)

    def save(self, index: int, tensors: dict[str, torch.Tensor]) -> None:
        final = self.partial / self.shard(index)
        temporary = final.with_suffix(".tmp")
        try:
            whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
            save_file(whole, temporary, metadata={"format": "pt"})
            os.replace(temporary, final)
        except (OSError, SafetensorError) as error:
            temporary.unlink(missing_ok=True)
            raise _cannot_write(final, error) from error

    def finish(self, config: Mapping[str, Any]) -> int:
        """Makes a model of what is there; gives its bytes."""
        try:
            places: dict[str, str] = {}
            total = 0
            for index in range(self.num_shards):
                found = self.find(index)
                assert found is not None, "a model is finished when all its shards are"
                with safe_open(found, framework="pt") as shard:
                    places |= dict.fromkeys(shard.keys(), self.shard(index))
                total += found.stat().st_size
                os.replace(found, self.path / self.shard(index))
            index_of = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
            write_text(self.path / INDEX, json.dumps(index_of, indent=2))
            write_text(self.path / "config.json", json.dumps(config, indent=2, sort_keys=True))
            shutil.rmtree(self.partial)
        except OSError as error:
            raise _cannot_write(self.path, error) from error
        return total

    def check_space(self, nbytes: int) -> None:
        """Refuses what would not fit, before hours of work."""
        finished = sum(found.stat().st_size for index in range(self.num_shards) if (found := self.find(index)))
        free = shutil.disk_usage(self.path).free
        if free < nbytes - finished:
            raise ConfigError(
                f"{self.path} has no room for the model",
                param="out",
                cause=f"{(nbytes - finished) / 1e9:.2f} GB are needed, {free / 1e9:.2f} GB are free",
                fix="make room, or name a folder on another disk",
            )


def write_text(path: Path, text: str) -> None:
    """Whole or not at all."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def _cannot_write(path: Path, error: Exception) -> TidemillError:
    full = isinstance(error, OSError) and error.errno == errno.ENOSPC
    return TidemillError(
        f"{path} cannot be written",
        cause=str(error),
        fix="make room and repeat the command: finished layers are kept" if full else "check the disk and permissions",
    )

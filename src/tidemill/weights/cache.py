"""What earlier runs left on disk, for `tidemill models list` and `tidemill models rm`.

Knows the wheel cache and asks huggingface_hub about its own; deletes only what it listed.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from tidemill.errors import ModelUnavailable
from tidemill.weights.aliases import ALIASES
from tidemill.weights.pypi import cache_root


@dataclass(frozen=True)
class CachedModel:
    name: str
    source: str
    path: Path
    nbytes: int


def list_cached() -> list[CachedModel]:
    """Every model already on this machine that `locate` would find without a download."""
    return [*_wheels(), *_hub_models()]


def remove_cached(name: str) -> list[CachedModel]:
    """Deletes every cached model of that name and returns what was deleted."""
    found = list_cached()
    doomed = [model for model in found if model.name == name]
    if not doomed:
        known = ", ".join(model.name for model in found) or "nothing"
        raise ModelUnavailable(f"'{name}' is not cached", cause=f"cached: {known}", fix="tidemill models list")
    for model in doomed:
        shutil.rmtree(model.path)
    return doomed


def _wheels() -> list[CachedModel]:
    names = {alias.folder_name: alias.name for alias in ALIASES.values()}
    root = cache_root()
    folders = sorted(entry for entry in root.iterdir() if entry.is_dir()) if root.is_dir() else []
    return [
        CachedModel(names.get(folder.name, folder.name), "pypi", folder, _tree_size(folder))
        for folder in folders
        if not folder.name.startswith(".")
    ]


def _hub_models() -> list[CachedModel]:
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = scan_cache_dir().repos
    except CacheNotFound:
        return []
    models = [repo for repo in repos if repo.repo_type == "model"]
    return [
        CachedModel(repo.repo_id, "hub", Path(repo.repo_path), repo.size_on_disk)
        for repo in sorted(models, key=lambda repo: repo.repo_id)
    ]


def _tree_size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())

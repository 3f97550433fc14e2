"""Git LFS pointers: what lies in a clone where a large file should be, until Git LFS fetches it."""

from __future__ import annotations

import shlex
from pathlib import Path

from tidemill.errors import BadCheckpoint

_START = b"version https://git-lfs"


def refuse_lfs_pointer(path: Path) -> None:
    """Raises where a file is only a pointer to its content; says nothing of any other file, missing ones included."""
    try:
        with path.open("rb") as handle:
            is_pointer = handle.read(len(_START)) == _START
    except OSError:
        return
    if is_pointer:
        raise BadCheckpoint(
            f"{path} is a Git LFS pointer, not the file itself",
            cause="the repository was cloned without Git LFS, which leaves a few lines of text in place of large files",
            fix=f"cd {shlex.quote(str(path.absolute().parent))} && git lfs pull",
        )

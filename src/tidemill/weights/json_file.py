"""Reading the small JSON files beside a model, with errors that name the file and the line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tidemill.errors import BadCheckpoint
from tidemill.weights.lfs import refuse_lfs_pointer


def read_json(path: Path, *, required: bool = False) -> dict[str, Any]:
    """The object in a JSON file; an absent optional file is an empty one."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        if not required:
            return {}
        raise BadCheckpoint(
            f"{path.parent} has no {path.name}",
            cause=f"{path} does not exist",
            fix="finish the download (hf download org/name), or point at the folder that holds it",
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise BadCheckpoint(f"{path} cannot be read", cause=str(error), fix="check the file") from error
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        refuse_lfs_pointer(path)
        raise BadCheckpoint(
            f"{path} is not valid JSON", cause=str(error), fix="correct it or download it again"
        ) from error
    if not isinstance(value, dict):
        raise BadCheckpoint(
            f"{path} does not hold a JSON object", cause=f"it holds a {type(value).__name__}", fix="download it again"
        )
    return value

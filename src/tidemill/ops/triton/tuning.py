"""Launch parameters that were measured on a card, kept in the repository so that a first start does not tune.

`configs/<card>.json` maps a kernel's name and a key of its own to block sizes, warps and stages. A card or key without
an entry takes the kernel's default. `python -m benchmarks.gpu_tune` writes the files.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch

CONFIGS = Path(__file__).parent / "configs"


@cache
def card() -> str:
    """The name of the GPU in use, as a file name; `interpreter` where there is none."""
    if not torch.cuda.is_available():
        return "interpreter"
    return torch.cuda.get_device_name().replace(" ", "_").replace("/", "_")


@cache
def _measured(name: str) -> dict[str, dict[str, dict[str, Any]]]:
    path = CONFIGS / f"{name}.json"
    return json.loads(path.read_text()) if path.is_file() else {}


def launch_config(kernel: str, key: str, default: dict[str, Any]) -> dict[str, Any]:
    """Block sizes, num_warps and num_stages of this kernel for this key; what is not measured is the default's."""
    return {**default, **_measured(card()).get(kernel, {}).get(key, {})}

"""tidemill: an inference and serving engine for open models.

`from tidemill import LLM, SamplingParams` is the Python API; names are resolved on first use, so importing the package
costs nothing and `tidemill --help` answers in a blink.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tidemill.core.params import SamplingParams
    from tidemill.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]

_HOMES = {"LLM": "tidemill.llm", "SamplingParams": "tidemill.core.params"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tidemill' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)

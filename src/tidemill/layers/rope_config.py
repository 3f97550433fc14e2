"""The parameters of a rotary embedding, and what of it depends on a prompt's length. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ROPE_PARAMETERS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (),
    "longrope": ("short_factor", "long_factor"),
    "gguf_factors": ("factors",),
}
"""Every kind of rotary scaling, and what its config must give."""


@dataclass(frozen=True)
class RopeConfig:
    """`kind` is transformers' rope_type; `parameters` are that kind's own."""

    kind: str
    theta: float
    dim: int
    max_position: int
    parameters: Mapping[str, Any]
    turns: bool = False
    """longrope: what is already computed is computed anew when a sequence outgrows the original length."""

    @property
    def longest_context(self) -> int:
        """Positions the rotation is made for. Configs give the length before scaling for linear and dynamic, and
        either length for yarn."""
        factor = float(self.parameters.get("factor") or 1.0)
        if self.kind in ("linear", "dynamic"):
            return int(self.max_position * factor)
        if self.kind == "yarn":
            return max(self.max_position, int(self.parameters["original_max_position_embeddings"] * factor))
        return self.max_position

    @property
    def turn(self) -> int | None:
        """The length beyond which a growing sequence is computed anew."""
        return int(self.parameters["original_max_position_embeddings"]) if self.turns else None

    def regime(self, num_prompt: int) -> bytes:
        """What of the rotation depends on this prompt's length; blocks are shared only between equal regimes."""
        if self.kind == "dynamic" and num_prompt > self.max_position:
            return num_prompt.to_bytes(8, "little")
        if self.kind == "longrope" and num_prompt > self.parameters["original_max_position_embeddings"]:
            return b"long"
        return b""

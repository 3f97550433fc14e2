"""What a user asks of the quantiser, and which of it goes together. Without torch, so a mistake costs no second."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tidemill.errors import ConfigError

METHODS = ("rtn", "gptq", "awq")
GROUP_SIZES = (128, 64, 32, 16)
WHOLE_ROW = -1
"""A group size that means one scale per output row."""
DEFAULT_SAMPLES = 128
DEFAULT_LENGTH = 512


@dataclass(frozen=True)
class Target:
    """What a scheme makes of weights, and of what is multiplied with them."""

    name: str
    kind: Literal["int", "fp8"]
    bits: int
    format: str
    """As compressed-tensors calls it."""
    grouped: bool
    """Whether a group size can be given..."""
    by_group: bool
    """...and whether there are groups where none is."""
    activations: bool
    """Inputs are rounded too, each token with a scale of its own."""


TARGETS = {
    target.name: target
    for target in (
        Target("w4a16", "int", 4, "pack-quantized", grouped=True, by_group=True, activations=False),
        Target("w8a16", "int", 8, "pack-quantized", grouped=True, by_group=False, activations=False),
        Target("w8a8", "int", 8, "int-quantized", grouped=False, by_group=False, activations=True),
        Target("fp8", "fp8", 8, "float-quantized", grouped=False, by_group=False, activations=True),
    )
}


@dataclass(frozen=True)
class Wishes:
    """As typed; None: inferred."""

    scheme: str
    group_size: int | None = None
    method: str | None = None
    calibration: str | None = None
    evaluation: str | None = None
    ignore: tuple[str, ...] = ()
    samples: int = DEFAULT_SAMPLES
    length: int = DEFAULT_LENGTH
    asymmetric: bool = False

    @property
    def target(self) -> Target:
        return TARGETS[self.scheme]

    @property
    def chosen_method(self) -> str:
        return self.method or ("rtn" if self.calibration is None else "gptq")

    def check(self) -> None:
        """What can be refused before any file is opened."""
        if self.scheme not in TARGETS:
            raise ConfigError(f"scheme {self.scheme!r} is unknown", param="scheme", fix=f"--scheme {'|'.join(TARGETS)}")
        if self.method is not None and self.method not in METHODS:
            raise ConfigError(f"method {self.method!r} is unknown", param="method", fix=f"--method {'|'.join(METHODS)}")
        if self.chosen_method != "rtn" and self.calibration is None:
            raise ConfigError(
                f"--method {self.method} needs a text to calibrate on",
                param="calibration",
                cause="it looks at what the layers are given, and nothing was",
                fix='--calibration FILE, plain text or .jsonl with a "text" each; or --method rtn, which needs none',
            )
        if self.group_size is not None and not self.target.grouped:
            raise ConfigError(
                f"--group-size does not go with --scheme {self.scheme}",
                param="group_size",
                cause="its weights have one scale per output row",
                fix="leave --group-size out, or use --scheme w4a16 or w8a16",
            )
        if self.group_size is not None and self.group_size != WHOLE_ROW and self.group_size < 1:
            raise ConfigError(
                f"--group-size {self.group_size} is no size",
                param="group_size",
                fix=f"--group-size {GROUP_SIZES[0]}, or {WHOLE_ROW} for whole rows",
            )
        if self.asymmetric and not self.target.grouped:
            raise ConfigError(
                f"--asymmetric does not go with --scheme {self.scheme}",
                param="asymmetric",
                cause="kernels that round inputs take weights without zero points",
                fix="leave --asymmetric out, or use --scheme w4a16 or w8a16",
            )
        for name in ("samples", "length"):
            least = 1 if name == "samples" else 2
            if getattr(self, name) < least:
                raise ConfigError(f"--{name} {getattr(self, name)} is too few", param=name, fix=f"--{name} {least}")

"""What a quantisation scheme is, which matrices it fits, and how many bytes they take. Plain numbers, without torch.

How the numbers lie in memory is `packed.py`'s; which kernel multiplies them is `ops/`'s.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

WORD_BYTES = 4
WORDS_PER_CHUNK = 32
"""Packed integers lie in words of 32 bits; a chunk is 32 words of one row, whatever the bits."""
GROUP_SIZES = (128, 64, 32)
"""What the kernels can fold a scale over; the largest that divides the inputs is taken."""
FEWEST_OUTPUTS = 16
FP8_MULTIPLE = 16
FP8_CAPABILITY = (8, 9)


@dataclass(frozen=True)
class Scheme:
    """number = (code - zero) * scale, with one scale (and zero) per group of inputs of each output row."""

    name: str
    bits: int
    group_size: int | None
    """Inputs that share a scale; None: the whole row does."""
    kind: Literal["int", "fp8"]
    zeros: bool = False
    """A zero point per group; otherwise it is the middle code."""
    activations: Literal["none", "fp8_dynamic"] = "none"
    """`fp8_dynamic`: inputs are rounded to 8 bits too, one scale per token, where the card multiplies such numbers."""

    @property
    def codes_per_word(self) -> int:
        return 8 * WORD_BYTES // self.bits

    @property
    def chunk(self) -> int:
        """Inputs of a chunk of packed integers."""
        return WORDS_PER_CHUNK * self.codes_per_word

    @property
    def scale_bytes(self) -> int:
        """Scales of groups are float16; one per row is not worth rounding and is float32."""
        return 4 if self.group_size is None else 2

    def groups(self, inputs: int) -> int:
        return 1 if self.group_size is None else inputs // self.group_size

    def fitted(self, inputs: int) -> Scheme:
        """This scheme with the largest group, its own at most, that divides the inputs."""
        if self.group_size is None:
            return self
        sizes = [size for size in GROUP_SIZES if size <= self.group_size and inputs % size == 0]
        return replace(self, group_size=sizes[0]) if sizes else self

    def bytes_for(self, outputs: int, inputs: int) -> int:
        """Packed codes, scales and zeros of a matrix this scheme applies to."""
        scheme = self.fitted(inputs)
        per_row = scheme.groups(inputs) * scheme.scale_bytes * (2 if scheme.zeros else 1)
        if scheme.kind == "fp8":
            return outputs * (inputs + per_row)
        chunks = -(-inputs // scheme.chunk)
        return outputs * (chunks * WORDS_PER_CHUNK * WORD_BYTES + per_row)


INT4 = Scheme("int4", bits=4, group_size=128, kind="int", zeros=True)
INT8 = Scheme("int8", bits=8, group_size=None, kind="int")
FP8 = Scheme("fp8", bits=8, group_size=None, kind="fp8", activations="fp8_dynamic")
SCHEMES = {scheme.name: scheme for scheme in (INT4, INT8, FP8)}
"""What a user can name."""


def applies(scheme: Scheme, outputs: int, inputs: int) -> str | None:
    """Why a matrix stays dense under this scheme; None where it is packed."""
    if outputs < FEWEST_OUTPUTS:
        return f"{outputs} outputs are fewer than {FEWEST_OUTPUTS}: nothing is gained"
    if scheme.kind == "fp8" and (inputs % FP8_MULTIPLE or outputs % FP8_MULTIPLE):
        return f"{outputs} x {inputs} are not both multiples of {FP8_MULTIPLE}, which fp8 products need"
    if scheme.group_size is not None and inputs % GROUP_SIZES[-1]:
        return f"{inputs} inputs are no multiple of {GROUP_SIZES[-1]}, the smallest group"
    return None


def weight_bytes(scheme: Scheme | None, outputs: int, inputs: int, dense_bytes: int) -> int:
    """Bytes of a linear layer's matrix under a scheme; `dense_bytes` is the size of one number where it stays dense."""
    if scheme is None or applies(scheme, outputs, inputs) is not None:
        return outputs * inputs * dense_bytes
    return scheme.bytes_for(outputs, inputs)


def supports(scheme: Scheme, capability: tuple[int, int]) -> str | None:
    """Why a card cannot multiply in this scheme natively, so that weights are widened first; None where it can."""
    if scheme.activations == "fp8_dynamic" and capability < FP8_CAPABILITY:
        return f"compute capability {capability[0]}.{capability[1]} multiplies no fp8 numbers: 8.9 or more does"
    return None

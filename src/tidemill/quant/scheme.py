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
"""Of weights rounded here; the largest that divides the inputs is taken."""
STORED_GROUP_SIZES = (*GROUP_SIZES, 16)
"""Of packed weights; formats with other groups are cut into the largest of these that divides them."""
TILE_OUTPUTS, TILE_INPUTS = 16, 32
"""What a tile of the CPU's layout covers."""
FEWEST_OUTPUTS = 16
FP8_MULTIPLE = 16
FP8_CAPABILITY = (8, 9)


Layout = Literal["words", "tiles"]
"""How packed numbers lie in memory, see `packed.py`: a GPU reads words, the CPU's kernels tiles."""

TABLES: dict[str, tuple[float, ...]] = {
    # Doubled, so that they are whole: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives. Scales are halved instead.
    "e2m1": (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12),
    # Of GGUF's IQ1 to IQ3 types: magnitudes, then the same with a minus; IQ1's are -1, 0, 1 plus or minus 1/8, in
    # eighths.
    "iq1": (-7, 1, 9, 0, 0, 0, 0, 0, -9, -1, 7, 0, 0, 0, 0, 0),
    "iq2": (8, 25, 43, 0, 0, 0, 0, 0, -8, -25, -43, 0, 0, 0, 0, 0),
    "iq3_s": (1, 3, 5, 7, 9, 11, 13, 15, -1, -3, -5, -7, -9, -11, -13, -15),
    "iq3_xxs": (4, 12, 20, 28, 36, 44, 52, 62, -4, -12, -20, -28, -36, -44, -52, -62),
    "iq4_nl": (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113),
    "nf4": (
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
        -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
        0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ),
    "fp4": (
        0.0, 0.0052083333, 0.66666667, 1.0, 0.33333333, 0.5, 0.16666667, 0.25,
        0.0, -0.0052083333, -0.66666667, -1.0, -0.33333333, -0.5, -0.16666667, -0.25,
    ),
}  # fmt: skip
"""What codes of 4 bits stand for."""


@dataclass(frozen=True)
class Scheme:
    """number = (code - zero) * scale, with one scale (and zero) per group of inputs of each output row."""

    name: str
    bits: int
    """4 or 8: narrower codes of a format are kept in the next wider ones, unchanged."""
    group_size: int | None
    """Inputs that share a scale; None: the whole row does."""
    kind: Literal["int", "fp8", "table"]
    """`table`: a code of 4 bits names one of 16 numbers."""
    zeros: bool = False
    """A zero point per group; otherwise it is the middle code."""
    by_offset: bool = False
    """The zero point is known as an offset, the number of code 0 (GGUF): tiles keep it so."""
    wide: bool = False
    """Scales of groups are float32, for those that float16 does not hold."""
    table: str | None = None
    """A name in TABLES."""
    ordered: bool = False
    """Inputs are taken in an order of their own (GPTQ's act-order)."""
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
        """Scales of groups are float16 unless they are wide; one per row is not worth rounding and is float32."""
        return 4 if self.group_size is None or self.wide else 2

    def groups(self, inputs: int) -> int:
        return 1 if self.group_size is None else inputs // self.group_size

    def fitted(self, inputs: int) -> Scheme:
        """This scheme with the largest group, its own at most, that divides the inputs."""
        if self.group_size is None:
            return self
        sizes = [size for size in GROUP_SIZES if size <= self.group_size and inputs % size == 0]
        return replace(self, group_size=sizes[0]) if sizes else self

    def bytes_for(self, outputs: int, inputs: int, layout: Layout = "words") -> int:
        """Packed codes, scales and zeros of a matrix this scheme applies to."""
        scheme = self.fitted(inputs)
        per_row = scheme.groups(inputs) * scheme.scale_bytes * (2 if scheme.zeros else 1)
        once = 4 * inputs if scheme.ordered else 0
        if scheme.kind == "fp8":
            return outputs * (inputs + per_row) + once
        if layout == "tiles":
            rows, columns = _up_to(outputs, TILE_OUTPUTS), _up_to(inputs, TILE_INPUTS)
            per_row = scheme.groups(columns) * scheme.scale_bytes * (2 if scheme.zeros else 1)
            return rows * (columns * scheme.bits // 8 + per_row) + once
        chunks = -(-inputs // scheme.chunk)
        return outputs * (chunks * WORDS_PER_CHUNK * WORD_BYTES + per_row) + once


def _up_to(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def stored_group(group_size: int | None, inputs: int) -> int | None:
    """Groups of a format as packed weights have them, where that is possible: see `can_group`."""
    if group_size is None or group_size >= inputs:
        return None
    return next((size for size in STORED_GROUP_SIZES if group_size % size == 0 and inputs % size == 0), group_size)


def can_group(group_size: int | None, inputs: int) -> bool:
    return stored_group(group_size, inputs) in (None, *STORED_GROUP_SIZES)


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


def supports(scheme: Scheme, capability: tuple[int, int]) -> str | None:
    """Why a card cannot multiply in this scheme natively, so that weights are widened first; None where it can."""
    if scheme.activations == "fp8_dynamic" and capability < FP8_CAPABILITY:
        return f"compute capability {capability[0]}.{capability[1]} multiplies no fp8 numbers: 8.9 or more does"
    return None


def gpu_reads(scheme: Scheme) -> bool:
    """Whether the GPU's kernels multiply such weights as they are."""
    return scheme.kind == "fp8" or (scheme.kind == "int" and scheme.group_size in (None, *GROUP_SIZES))

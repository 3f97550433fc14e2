"""How each GGUF block type stays in memory, with every number it stands for. Told from headers: without torch.

Widths that no kernel reads (2, 3, 5 and 6 bits) are kept in the next wider one. Scales that a file stores as small
integers times one float16 per block are multiplied out. Types that are not here are dense.
"""

from __future__ import annotations

from collections.abc import Mapping

from tidemill.quant.scheme import Scheme


def _int(name: str, bits: int, group: int, zeros: bool = False) -> Scheme:
    return Scheme(name, bits, group, "int", zeros=zeros, by_offset=zeros)


def _table(name: str, table: str, group: int, wide: bool = False) -> Scheme:
    return Scheme(name, 4, group, "table", table=table, wide=wide)


SCHEMES: Mapping[str, Scheme] = {
    scheme.name: scheme
    for scheme in (
        _int("Q4_0", 4, 32),
        _int("Q4_1", 4, 32, zeros=True),
        _int("Q5_0", 8, 32),
        _int("Q5_1", 8, 32, zeros=True),
        _int("Q8_0", 8, 32),
        _int("Q2_K", 4, 16, zeros=True),
        _int("Q3_K", 4, 16),
        _int("Q4_K", 4, 32, zeros=True),
        _int("Q5_K", 8, 32, zeros=True),
        _int("Q6_K", 8, 16),
        _table("IQ1_S", "iq1", 32),
        _table("IQ1_M", "iq1", 16),
        _table("IQ2_XXS", "iq2", 32),
        _table("IQ2_XS", "iq2", 16),
        _table("IQ2_S", "iq2", 16),
        _table("IQ3_XXS", "iq3_xxs", 32),
        _table("IQ3_S", "iq3_s", 32),
        _table("IQ4_NL", "iq4_nl", 32),
        _table("IQ4_XS", "iq4_nl", 32),
        # Blocks of 256 share a scale; 128 is the largest group there is.
        _int("TQ1_0", 4, 128),
        _int("TQ2_0", 4, 128),
        # Powers of two from 2^-128 to 2^127.
        _table("MXFP4", "e2m1", 32, wide=True),
        _table("NVFP4", "e2m1", 16),
    )
}

"""The printable characters that byte-level vocabularies write bytes with, as GPT-2 defined them."""

from __future__ import annotations


def _alphabet() -> dict[int, str]:
    """Printable Latin-1 bytes stand for themselves; the others take the characters from U+0100 on, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + at) for at, byte in enumerate(others)}


CHARACTER_OF: dict[int, str] = _alphabet()
BYTE_OF: dict[str, int] = {character: byte for byte, character in CHARACTER_OF.items()}

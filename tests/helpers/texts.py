"""Random texts that are hard to tokenize: scripts, spaces, marks, and special tokens in the middle of words."""

from __future__ import annotations

import random

PLAIN = (
    "Hello", " world", "hello", "  ", "    ", " ", "\n", "\r\n", "\t", "don't", "WE'LL", "1234", "7", "é", "e\u0301",
    "日本語", "हिन्दी", " العربية", "👩‍👧", "🇩🇪", "ß", "A", "B c", "camelCase", "HTTPServer", "...",
    "<", "|", ">", "//\n", "def f(x):", "\u00a0", "ｈ", "İ", "ﬁ", "▁", "aaaa", "\u200d",
)  # fmt: skip
SPECIAL = ("<s>", "</s>", "<|end|>", "<|user|>", "<tool>", "<|im_end|>", "<img>", "<x>", "<unk>", "<mask>", "<pad>")


def random_texts(count: int, pieces: tuple[str, ...] = PLAIN + SPECIAL, seed: int = 0) -> list[str]:
    chance = random.Random(seed)
    return ["".join(chance.choices(pieces, k=chance.randint(0, 12))) for _ in range(count)]

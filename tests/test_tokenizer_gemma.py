"""Gemma's tokenizer out of its GGUF gives the ids of SentencePiece itself, over the same pieces."""

import random
import struct

import pytest
import sentencepiece

from tidemill.text.tokenizer import load_tokenizer
from tidemill.weights.gguf_file import read_gguf
from tidemill.weights.location import locate

UNKNOWN, USER_DEFINED = 2, 4
WORDS = """the of and Hello world don't I'LL naïve Zürich straße 日本語 テキスト 한국어 中文，标点。 مرحبا שלום नमस्ते
👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇨🇭 ½ ٣٤ Ⅷ 3.14159 1000000 def return x=1; {} [] () != -> a_b camelCase <table> </td> <h1> <a
https://example.com/?q=1&r=%20#f \\n aaaa ababab banana ▁ ▁▁ a▁b ﬁ ① ｆｕｌｌ ჯ ∑"""
ODD = ["\x00", "\x01", "\ufeff", "\u200b", "e\u0301", "Å\u030a"]
GAPS = [" ", " ", " ", "", "  ", "   ", "\n", "\n\n", "\t", "\t\t", " \n ", "\r\n", "\u00a0", "\u3000"]
ALPHABETS = ["ab", "aab ", "ban", "\n \t", "xyz▁ ", "0123456789,.", "ée\u0301 ", "()[]{} =", "的是不了", "<>/tabletrd"]
FIXED = [
    "",
    " ",
    "  leading and trailing  ",
    "a\tb\n\nc\r\n   d     e\n \n",
    "def f(x: int) -> int:\n    return x**2  # comment\n\tif x != 1_000: {}",
    "<table><tr><td>x</td></tr></table> <h1> [multimodal] <start_of_image>",
    "▁ ▁▁ a▁b",
    "a" * 300 + "!" * 50,
]
LONG_GAPS = [" " * 40, "x" + " " * 33 + "y", "\n" * 40 + " " * 65 + "\t" * 40]


def generated() -> list[str]:
    chance = random.Random(11)
    words = [*WORDS.split(), *ODD]
    sentences = [
        "".join(chance.choice(words) + chance.choice(GAPS) for _ in range(chance.randint(1, 9))) for _ in range(300)
    ]
    repeats = ["".join(chance.choice(alphabet) for _ in range(chance.randint(1, 40))) for alphabet in ALPHABETS * 20]
    ranges = [(1, 0x7F), (0x80, 0x7FF), (0x800, 0xD7FF), (0x10000, 0x1FFFF)]
    characters = ["".join(chr(chance.randint(*chance.choice(ranges))) for _ in range(12)) for _ in range(100)]
    return sentences + repeats + characters


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(locate("gemma3-270m"))


def varint(number: int) -> bytes:
    head = b""
    while number > 0x7F:
        head += bytes([number & 0x7F | 0x80])
        number >>= 7
    return head + bytes([number])


def integer(field: int, value: int) -> bytes:
    return varint(field << 3) + varint(value)


def block(field: int, data: bytes) -> bytes:
    return varint(field << 3 | 2) + varint(len(data)) + data


@pytest.fixture(scope="module")
def original():
    """SentencePiece with Gemma's own settings: BPE, byte fallback, no normalisation, no space in front."""
    metadata = read_gguf(locate("gemma3-270m").path).metadata
    columns = (metadata[f"tokenizer.ggml.{key}"] for key in ("tokens", "scores", "token_type"))
    pieces = []
    for index, (token, score, kind) in enumerate(zip(*columns, strict=True)):
        if kind == USER_DEFINED:
            token = token.replace(" ", "▁")
        elif index == metadata["tokenizer.ggml.unknown_token_id"]:
            kind = UNKNOWN
        text = block(1, token.encode()) + varint(2 << 3 | 5) + struct.pack("<f", score) + integer(3, kind)
        pieces.append(block(1, text))
    trainer = integer(3, 2) + integer(35, 1) + integer(40, 3) + integer(41, 2) + integer(42, 1) + integer(43, 0)
    trainer += block(45, b"<unk>") + block(46, b"<bos>") + block(47, b"<eos>") + block(48, b"<pad>")
    normalizer = block(1, b"identity") + integer(3, 0) + integer(4, 0) + integer(5, 1)
    model = b"".join(pieces) + block(2, trainer) + block(3, normalizer)
    return sentencepiece.SentencePieceProcessor(model_proto=model)


def test_ids_and_text_are_sentencepieces(tokenizer, original):
    texts = [*FIXED, *LONG_GAPS, *generated()]
    assert len(texts) > 600
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == original.encode(text), text
        # U+2581 is how SentencePiece writes a space, so a text that holds it comes back with spaces.
        assert tokenizer.decode(ids) == original.decode(ids) == text.replace("▁", " ")
        assert b"".join(map(tokenizer.token_bytes, ids)).decode() == text.replace("▁", " ")


# transformers 5.22 differs twice on this file, and SentencePiece is right both times: it forgets the <bos> that the
# metadata asks for (add_bos_token), and it joins runs of more than 31 spaces by merges, where the longest run that is a
# token of its own comes first.
def test_ids_are_transformers_but_for_two_known_faults(tokenizer):
    from transformers import AutoTokenizer

    files = locate("gemma3-270m")
    reference = AutoTokenizer.from_pretrained(files.path.parent, gguf_file=files.path.name)
    turns = "<start_of_turn>user\nhi<end_of_turn>\n<start_of_turn>model\n<eos><unused7>"
    for text in [turns, *FIXED, *generated()]:
        ids = reference(text)["input_ids"]
        assert tokenizer.encode(text) == [tokenizer.bos_id, *ids], text
        assert tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=True)


def test_special_tokens(tokenizer):
    assert tokenizer.vocab_size == 262_144
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.eos_ids) == (2, 1, (1,))
    assert tokenizer.encode("<start_of_turn>model\n") == [2, 105, 4368, 107]
    assert tokenizer.decode([2, 105, 4368, 107, 106]) == "model\n"
    assert tokenizer.encode("  \n\n") == [2, 138, 108]

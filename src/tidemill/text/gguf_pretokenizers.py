"""How a byte-level vocabulary cuts text before merging, by the name GGUF files give it (`tokenizer.ggml.pre`).

A table of facts taken from the original tokenizer.json of each family: regular expressions applied one after the
other, whether the text is brought to NFC first, whether a whole word that is a token skips the merges, and whether a
file that does not say so starts prompts with the beginning-of-sequence token. Knows nothing of files or vocabularies.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from tokenizers import Regex, normalizers, pre_tokenizers

logger = logging.getLogger(__name__)

# Stands for the pattern that ByteLevel has built in; as a string it would be several times slower.
_GPT2 = "gpt-2"
_DIGIT = r"\p{N}"

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LETTERS_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LETTERS_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _tiktoken(digits: str, letters: str = r"\p{L}+", symbols: str = r" ?[^\s\p{L}\p{N}]+[\r\n]*") -> str:
    return rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?{letters}|{digits}|{symbols}|{_SPACES}"


def _cased(digits: str, suffix: str) -> str:
    """Words split where the case changes (o200k and its relatives)."""
    head = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{head}{_LETTERS_UPPER}*{_LETTERS_LOWER}+{suffix}|{head}{_LETTERS_UPPER}+{_LETTERS_LOWER}*{suffix}"
        rf"|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
    )


_LLAMA3 = _tiktoken(r"\p{N}{1,3}")
_QWEN2 = _tiktoken(r"\p{N}")
_QWEN35 = _tiktoken(r"\p{N}", r"[\p{L}\p{M}]+", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*")
_GPT4O = _cased(r"\p{N}{1,3}", rf"{_CONTRACTIONS}?")
_TEKKEN = _cased(r"\p{N}", "")
_SEED_CODER = _tiktoken(r"\p{N}", symbols=r" ?[^\s\p{L}\p{N}\r\n]+")
_BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_CJK = "[一-龥ࠀ-一가-퟿]+"
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
    + _SPACES,
)
# Cased letters as of an older Unicode. Escapes stand where an editor's normalisation would change the character.
_DEEPSEEK_LETTERS = (
    r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\x{1F7D}ᾀ-ᾴᾶ-ᾼ\x{1FBE}ῂ-ῄῆ-ῌ"
    r"ῐ-\x{1FD3}ῖ-\x{1FDB}ῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\x{2126}ℨ\x{212A}-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+"
)


@dataclass(frozen=True)
class PreTokenizer:
    patterns: tuple[str, ...]
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False
    add_sep: bool = False

    def normalizer(self) -> normalizers.Normalizer | None:
        return normalizers.NFC() if self.nfc else None

    def build(self) -> pre_tokenizers.PreTokenizer:
        """The cuts in order, then bytes written as printable characters."""
        use_builtin = self.patterns[-1:] == (_GPT2,)
        patterns = self.patterns[:-1] if use_builtin else self.patterns
        steps = [_cut(pattern) for pattern in patterns]
        bytes_step = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_builtin)
        return pre_tokenizers.Sequence([*steps, bytes_step])


def _cut(pattern: str) -> pre_tokenizers.PreTokenizer:
    if pattern == _DIGIT:
        # The same cut without a regular expression: a long text takes half the time.
        return pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Split(Regex(pattern), "isolated")


_PLAIN = PreTokenizer((_GPT2,))
_SINGLE_DIGITS = PreTokenizer((_DIGIT, _GPT2))
_LLAMA3_WITH_BOS = PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True)
_BPE_LLAMA3 = PreTokenizer((_LLAMA3,))
_BPE_QWEN2 = PreTokenizer((_QWEN2,))
_BPE_GPT4O = PreTokenizer((_GPT4O,))
_BPE_DEEPSEEK3 = PreTokenizer(_DEEPSEEK3)

_BY_DEFINITION: tuple[tuple[str, PreTokenizer], ...] = (
    ("default gpt-2 phi-2 jina-es jina-de jina-v2-es jina-v2-de gigachat a.x-4.0 mellum modern-bert", _PLAIN),
    ("jais trillion granite-docling exaone4", _PLAIN),
    ("mpt olmo", replace(_PLAIN, nfc=True)),
    ("jina-v1-en jina-v2-code roberta-bpe", replace(_PLAIN, add_sep=True)),
    ("smollm starcoder refact codeshell exaone minerva-7b mellum2", _SINGLE_DIGITS),
    ("command-r", replace(_SINGLE_DIGITS, nfc=True)),
    ("llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano", _LLAMA3_WITH_BOS),
    ("dbrx smaug-bpe glm4 chatglm-bpe", _BPE_LLAMA3),
    ("qwen2 deepseek-r1-qwen kormo f2llmv2 megrez", replace(_BPE_QWEN2, nfc=True)),
    ("stablelm2 hunyuan solar-open grok-2", _BPE_QWEN2),
    ("qwen35", PreTokenizer((_QWEN35,), nfc=True)),
    ("gpt-4o llama4 kanana2 talkie minimax-m2", _BPE_GPT4O),
    ("tekken", PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True)),
    ("tiny_aya cohere2moe", PreTokenizer((r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O))),
    ("deepseek-v3 hunyuan-dense joyai-llm", _BPE_DEEPSEEK3),
    (
        "deepseek-llm",
        PreTokenizer((r"[\r\n]", _DEEPSEEK_LETTERS, r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", _CJK, r"\p{N}+")),
    ),
    ("deepseek-coder", PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}"))),
    # the built-in pattern is in the middle here, so it is spelled out
    (
        "falcon",
        PreTokenizer(
            (
                r"[\p{P}\$\+<=>\^~\|`]+",
                r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
                r"[0-9][0-9][0-9]",
            )
        ),
    ),
    ("bloom poro-chat gpt3-finnish", PreTokenizer((_BLOOM,))),
    ("viking", PreTokenizer((_BLOOM, r"\p{N}"))),
    ("bailingmoe bailingmoe2 llada-moe", PreTokenizer((_BAILING,))),
    ("seed-coder", PreTokenizer((_SEED_CODER,))),
    ("superbpe", PreTokenizer((r"\p{N}+", r"(?=(\d{3})+(?!\d))"))),
)
PRE_TOKENIZERS = {name: definition for names, definition in _BY_DEFINITION for name in names.split()}


def pre_tokenizer(name: str | None) -> PreTokenizer:
    found = PRE_TOKENIZERS.get(name or "default")
    if found is None:
        logger.warning(
            "the GGUF file names the pre-tokenizer '%s', which is unknown: text is cut as GPT-2 does, and quality may "
            "suffer; pass --tokenizer with the model's hub id or folder to be sure",
            name,
        )
        return _PLAIN
    return found

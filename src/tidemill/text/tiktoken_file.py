"""Tables in tiktoken's format (`tokenizer.model` of Llama 3, `qwen.tiktoken`): one base64 token and its rank a line.

A table says neither how text is cut before merging nor which special tokens there are, so both are facts of the
model's family, known here for the families that ship such files; tokenizer_config.json may name the special tokens.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, processors

from tidemill.errors import BadCheckpoint, UnsupportedModel
from tidemill.text.gguf_pretokenizers import pre_tokenizer
from tidemill.text.ranked_vocabulary import RankedVocabulary, fault_in
from tidemill.text.tokenizer_files import text_of_token
from tidemill.weights.lfs import refuse_lfs_pointer

TIKTOKEN_NAMES = ("tokenizer.model", "tiktoken.model", "*.tiktoken")


@dataclass(frozen=True)
class Family:
    cut: str
    """The name `gguf_pretokenizers` has for how it cuts text."""
    special_tokens: tuple[str, ...] = ()
    """Those behind the table, from its end on, where the files do not say."""
    bos_token: str | None = None
    eos_token: str | None = None


def _llama3_tokens() -> tuple[str, ...]:
    named = {
        0: "<|begin_of_text|>",
        1: "<|end_of_text|>",
        4: "<|finetune_right_pad_id|>",
        6: "<|start_header_id|>",
        7: "<|end_header_id|>",
        8: "<|eom_id|>",
        9: "<|eot_id|>",
        10: "<|python_tag|>",
    }
    others = iter(range(256))
    return tuple(named.get(at) or f"<|reserved_special_token_{next(others)}|>" for at in range(256))


_FAMILIES = {
    "llama": Family("llama-bpe", _llama3_tokens(), "<|begin_of_text|>", "<|end_of_text|>"),
    "qwen": Family(
        "qwen2",
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{number}|>" for number in range(205))),
        eos_token="<|endoftext|>",
    ),
    "chatglm": Family("chatglm-bpe"),
    "llama4": Family("llama4"),
}


def find_tiktoken(folder: Path) -> Path | None:
    """The table in a folder, told from a SentencePiece model of the same name by its first line."""
    for pattern in TIKTOKEN_NAMES:
        for path in sorted(path for path in folder.glob(pattern) if path.is_file()):
            refuse_lfs_pointer(path)
            with path.open("rb") as handle:
                if _entry(handle.readline(4096)) is not None:
                    return path
    return None


def read_tiktoken(
    path: Path, model_type: str | None, tokens: dict[int, AddedToken], tokenizer_config: dict[str, Any]
) -> tuple[Tokenizer, dict[str, str]]:
    """`tokens` are those that the files beside the table name, by id."""
    family = _family(path, model_type)
    ranks = _read_ranks(path)
    end = max(ranks.values()) + 1
    behind = {end + at: token for at, token in enumerate(family.special_tokens)}
    named = {token_id: AddedToken(text, special=True, normalized=False) for token_id, text in behind.items()}
    outside = {token_id: token for token_id, token in tokens.items() if token_id >= end}
    # Names in the files are of this very model; the family's are only the usual ones.
    named = outside or named
    if not named:
        raise UnsupportedModel(
            f"{path} is a tiktoken table without its special tokens",
            cause="tokenizer_config.json has no added_tokens_decoder that names them",
            fix="pass --tokenizer with a folder or hub id that has a tokenizer.json",
        )
    rules = pre_tokenizer(family.cut)
    backend = RankedVocabulary(ranks, named, rules.build(), rules.normalizer()).build()
    special = {name: text for name, text in (("bos_token", family.bos_token), ("eos_token", family.eos_token)) if text}
    special = {name: text for name, text in special.items() if backend.token_to_id(text) is not None}
    bos = text_of_token(tokenizer_config.get("bos_token")) or special.get("bos_token")
    adds_bos = tokenizer_config.get("add_bos_token", rules.add_bos)
    _surround(backend, bos, bool(adds_bos))
    return backend, special


def _surround(backend: Tokenizer, bos: str | None, adds_bos: bool) -> None:
    if adds_bos and bos is not None and (bos_id := backend.token_to_id(bos)) is not None:
        backend.post_processor = processors.TemplateProcessing(single=[bos, "$A"], special_tokens=[(bos, bos_id)])


def _family(path: Path, model_type: str | None) -> Family:
    # Models that were converted to Llama's layout keep the name of the file.
    name = path.stem if path.stem in _FAMILIES else model_type
    if name in _FAMILIES:
        return _FAMILIES[name]
    raise UnsupportedModel(
        f"{path} is a tiktoken table, which does not say how text is cut into words",
        cause=f"this is known for {', '.join(_FAMILIES)}; the model is of type {model_type}",
        fix="pass --tokenizer with a folder or hub id that has a tokenizer.json",
    )


def _read_ranks(path: Path) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line:
            continue
        entry = _entry(line)
        if entry is None:
            raise BadCheckpoint(
                f"{path} is broken at line {number}",
                cause=f"a base64 token and its rank are expected, found {line[:60]!r}",
                fix="download it again",
            )
        if ranks.setdefault(*entry) != entry[1]:
            raise BadCheckpoint(
                f"{path} is broken at line {number}",
                cause=f"its token has the rank {ranks[entry[0]]} already",
                fix="download it again",
            )
    if (fault := fault_in(ranks)) is not None:
        raise BadCheckpoint(f"{path} is not a whole tiktoken table", cause=fault, fix="download it again")
    return ranks


def _entry(line: bytes) -> tuple[bytes, int] | None:
    parts: Sequence[bytes] = line.split()
    try:
        token, rank = parts
        return base64.b64decode(token, validate=True), int(rank)
    except (ValueError, binascii.Error):
        return None

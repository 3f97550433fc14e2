"""A tokenizer from GGUF metadata: vocabulary, merges or scores, token types.

Knows the three vocabularies that exist in such files (byte-level BPE, SentencePiece BPE, SentencePiece unigram) and
builds each as a `tokenizers.Tokenizer` that gives the ids of the original. Does not read files: it is handed the
metadata.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, processors

from tidemill.errors import BadCheckpoint, UnsupportedModel
from tidemill.text.gguf_pretokenizers import pre_tokenizer

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_SPACE = "\u2581"
_IDS = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "sep_token": "seperator",
    "pad_token": "padding",
    "cls_token": "cls",
    "mask_token": "mask",
}


def special_tokens_of(metadata: Mapping[str, Any]) -> dict[str, str]:
    """bos_token, eos_token and the others, as strings."""
    tokens = metadata.get("tokenizer.ggml.tokens", ())
    found: dict[str, str] = {}
    for name, key in _IDS.items():
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None and token_id < len(tokens):
            found[name] = tokens[token_id]
    return found


def build_tokenizer(metadata: Mapping[str, Any], file: str) -> Tokenizer:
    model = metadata.get("tokenizer.ggml.model")
    builders = {"gpt2": _byte_level, "llama": _sentencepiece, "gemma4": _sentencepiece, "t5": _unigram}
    if model not in builders:
        raise UnsupportedModel(
            f"{file}: the GGUF tokenizer '{model}' is not supported",
            cause=f"supported: {', '.join(builders)}",
            fix="pass --tokenizer with the model's hub id or a folder that holds its tokenizer.json",
        )
    if not metadata.get("tokenizer.ggml.tokens"):
        raise BadCheckpoint(
            f"{file} has no vocabulary",
            cause="tokenizer.ggml.tokens is missing or empty",
            fix="pass --tokenizer with the model's hub id or a folder that holds its tokenizer.json",
        )
    try:
        return builders[model](metadata)
    except BadCheckpoint:
        raise
    except Exception as error:
        # The tokenizers library reports contradictions between vocabulary and merges as a bare Exception.
        raise BadCheckpoint(
            f"{file}: the tokenizer in the metadata contradicts itself",
            cause=str(error),
            fix="pass --tokenizer with the model's hub id or a folder that holds its tokenizer.json",
        ) from error


def _byte_level(metadata: Mapping[str, Any]) -> Tokenizer:
    pre = pre_tokenizer(metadata.get("tokenizer.ggml.pre"))
    merges = [_split_merge(merge) for merge in metadata.get("tokenizer.ggml.merges", ())]
    tokenizer = Tokenizer(models.BPE(_vocabulary(metadata), merges, ignore_merges=pre.ignore_merges))
    if (normalizer := pre.normalizer()) is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre.build()
    tokenizer.decoder = decoders.ByteLevel()
    _add_tokens(tokenizer, metadata, match_normalized=False)
    _add_template(tokenizer, metadata, bos=pre.add_bos or pre.add_sep, eos=False, sep=pre.add_sep)
    return tokenizer


def _sentencepiece(metadata: Mapping[str, Any]) -> Tokenizer:
    prefix = _prefixes(metadata)
    vocabulary = _vocabulary(metadata)
    if "tokenizer.ggml.merges" in metadata:
        merges = [_split_merge(merge) for merge in metadata["tokenizer.ggml.merges"]]
    else:
        merges = _merges_from_scores(vocabulary, metadata, prefix)
    unknown = special_tokens_of(metadata).get("unk_token")
    model = models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback="<0x00>" in vocabulary)
    return _finish_sentencepiece(Tokenizer(model), metadata, prefix, bos=True, eos=False)


def _unigram(metadata: Mapping[str, Any]) -> Tokenizer:
    tokens, scores = list(_vocabulary(metadata)), metadata.get("tokenizer.ggml.scores") or []
    if len(scores) < len(tokens):
        raise BadCheckpoint(
            f"a unigram vocabulary needs a score per token: {len(scores)} scores for {len(tokens)} tokens",
            cause="tokenizer.ggml.scores is short",
            fix="convert the model again with llama.cpp",
        )
    pieces = list(zip(tokens, scores, strict=False))
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 2)
    model = models.Unigram(pieces, unk_id=unknown, byte_fallback="<0x00>" in set(tokens))
    return _finish_sentencepiece(Tokenizer(model), metadata, _prefixes(metadata), bos=False, eos=True)


def _finish_sentencepiece(
    tokenizer: Tokenizer, metadata: Mapping[str, Any], prefix: bool, bos: bool, eos: bool
) -> Tokenizer:
    """What both SentencePiece models share: normalising in SentencePiece's order, spaces as U+2581, bytes back."""
    steps: list[normalizers.Normalizer] = []
    if charsmap := metadata.get("tokenizer.ggml.precompiled_charsmap"):
        steps.append(normalizers.Precompiled(bytes(byte & 0xFF for byte in charsmap)))
    if metadata.get("tokenizer.ggml.remove_extra_whitespaces"):
        steps += [normalizers.Replace(Regex("^ +| +$"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if prefix:
        steps.append(normalizers.Prepend(_SPACE))
    steps.append(normalizers.Replace(" ", _SPACE))
    tokenizer.normalizer = normalizers.Sequence(steps)
    back = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*back, decoders.Strip(" ", 1, 0)] if prefix else back)
    _add_tokens(tokenizer, metadata, match_normalized=not prefix)
    _add_template(tokenizer, metadata, bos=bos, eos=eos, sep=False)
    return tokenizer


def _prefixes(metadata: Mapping[str, Any]) -> bool:
    default = metadata.get("tokenizer.ggml.model") != "gemma4"
    return bool(metadata.get("tokenizer.ggml.add_space_prefix", default))


def _vocabulary(metadata: Mapping[str, Any]) -> dict[str, int]:
    """Token -> id. An empty or repeated token gets a name of its own, so that every id stays in its place."""
    tokens: Sequence[str] = metadata["tokenizer.ggml.tokens"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) == len(tokens) and "" not in vocabulary:
        return vocabulary
    vocabulary = {}
    for index, token in enumerate(tokens):
        vocabulary[f"[EMPTY_{index}]" if not token or token in vocabulary else token] = index
    return vocabulary


def _split_merge(merge: str) -> tuple[str, str]:
    # A merge may itself start with a space, so the separator is looked for after the first character.
    at = merge.index(" ", 1)
    return merge[:at], merge[at + 1 :]


def _merges_from_scores(vocabulary: dict[str, int], metadata: Mapping[str, Any], prefix: bool) -> list[tuple[str, str]]:
    """SentencePiece joins the pair whose result scores best; a ranked list of all such pairs does the same."""
    tokens = list(vocabulary)
    types = metadata.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    scores = metadata.get("tokenizer.ggml.scores")
    order = sorted(range(len(tokens)), key=scores.__getitem__, reverse=True) if scores else range(len(tokens))
    # User-defined pieces are matched as added tokens, except where the prefix space makes that impossible.
    joined = {_NORMAL, _UNUSED, _USER_DEFINED} if prefix else {_NORMAL, _UNUSED}
    merges: list[tuple[str, str]] = []
    for index in order:
        piece = tokens[index]
        if types[index] not in joined:
            continue
        for cut in range(1, len(piece)):
            left = piece[:cut]
            if left in vocabulary:
                right = piece[cut:]
                if right in vocabulary:
                    merges.append((left, right))
    return merges


def _add_tokens(tokenizer: Tokenizer, metadata: Mapping[str, Any], match_normalized: bool) -> None:
    """Control tokens are special; user-defined ones are ordinary text that is always found whole."""
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata.get("tokenizer.ggml.token_type") or ()
    named = set(special_tokens_of(metadata).values())
    special: list[AddedToken] = []
    defined: list[AddedToken] = []
    for token, kind in zip(tokens, types, strict=False):
        if not token:
            continue
        if kind == _CONTROL or (kind == _UNKNOWN and token in named):
            special.append(AddedToken(token, normalized=False, special=True))
        elif kind == _USER_DEFINED:
            # llama.cpp's converter writes their spaces as spaces, and text may hold either spelling.
            spaced = match_normalized and (_SPACE in token or " " in token)
            if spaced or _SPACE not in token:
                defined.append(AddedToken(token, normalized=spaced, special=False))
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(defined)


def _add_template(tokenizer: Tokenizer, metadata: Mapping[str, Any], bos: bool, eos: bool, sep: bool) -> None:
    """What surrounds every text: what the file says, or what its kind of vocabulary does by default."""
    tokens = special_tokens_of(metadata)
    wanted = {
        "bos_token": metadata.get("tokenizer.ggml.add_bos_token", bos),
        "eos_token": metadata.get("tokenizer.ggml.add_eos_token", eos),
        "sep_token": metadata.get("tokenizer.ggml.add_sep_token", sep),
    }
    used = {name: tokens[name] for name, add in wanted.items() if add and name in tokens}
    if not used:
        return
    order = [used.get("bos_token"), "$A", used.get("eos_token"), used.get("sep_token")]
    ids = [(token, tokenizer.token_to_id(token)) for token in dict.fromkeys(used.values())]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[part for part in order if part is not None], special_tokens=ids
    )

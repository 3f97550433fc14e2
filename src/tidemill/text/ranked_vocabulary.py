"""Vocabularies given as ranked byte strings, which is how tiktoken writes them, made into a `tokenizers.Tokenizer`.

tiktoken joins the two neighbours whose joined bytes have the lowest rank. A list of every way to put each token
together, in the order of the ranks, makes the tokenizers library do the same. Knows ranks and special tokens; does not
read files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from tidemill.text.byte_alphabet import CHARACTER_OF

# The longest tokens in use are runs of some hundred spaces. Finding every way to put a token together takes time that
# grows with the square of its length.
_MAX_TOKEN_BYTES = 1024
MAX_TOKEN_ID = (1 << 31) - 1
"""The library counts in 32 bits, and what comes behind a vocabulary must fit too."""


def fault_in(ranks: Mapping[bytes, int]) -> str | None:
    """Why ranked tokens make no vocabulary, None where they do."""
    if missing := [byte for byte in range(256) if bytes((byte,)) not in ranks]:
        return (
            f"it has no token for {len(missing)} of the 256 bytes, such as {bytes(missing[:1])!r}: text would be lost"
        )
    if b"" in ranks:
        return f"the token of rank {ranks[b'']} is empty"
    if (longest := max(ranks, key=len)) and len(longest) > _MAX_TOKEN_BYTES:
        return f"the token of rank {ranks[longest]} has {len(longest)} bytes, more than {_MAX_TOKEN_BYTES}"
    if odd := [rank for rank in ranks.values() if not 0 <= rank <= MAX_TOKEN_ID]:
        return f"a token has the rank {odd[0]}, outside of 0 to {MAX_TOKEN_ID}"
    if len(set(ranks.values())) != len(ranks):
        return "two of its tokens have the same rank"
    return None


@dataclass(frozen=True)
class RankedVocabulary:
    ranks: Mapping[bytes, int]
    """Without a fault (`fault_in`)."""
    named: Mapping[int, AddedToken]
    """Tokens that stand outside the ranks, each at its own id."""
    pre_tokenizer: pre_tokenizers.PreTokenizer
    normalizer: normalizers.Normalizer | None = None
    first_id: int = 0
    """The id of rank 0: some formats put their special tokens in front."""

    def build(self) -> Tokenizer:
        spelled = {_spelled(token): rank for token, rank in self.ranks.items()}
        vocabulary = {token: self.first_id + rank for token, rank in spelled.items()}
        # In the vocabulary first, so that the library does not number them by itself.
        vocabulary |= {token.content: token_id for token_id, token in self.named.items()}
        # tiktoken looks a whole word up before it merges.
        backend = Tokenizer(models.BPE(vocabulary, _merges(spelled), ignore_merges=True))
        if self.normalizer is not None:
            backend.normalizer = self.normalizer
        backend.pre_tokenizer = self.pre_tokenizer
        backend.decoder = decoders.ByteLevel()
        backend.add_tokens([self.named[token_id] for token_id in sorted(self.named)])
        return backend


def _merges(ranks: Mapping[str, int]) -> list[tuple[str, str]]:
    merges: list[tuple[str, str]] = []
    for token in sorted(ranks, key=ranks.__getitem__):
        found = [
            (ranks[left], ranks[right], left, right)
            for cut in range(1, len(token))
            if (left := token[:cut]) in ranks and (right := token[cut:]) in ranks
        ]
        # The pair of the lower ranks comes first: its parts are there earlier.
        merges += [(left, right) for _, _, left, right in sorted(found)]
    return merges


def _spelled(token: bytes) -> str:
    return token.decode("latin-1").translate(CHARACTER_OF)

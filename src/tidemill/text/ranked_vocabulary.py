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


@dataclass(frozen=True)
class RankedVocabulary:
    ranks: Mapping[bytes, int]
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

"""Why one request of a step failed while the others went on: the same words from every runner."""

from __future__ import annotations

from tidemill.core.step import SliceProblem

NOT_FINITE = SliceProblem(
    "the model's numbers are not finite (an overflow, or NaN weights)",
    fix="start with --check-weights to find a broken tensor, or with --dtype float32 against overflows",
)
NO_TOKEN_LEFT = SliceProblem(
    "allowed_token_ids, bad_words and min_tokens together leave no token to choose", by_request=True
)

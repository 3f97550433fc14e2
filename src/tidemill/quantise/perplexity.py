"""Perplexity of a model on a text: how many tokens it hesitates between, on average.

Works on whatever gives probabilities: a tidemill LLM, or a model of transformers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Window:
    """Tokens begin..end are shown together, and those from `scored` on count."""

    begin: int
    end: int
    scored: int


def windows(count: int, window: int, stride: int) -> Iterator[Window]:
    """Each token counts once, and sees at least window - stride tokens before it, as far as there are any."""
    scored = 0
    for begin in range(0, count, stride):
        end = min(begin + window, count)
        if end - max(scored, begin + 1) > 0:
            yield Window(begin, end, max(scored, begin + 1))
        scored = end
        if end == count:
            return


def perplexity(
    model: Any,
    token_ids: Sequence[int],
    window: int = 512,
    stride: int | None = None,
    prefix: Sequence[int] = (),
) -> float:
    """`model`: an LLM, or a callable that gives logits for ids [1, tokens]. `prefix` is shown before every window."""
    losses = _llm_losses if hasattr(model, "tokenizer") and hasattr(model, "generate") else _model_losses
    total, count = 0.0, 0
    for part in windows(len(token_ids), window, stride or window):
        shown = [*prefix, *token_ids[part.begin : part.end]]
        # The first token of all has nothing before it, unless there is a prefix.
        first = part.scored - part.begin + len(prefix)
        if prefix and part.scored == part.begin + 1:
            first -= 1
        found = losses(model)(shown)[first - 1 :]
        total, count = total + math.fsum(found), count + len(found)
    return math.exp(total / count) if count else math.nan


def mean_perplexity(losses: Sequence[torch.Tensor]) -> float:
    """Of losses per token, however they are cut."""
    return math.exp(float(torch.cat(tuple(losses)).double().mean()))


def _llm_losses(llm: Any) -> Callable[[list[int]], list[float]]:
    from tidemill.core.params import SamplingParams

    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)

    def losses(shown: list[int]) -> list[float]:
        (output,) = llm.generate([shown], params, use_tqdm=False)
        entries = zip(output.prompt_logprobs[1:], shown[1:], strict=True)
        return [-entry[token].logprob for entry, token in entries]

    return losses


def _model_losses(model: Any) -> Callable[[list[int]], list[float]]:
    @torch.no_grad()
    def losses(shown: list[int]) -> list[float]:
        ids = torch.tensor([shown], device=getattr(model, "device", None))
        answer = model(ids)
        logits = getattr(answer, "logits", answer)[0, :-1].float()
        return torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none").tolist()

    return losses

"""What must be true of a request before the engine sees it: ids in the vocabulary, lengths within the context.

Turns one request into the sequences the engine runs. Everything here depends on the served model; what does not is
checked in `core/params.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Protocol

from tidemill.config import EngineConfig
from tidemill.core.params import SamplingParams
from tidemill.engine.messages import Add, GenerateRequest
from tidemill.errors import ContextTooLong, InvalidRequest


class Encoder(Protocol):
    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]: ...


def admit(request: GenerateRequest, config: EngineConfig, tokenizer: Encoder) -> list[Add]:
    """The sequences to run, one per choice. Raises InvalidRequest naming the field, the limit and the fix."""
    params = request.params
    prompt_ids = _truncated(request.prompt_ids, params, config.max_model_len)
    if not prompt_ids:
        raise InvalidRequest("the prompt is empty: it must hold at least one token", param="prompt")
    _check_length(len(prompt_ids), params, config.max_model_len)
    _check_ids("prompt", prompt_ids, config.vocab_size)
    _check_ids("stop_token_ids", params.stop_token_ids, config.vocab_size)
    _check_ids("allowed_token_ids", params.allowed_token_ids or (), config.vocab_size)
    _check_ids("logit_bias", params.logit_bias or (), config.vocab_size)
    if request.priority and config.scheduling_policy != "priority":
        raise InvalidRequest(
            "priority has no effect here: the server runs with the fcfs policy; start it with "
            "--scheduling-policy priority, or leave priority out",
            param="priority",
        )
    bad_words_ids = _bad_words(params.bad_words, tokenizer)
    sequences = []
    for index in range(params.n):
        own = params
        if params.n > 1:
            # The last 64 bits count, so the seeds of later choices wrap around rather than leave the range.
            seed = None if params.seed is None else (params.seed + index) % 2**64
            own = replace(params, n=1, seed=seed, prompt_logprobs=params.prompt_logprobs if index == 0 else None)
        name = f"{request.id}-{index}"
        sequences.append(Add(name, prompt_ids, own, bad_words_ids, request.priority, request.cache_salt))
    return sequences


def _truncated(prompt_ids: list[int], params: SamplingParams, max_model_len: int) -> list[int]:
    limit = params.truncate_prompt_tokens
    if limit is None:
        return prompt_ids
    if limit == -1:
        limit = max_model_len - (params.max_tokens or 1)
        if limit < 1:
            raise ContextTooLong(
                f"max_tokens {params.max_tokens} leaves no room for a prompt in a context of {max_model_len} tokens",
                param="max_tokens",
            )
    return prompt_ids[-limit:]


def _check_ids(field: str, ids: Collection[int], vocab_size: int) -> None:
    if not ids:
        return
    lowest, highest = min(ids), max(ids)
    if lowest < 0 or highest >= vocab_size:
        token = lowest if lowest < 0 else highest
        raise InvalidRequest(
            f"{field}: token id {token} is outside the vocabulary (0 to {vocab_size - 1})", param=field
        )


def _check_length(num_prompt: int, params: SamplingParams, max_model_len: int) -> None:
    if num_prompt >= max_model_len:
        raise ContextTooLong(
            f"the prompt has {num_prompt} tokens, but this model's context holds {max_model_len}, at least one of them "
            "for the answer; shorten the prompt, set truncate_prompt_tokens, or serve with a larger --max-model-len",
            param="prompt",
        )
    if params.max_tokens is not None and num_prompt + params.max_tokens > max_model_len:
        raise ContextTooLong(
            f"the prompt has {num_prompt} tokens and max_tokens asks for {params.max_tokens} more, but this model's "
            f"context holds {max_model_len}; use max_tokens of at most {max_model_len - num_prompt}",
            param="max_tokens",
        )
    if params.min_tokens > max_model_len - num_prompt:
        raise ContextTooLong(
            f"min_tokens {params.min_tokens} does not fit behind a prompt of {num_prompt} tokens in a context of "
            f"{max_model_len}",
            param="min_tokens",
        )


def _bad_words(words: list[str], tokenizer: Encoder) -> list[list[int]]:
    """Each word as it is spelled at the start of a text and after a space, which are different tokens."""
    if not words:
        return []
    texts = [text for word in words for text in (word, " " + word.lstrip())]
    spellings = {tuple(ids) for ids in tokenizer.encode_batch(texts, add_special_tokens=False) if ids}
    return [list(ids) for ids in sorted(spellings)]

"""The JSON of a chat answer, whole or in chunks.

Plain dicts on purpose: a chunk is made for every token, and the schemas are only its documentation.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from tidemill.engine.messages import Delta
from tidemill.server.generation import Answer, Tally, Work, gather, run
from tidemill.server.logprobs import TokenNamer, chat_logprobs, prompt_logprobs
from tidemill.server.schemas_chat import ChatCompletionRequest
from tidemill.server.sse import DONE, event
from tidemill.server.state import AppState


async def whole(state: AppState, work: Work, body: ChatCompletionRequest) -> dict[str, Any]:
    answers, tally = await gather(state, work)
    shape = _Shape(work, body)
    result = {
        "id": work.id,
        "object": "chat.completion",
        "created": work.created,
        "model": work.model_name,
        "system_fingerprint": state.fingerprint,
        "choices": [shape.choice(index, answer) for index, answer in enumerate(answers)],
        "usage": tally.usage(),
    }
    if body.prompt_logprobs is not None:
        result["prompt_logprobs"] = prompt_logprobs(answers[0].prompt_logprobs, work.model.tokenizer)
    if body.return_token_ids:
        result["prompt_token_ids"] = work.prompts[0].kept(answers[0].num_prompt_tokens)
    return result


async def chunks(state: AppState, work: Work, body: ChatCompletionRequest) -> AsyncGenerator[bytes, None]:
    shape, tally = _Shape(work, body), Tally()
    options = body.stream_options
    wants_usage = bool(options and options.include_usage)
    always_usage = bool(options and options.continuous_usage_stats)
    started: set[int] = set()
    head: dict[str, Any] = {
        "id": work.id,
        "object": "chat.completion.chunk",
        "created": work.created,
        "model": work.model_name,
        "system_fingerprint": state.fingerprint,
    }

    def chunk(choices: list[dict[str, Any]]) -> dict[str, Any]:
        payload = {**head, "choices": choices}
        if always_usage:
            payload["usage"] = tally.usage()
        elif wants_usage:
            payload["usage"] = None
        return payload

    async with aclosing(run(state, work)) as deltas:
        async for prompt_index, delta in deltas:
            tally.saw(prompt_index, delta)
            if delta.index not in started:
                opening = chunk([_opening(delta.index)])
                if body.return_token_ids and not started:
                    opening["prompt_token_ids"] = work.prompts[0].kept(delta.num_prompt_tokens)
                started.add(delta.index)
                yield event(opening)
            if shape.is_visible(delta):
                yield event(chunk([shape.chunk_choice(delta)]))
    if wants_usage or always_usage:
        yield event({**head, "choices": [], "usage": tally.usage()})
    yield DONE


def _opening(index: int) -> dict[str, Any]:
    return {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}


class _Shape:
    """How one request wants its choices to look."""

    def __init__(self, work: Work, body: ChatCompletionRequest) -> None:
        self._logprobs = bool(body.logprobs)
        self._num_top = body.top_logprobs or 0
        self._token_ids = bool(body.return_token_ids)
        self._name = TokenNamer(work.model.tokenizer, bool(body.return_tokens_as_token_ids))

    def is_visible(self, delta: Delta) -> bool:
        """Whether there is anything to tell: the text of a token may still be held back."""
        return bool(delta.text or delta.finish_reason or (delta.token_ids and (self._logprobs or self._token_ids)))

    def choice(self, index: int, answer: Answer) -> dict[str, Any]:
        choice = {
            "index": index,
            "message": {"role": "assistant", "content": "".join(answer.text), "refusal": None},
            "logprobs": chat_logprobs(answer.logprobs, self._num_top, self._name) if self._logprobs else None,
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_reason,
        }
        if self._token_ids:
            choice["token_ids"] = answer.token_ids
        return choice

    def chunk_choice(self, delta: Delta) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": delta.index,
            "delta": {"content": delta.text} if delta.text else {},
            "logprobs": chat_logprobs(delta.logprobs or (), self._num_top, self._name) if self._logprobs else None,
            "finish_reason": delta.finish_reason,
        }
        if delta.finish_reason is not None:
            choice["stop_reason"] = delta.stop_reason
        if self._token_ids:
            choice["token_ids"] = delta.token_ids
        return choice

"""The JSON of a text completion, whole or in chunks, with the prompt in front where `echo` asks for it.

Plain dicts on purpose: a chunk is made for every token, and the schemas are only its documentation.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from tidemill.core.step import TokenLogprob
from tidemill.engine.messages import Delta
from tidemill.server.generation import Answer, Tally, Work, gather, run
from tidemill.server.logprobs import CompletionLogprobs, TokenNamer, prompt_logprobs
from tidemill.server.schemas_completion import CompletionRequest
from tidemill.server.sse import DONE, event
from tidemill.server.state import AppState

PromptEntries = Sequence[TokenLogprob | None]


async def whole(state: AppState, work: Work, body: CompletionRequest) -> dict[str, Any]:
    answers, tally = await gather(state, work)
    shape = _Shape(work, body)
    return {
        **_head(state, work),
        "choices": [shape.choice(index, answer, answers) for index, answer in enumerate(answers)],
        "usage": tally.usage(),
    }


async def chunks(state: AppState, work: Work, body: CompletionRequest) -> AsyncGenerator[bytes, None]:
    shape, tally, head = _Shape(work, body), Tally(), _head(state, work)
    options = body.stream_options
    wants_usage = bool(options and options.include_usage)
    always_usage = bool(options and options.continuous_usage_stats)

    def chunk(choice: dict[str, Any]) -> bytes:
        payload = {**head, "choices": [choice]}
        if always_usage:
            payload["usage"] = tally.usage()
        elif wants_usage:
            payload["usage"] = None
        return event(payload)

    async with aclosing(_prompt_scores_first(run(state, work), shape.needs_prompt_scores)) as deltas:
        async for prompt_index, delta, scores in deltas:
            tally.saw(prompt_index, delta)
            choice = shape.chunk_choice(prompt_index, delta, scores)
            if choice is not None:
                yield chunk(choice)
    if wants_usage or always_usage:
        yield event({**head, "choices": [], "usage": tally.usage()})
    yield DONE


def _head(state: AppState, work: Work) -> dict[str, Any]:
    return {
        "id": work.id,
        "object": "text_completion",
        "created": work.created,
        "model": work.model_name,
        "system_fingerprint": state.fingerprint,
    }


async def _prompt_scores_first(
    deltas: AsyncGenerator[tuple[int, Delta], None], needed: bool
) -> AsyncGenerator[tuple[int, Delta, PromptEntries], None]:
    """Each delta with the log-probabilities of its prompt, which only the first answer of a prompt brings.

    Where an echo needs them, the other answers wait for that one.
    """
    scores: dict[int, PromptEntries] = {}
    waiting: dict[int, list[Delta]] = {}
    async with aclosing(deltas):
        async for prompt_index, delta in deltas:
            if delta.prompt_logprobs is not None:
                scores[prompt_index] = delta.prompt_logprobs
            if needed and prompt_index not in scores:
                waiting.setdefault(prompt_index, []).append(delta)
                continue
            known = scores.get(prompt_index, ())
            yield prompt_index, delta, known
            for earlier in waiting.pop(prompt_index, ()):
                yield prompt_index, earlier, known


class _Shape:
    """How one request wants its choices to look, and how far each choice of a stream has come."""

    def __init__(self, work: Work, body: CompletionRequest) -> None:
        self._work, self._body = work, body
        self._name = TokenNamer(work.model.tokenizer, bool(body.return_tokens_as_token_ids))
        self._streams: dict[int, CompletionLogprobs] = {}
        self.needs_prompt_scores = bool(body.echo and body.logprobs is not None)

    def choice(self, index: int, answer: Answer, answers: list[Answer]) -> dict[str, Any]:
        prompt_index = index // self._work.params.n
        scores = answers[prompt_index * self._work.params.n].prompt_logprobs
        used = self._work.prompts[prompt_index].kept(answer.num_prompt_tokens)
        echoed = self._prompt_text(prompt_index, used) if self._body.echo else ""
        lists = self._lists()
        if self.needs_prompt_scores:
            lists.add_prompt(scores or (), used, echoed)
        choice = {
            "index": index,
            "text": echoed + "".join(answer.text),
            "logprobs": self._logprobs(lists, answer.logprobs, answer.token_ids),
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_reason,
        }
        if self._body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(scores, self._work.model.tokenizer)
        if self._body.return_token_ids:
            choice |= {"token_ids": answer.token_ids, "prompt_token_ids": used}
        return choice

    def chunk_choice(self, prompt_index: int, delta: Delta, scores: PromptEntries) -> dict[str, Any] | None:
        """None while there is nothing to tell: the text of a token may still be held back."""
        index = prompt_index * self._work.params.n + delta.index
        lists = self._streams.get(index)
        used: list[int] = []
        text = delta.text
        opens = lists is None
        if lists is None:
            lists = self._streams[index] = self._lists()
            used = self._work.prompts[prompt_index].kept(delta.num_prompt_tokens)
            if self._body.echo:
                echoed = self._prompt_text(prompt_index, used)
                text = echoed + text
                if self.needs_prompt_scores:
                    lists.add_prompt(scores, used, echoed)
        tells_tokens = self._body.logprobs is not None or self._body.return_token_ids
        if not (text or delta.finish_reason or (delta.token_ids and tells_tokens)):
            return None
        choice: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": self._logprobs(lists, delta.logprobs or (), delta.token_ids),
            "finish_reason": delta.finish_reason,
        }
        if delta.finish_reason is not None:
            choice["stop_reason"] = delta.stop_reason
        if self._body.return_token_ids:
            choice["token_ids"] = delta.token_ids
            if opens:
                choice["prompt_token_ids"] = used
        return choice

    def _lists(self) -> CompletionLogprobs:
        special = self._work.model.tokenizer.special_ids
        unwritten = special if self._work.params.skip_special_tokens else frozenset()
        return CompletionLogprobs(self._body.logprobs or 0, self._name, unwritten)

    def _logprobs(
        self, lists: CompletionLogprobs, entries: PromptEntries, token_ids: Sequence[int]
    ) -> dict[str, Any] | None:
        if self._body.logprobs is None:
            return None
        lists.add(entries, token_ids)
        return lists.take()

    def _prompt_text(self, prompt_index: int, used: list[int]) -> str:
        prompt = self._work.prompts[prompt_index]
        if prompt.text is not None and len(used) == len(prompt.ids):
            return prompt.text
        return self._work.model.tokenizer.decode(used, skip_special_tokens=self._work.params.skip_special_tokens)

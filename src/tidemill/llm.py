"""The Python API: a model in this process, many prompts in, finished texts out.

Results have vLLM's shape. The engine is the same as behind the server, driven step by step in the calling thread.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tidemill.config import EngineArgs
from tidemill.core.params import SamplingParams
from tidemill.core.step import TokenLogprob
from tidemill.engine.admission import admit
from tidemill.engine.build import build_core
from tidemill.engine.messages import Delta, GenerateRequest, SequenceOutput
from tidemill.engine.output import Choice
from tidemill.engine.prepare import Prepared, prepare
from tidemill.errors import InvalidRequest, TidemillError
from tidemill.progress import ProgressReporter
from tidemill.text.chat import ChatTemplate
from tidemill.text.chat_files import given_template
from tidemill.text.chat_input import as_sequence, check_keywords, check_messages, check_objects, split_conversations

logger = logging.getLogger(__name__)

Prompt = str | Sequence[int] | Mapping[str, Any]


@dataclass(frozen=True)
class Logprob:
    logprob: float
    rank: int | None
    decoded_token: str


@dataclass
class CompletionOutput:
    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass
class RequestOutput:
    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
    finished: bool = False


class LLM:
    """`LLM("smollm2").generate(["Once upon a time"], SamplingParams(max_tokens=32))`"""

    def __init__(self, model: str = "smollm2", **settings: Any) -> None:
        try:
            args = EngineArgs(model=model, **settings)
        except TypeError as error:
            known = ", ".join(EngineArgs.__dataclass_fields__)
            raise InvalidRequest(f"LLM: {error}; known settings are {known}") from None
        if "max_waiting" in settings:
            raise InvalidRequest("max_waiting bounds a server's queue; LLM takes any number of prompts at once")
        with ProgressReporter() as progress:
            prepared = prepare(args, progress)
            self._accept(prepared)
            for note in prepared.notes:
                logger.warning("%s: %s %s, %s", model, note.name, note.value, note.reason)
            self._core = build_core(prepared.config, progress)
        self.config, self.tokenizer, self.chat_template = prepared.config, prepared.tokenizer, prepared.chat_template
        self.default_sampling = prepared.default_sampling
        self._ids = itertools.count()

    def _accept(self, prepared: Prepared) -> None:
        """Called before the weights are loaded, for whoever needs more of a model than that it runs."""

    def get_default_sampling_params(self) -> SamplingParams:
        return SamplingParams(**self.default_sampling)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: Sequence[int] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continue prompts (texts, token id lists, or dicts with `prompt` or `prompt_token_ids`), in their order.

        `priority` (lower is earlier) needs `LLM(..., scheduling_policy="priority")`.
        """
        many = _as_list(prompts)
        if priority is not None and len(priority) != len(many):
            raise InvalidRequest(f"{len(priority)} priorities for {len(many)} prompts", param="priority")
        params = self._params_for(many, sampling_params)
        return self._run([self._tokenized(prompt) for prompt in many], params, use_tqdm, priority)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        chat_template_content_format: Literal["auto", "string", "openai"] = "auto",
        add_generation_prompt: bool | None = None,
        continue_final_message: bool | str = False,
        tools: Sequence[Mapping[str, Any] | Callable[..., Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several.

        `tools` are JSON schemas, or functions with type hints and a docstring; the template writes them into the
        prompt, and a call the model makes is part of its text. `chat_template` is a file, the text of one, or the name
        of one of the model's. What a template does not read is refused.
        """
        if chat_template is not None and not isinstance(chat_template, str):
            raise InvalidRequest(
                f"chat_template is a file, a text or a name, got {type(chat_template).__name__}", param="chat_template"
            )
        template = self._template(chat_template)
        if chat_template_content_format not in ("auto", "string", "openai"):
            raise InvalidRequest(
                f"chat_template_content_format is {chat_template_content_format!r}, it must be auto, string or openai",
                param="chat_template_content_format",
            )
        schemas = None if tools is None else [_tool_schema(tool) for tool in as_sequence(tools, "tools")]
        check_objects(schemas, "tools")
        check_objects(documents, "documents")
        check_keywords(chat_template_kwargs)
        prompts: list[tuple[str | None, list[int]]] = []
        for conversation in split_conversations(messages):
            check_messages(conversation)
            template.refuse_unread(conversation, tools=schemas, documents=documents, kwargs=chat_template_kwargs)
            opens_turn = not continue_final_message if add_generation_prompt is None else add_generation_prompt
            text = template.render(
                conversation,
                add_generation_prompt=opens_turn,
                continue_final_message=continue_final_message,
                tools=schemas,
                documents=documents,
                content_format=chat_template_content_format,
                kwargs=chat_template_kwargs,
            )
            prompts.append((text, self.tokenizer.encode(text, add_special_tokens=False)))
        return self._run(prompts, self._params_for(prompts, sampling_params), use_tqdm)

    def stream(self, prompt_ids: list[int], params: SamplingParams) -> Iterator[Delta]:
        """One prompt, delta by delta; leaving the iteration early frees what it holds."""
        request = GenerateRequest(str(next(self._ids)), prompt_ids, params)
        sequences = admit(request, self.config, self.tokenizer)
        choices = {add.id: Choice(i, add.prompt_ids, add.params, self.tokenizer) for i, add in enumerate(sequences)}
        for add in sequences:
            self._core.add(add)
        try:
            while any(choice.finish_reason is None for choice in choices.values()):
                for output in self._core.step():
                    if output.problem is not None:
                        raise TidemillError.from_dict(output.problem)
                    choice = choices[output.id]
                    if choice.finish_reason is None and (delta := choice.feed(output)) is not None:
                        if choice.finish_reason is not None:
                            self._core.abort([output.id])
                        yield delta
        finally:
            self._core.abort(list(choices))

    def _template(self, override: str | None) -> ChatTemplate:
        template = self.chat_template
        if override is not None:
            template = given_template(override, self.tokenizer.special_tokens_map, template)
        if template is None:
            raise InvalidRequest(
                "this model has no chat template",
                param="messages",
                fix="pass chat_template= to LLM or to chat, or use generate()",
            )
        return template

    def _tokenized(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, Mapping):
            if "prompt_token_ids" in prompt:
                return prompt.get("prompt"), list(prompt["prompt_token_ids"])
            prompt = prompt["prompt"]
        if isinstance(prompt, str):
            return prompt, self.tokenizer.encode(prompt)
        return None, [int(token) for token in prompt]

    def _params_for(
        self, prompts: Sequence[Any], given: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[SamplingParams]:
        if given is None:
            return [self.get_default_sampling_params()] * len(prompts)
        if isinstance(given, SamplingParams):
            return [given] * len(prompts)
        if len(given) != len(prompts):
            raise InvalidRequest(f"{len(given)} sampling_params for {len(prompts)} prompts: give one, or one for each")
        return list(given)

    def _run(
        self,
        prompts: list[tuple[str | None, list[int]]],
        params: list[SamplingParams],
        use_tqdm: bool,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        results: list[RequestOutput] = []
        choices: dict[str, tuple[Choice, RequestOutput]] = {}
        sequences = []
        for index, ((text, ids), own) in enumerate(zip(prompts, params, strict=True)):
            request_id = str(next(self._ids))
            request = GenerateRequest(request_id, ids, own, priority=priority[index] if priority else 0)
            adds = admit(request, self.config, self.tokenizer)
            result = RequestOutput(request_id, text, adds[0].prompt_ids, [CompletionOutput(i) for i in range(own.n)])
            results.append(result)
            for number, add in enumerate(adds):
                choices[add.id] = (Choice(number, add.prompt_ids, add.params, self.tokenizer), result)
            sequences.extend(adds)
        for add in sequences:
            self._core.add(add)
        progress = _ProgressBar(len(sequences)) if use_tqdm and sequences else None
        try:
            while choices and self._core.has_work:
                for output in self._core.step():
                    self._take(output, choices, progress)
        finally:
            self._core.abort(list(choices))
            if progress is not None:
                progress.close()
        for result in results:
            result.finished = True
        return results

    def _take(
        self,
        output: SequenceOutput,
        choices: dict[str, tuple[Choice, RequestOutput]],
        progress: _ProgressBar | None,
    ) -> None:
        if output.id not in choices:
            return
        choice, result = choices[output.id]
        if output.problem is not None:
            raise TidemillError.from_dict(output.problem)
        delta = choice.feed(output)
        if delta is not None:
            self._append(result, delta)
        if progress is not None:
            progress.tokens(len(output.token_ids))
        if choice.finish_reason is not None:
            del choices[output.id]
            self._core.abort([output.id])
            if progress is not None:
                progress.finished()

    def _append(self, result: RequestOutput, delta: Delta) -> None:
        one = result.outputs[delta.index]
        one.text += delta.text
        one.token_ids.extend(delta.token_ids)
        one.finish_reason, one.stop_reason = delta.finish_reason, delta.stop_reason
        result.num_cached_tokens = delta.num_cached_tokens
        if delta.logprobs is not None:
            one.logprobs = (one.logprobs or []) + [self._logprobs(entry) for entry in delta.logprobs]
            one.cumulative_logprob = (one.cumulative_logprob or 0.0) + sum(entry.logprob for entry in delta.logprobs)
        if delta.prompt_logprobs is not None:
            result.prompt_logprobs = [
                None if entry is None else self._logprobs(entry) for entry in delta.prompt_logprobs
            ]

    def _logprobs(self, entry: TokenLogprob) -> dict[int, Logprob]:
        found = {entry.token: Logprob(entry.logprob, entry.rank, self.tokenizer.token_text(entry.token))}
        for rank, (token, value) in enumerate(entry.top, start=1):
            found.setdefault(token, Logprob(value, rank, self.tokenizer.token_text(token)))
        return found


class _ProgressBar:
    """Prompts done and tokens a second, on the terminal."""

    def __init__(self, total: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._progress = Progress(
            TextColumn("generating"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[rate]}"),
            console=Console(stderr=True),
        )
        self._progress.start()
        self._task = self._progress.add_task("generating", total=total, rate="")
        self._tokens = 0

    def tokens(self, count: int) -> None:
        self._tokens += count
        elapsed = self._progress.tasks[0].elapsed or 0.0
        if elapsed > 0:
            self._progress.update(self._task, rate=f"{self._tokens / elapsed:.1f} tokens/s")

    def finished(self) -> None:
        self._progress.advance(self._task)

    def close(self) -> None:
        self._progress.stop()


def _tool_schema(tool: Mapping[str, Any] | Callable[..., Any]) -> Mapping[str, Any]:
    """A JSON schema as it is; of a function, the one transformers reads from its type hints and docstring."""
    if isinstance(tool, Mapping):
        return tool
    if not callable(tool):
        raise InvalidRequest(f"tools are JSON schemas or functions, got {type(tool).__name__}", param="tools")
    from transformers.utils import get_json_schema

    try:
        schema: dict[str, Any] = get_json_schema(tool)
    except Exception as error:
        raise InvalidRequest(
            f"tools: no schema can be made of {getattr(tool, '__name__', tool)!r:.60}",
            param="tools",
            cause=str(error),
            fix="give it type hints and a docstring that describes it and, under Args:, its arguments",
        ) from error
    return schema


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A single text, a single list of ids and a single dict are one prompt; any other sequence is many."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if len(prompts) and not isinstance(prompts[0], str | Sequence | Mapping):
        # Numbers, also numpy's: one prompt of token ids.
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]

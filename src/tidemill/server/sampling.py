"""From the fields of a request to `SamplingParams`: the model's defaults first, the caller's wishes on top.

Knows both vocabularies; ranges are checked by `SamplingParams` itself, token ids by the engine client.
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from tidemill.core.params import SamplingParams
from tidemill.errors import InvalidRequest
from tidemill.server.schemas_chat import ChatCompletionRequest
from tidemill.server.schemas_common import GenerationFields
from tidemill.server.schemas_completion import CompletionRequest

if TYPE_CHECKING:
    from tidemill.engine.host import ServedModel

DEFAULT_COMPLETION_TOKENS = 16

_SAME_NAME = tuple(
    field.name
    for field in fields(SamplingParams)
    if field.name in GenerationFields.model_fields and field.name not in ("stop", "logit_bias", "max_tokens")
)


def chat_params(body: ChatCompletionRequest, model: ServedModel) -> SamplingParams:
    limits = {body.max_tokens, body.max_completion_tokens} - {None}
    if len(limits) > 1:
        raise InvalidRequest(
            "max_tokens and max_completion_tokens disagree; send max_completion_tokens alone", param="max_tokens"
        )
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
    _refuse_names_without_logprobs(body, bool(body.logprobs))
    values = _shared(body, model)
    values["max_tokens"] = limits.pop() if limits else values.get("max_tokens")
    values["logprobs"] = (body.top_logprobs or 0) if body.logprobs else None
    return SamplingParams(**values)


def completion_params(body: CompletionRequest, model: ServedModel) -> SamplingParams:
    _refuse_names_without_logprobs(body, body.logprobs is not None)
    values = _shared(body, model)
    if body.max_tokens is not None:
        values["max_tokens"] = body.max_tokens
    values.setdefault("max_tokens", DEFAULT_COMPLETION_TOKENS)
    values["logprobs"] = body.logprobs
    if body.echo and body.logprobs is not None:
        values["prompt_logprobs"] = max(body.logprobs, values.get("prompt_logprobs") or 0)
    return SamplingParams(**values)


def refuse_stream_conflicts(body: GenerationFields) -> None:
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options needs stream to be true", param="stream_options")
    if body.stream and body.prompt_logprobs is not None:
        raise InvalidRequest("prompt_logprobs cannot be streamed; set stream to false", param="prompt_logprobs")


def _refuse_names_without_logprobs(body: GenerationFields, has_logprobs: bool) -> None:
    if body.return_tokens_as_token_ids and not has_logprobs:
        raise InvalidRequest(
            "return_tokens_as_token_ids names the tokens of logprobs, so it needs logprobs",
            param="return_tokens_as_token_ids",
        )


def _shared(body: GenerationFields, model: ServedModel) -> dict[str, Any]:
    values: dict[str, Any] = dict(model.default_sampling)
    for name in _SAME_NAME:
        if (value := getattr(body, name)) is not None:
            values[name] = value
    if body.stop is not None:
        values["stop"] = [body.stop] if isinstance(body.stop, str) else body.stop
    if body.logit_bias:
        values["logit_bias"] = {_token_id(key): bias for key, bias in body.logit_bias.items()}
    return values


def _token_id(key: str) -> int:
    # isdigit alone would let through digits of other scripts and numbers too long for any vocabulary.
    if not (key.isascii() and key.isdigit() and len(key) <= 10):
        raise InvalidRequest(f"logit_bias keys are token ids, got {key[:40]!r}", param="logit_bias")
    return int(key)

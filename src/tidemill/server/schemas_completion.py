"""Text completions on the wire: what is taken and what is returned."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Discriminator, Field, Tag

from tidemill.core.params import MAX_LOGPROBS
from tidemill.server.schemas_common import (
    AtMost,
    GenerationFields,
    Int32,
    Integer,
    PromptLogprobs,
    Text,
    TokenIds,
    Usage,
    documented,
)

MAX_PROMPTS = 1024

PromptIds = Annotated[TokenIds, Field(json_schema_extra={"minItems": 1})]
Texts = Annotated[list[Text], AtMost(MAX_PROMPTS)]
IdLists = Annotated[list[PromptIds], AtMost(MAX_PROMPTS)]


def _kind(prompt: object) -> str | None:
    """Which of the four shapes is meant, by the first entry: trying all four on a long list takes far longer."""
    if isinstance(prompt, str):
        return "text"
    if not isinstance(prompt, list):
        return None
    first = prompt[0] if prompt else 0
    if isinstance(first, list):
        return "id lists"
    return "ids" if type(first) in (int, float) else "texts"


Prompts = Annotated[
    Annotated[Text, Tag("text")]
    | Annotated[PromptIds, Tag("ids")]
    | Annotated[Texts, Tag("texts")]
    | Annotated[IdLists, Tag("id lists")],
    Discriminator(_kind, custom_error_type="prompt_type", custom_error_message="a text, a list of texts, or token ids"),
]


class CompletionRequest(GenerationFields):
    """Unknown parameters, and known ones that cannot act here, are refused by name."""

    prompt: Prompts = Field(description="A text, token ids, or a list of either.", json_schema_extra={"minItems": 1})
    max_tokens: Integer | None = documented("The most tokens to write per answer; 16 if left out.", minimum=1)
    logprobs: Int32 | None = documented("How many alternatives per token.", minimum=0, maximum=MAX_LOGPROBS)
    echo: bool | None = Field(default=None, description="Return the prompt in front of the answer.")


class CompletionLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str
    stop_reason: int | str | None
    prompt_logprobs: PromptLogprobs | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class Completion(BaseModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage


class CompletionChunkChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class CompletionChunk(BaseModel):
    """One `data:` event of a stream; the stream ends with `data: [DONE]`."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChunkChoice]
    usage: Usage | None = None

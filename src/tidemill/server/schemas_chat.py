"""Chat completions on the wire: what is taken and what is returned."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from tidemill.core.params import MAX_LOGPROBS
from tidemill.server.schemas_common import (
    AtMost,
    GenerationFields,
    Integer,
    PromptLogprobs,
    RequestBody,
    Usage,
    documented,
    whole,
    with_one_unknown,
    without_null,
)

MAX_MESSAGES = 4096
MAX_PARTS = 4096
MAX_TOOL_CALLS = 256
MAX_DOCUMENTS = 1024
MAX_TOOLS = 1024

# Checked here rather than by SamplingParams, which knows these two fields by other names.
AtLeastOne = Annotated[int, Field(ge=1), BeforeValidator(whole)]
TopCount = Annotated[int, Field(ge=0, le=MAX_LOGPROBS), BeforeValidator(whole)]
Role = Literal["system", "developer", "user", "assistant", "tool"]


class ContentPart(BaseModel):
    """A piece of a message. Only text is read; other types are refused by name."""

    model_config = ConfigDict(json_schema_extra={"required": ["type", "text"]})

    type: str = Field(json_schema_extra={"enum": ["text"]})
    text: str | None = Field(default=None, json_schema_extra=without_null)


class FunctionCall(RequestBody):
    name: str
    arguments: str = Field(description="A JSON object, as text.")


class ToolCall(RequestBody):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


Parts = Annotated[list[ContentPart], AtMost(MAX_PARTS)]
ToolCalls = Annotated[list[ToolCall], AtMost(MAX_TOOL_CALLS)]


class Message(RequestBody):
    """One turn. `tool_calls` and reasoning of earlier turns go to the chat template; refused where it reads none."""

    model_config = ConfigDict(json_schema_extra={"required": ["role", "content"]})

    role: Role
    content: str | Parts | None = Field(
        default=None, description="Null only beside tool_calls.", json_schema_extra=without_null
    )
    name: str | None = None
    tool_calls: ToolCalls | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = Field(default=None, description="What led to an earlier answer.")
    reasoning: str | None = Field(default=None, description="Another name of reasoning_content.")

    @model_validator(mode="before")
    @classmethod
    def _trimmed(cls, data: Any) -> Any:
        """Answers are sent back as they came, with `refusal: null`, `annotations: []` and whatever else is empty."""
        if not isinstance(data, dict):
            return data
        fields = cls.model_fields
        filled = {name: value for name, value in data.items() if name in fields or value not in (None, [], {})}
        return with_one_unknown(cls, filled)


def _checked_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Looked at, not rebuilt: templates write a tool as JSON, in the order the caller wrote it."""
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError('should be {"type": "function", "function": {"name": ..., "parameters": ...}}')
    return tool


_TOOL_SCHEMA = {
    "required": ["type", "function"],
    "properties": {
        "type": {"const": "function"},
        "function": {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}},
    },
}
Tool = Annotated[dict[str, Any], AfterValidator(_checked_tool), Field(json_schema_extra=_TOOL_SCHEMA)]
Messages = Annotated[list[Message], AtMost(MAX_MESSAGES)]
Tools = Annotated[list[Tool], AtMost(MAX_TOOLS)]
Documents = Annotated[list[dict[str, Any]], AtMost(MAX_DOCUMENTS)]


class ChatCompletionRequest(GenerationFields):
    """Unknown parameters, and known ones that cannot act here, are refused by name."""

    messages: Messages = Field(json_schema_extra={"minItems": 1})
    max_tokens: Integer | None = documented("Older name of max_completion_tokens.", minimum=1)
    max_completion_tokens: AtLeastOne | None = Field(
        default=None, description="The most tokens to write; to the end of the context if left out."
    )
    logprobs: bool | None = None
    top_logprobs: TopCount | None = None
    add_generation_prompt: bool | None = Field(default=None, description="Start a new assistant turn (the default).")
    continue_final_message: bool | None = Field(default=None, description="Write on where the last message ends.")
    chat_template_kwargs: dict[str, Any] | None = Field(
        default=None, description="Extra values for the chat template; a name it does not read is refused."
    )
    documents: Documents | None = Field(
        default=None, description="Passed to the chat template; refused where it reads none."
    )
    tools: Tools | None = Field(
        default=None,
        description='With tool_choice "none": passed to the chat template; refused where it reads none.',
    )
    tool_choice: Literal["none"] | None = Field(
        default=None, description="Answers are texts; tool calls are not read from them in this version."
    )


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int] | None


class ContentLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(BaseModel):
    content: list[ContentLogprob] | None


class AssistantMessage(BaseModel):
    role: Literal["assistant"]
    content: str
    refusal: None = None


class ChatChoice(BaseModel):
    index: int
    message: AssistantMessage
    logprobs: ChoiceLogprobs | None
    finish_reason: str
    stop_reason: int | str | None
    token_ids: list[int] | None = None


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None


class ChatDelta(BaseModel):
    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChunkChoice(BaseModel):
    index: int
    delta: ChatDelta
    logprobs: ChoiceLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatCompletionChunk(BaseModel):
    """One `data:` event of a stream; the stream ends with `data: [DONE]`."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None

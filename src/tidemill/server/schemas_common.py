"""The fields that chat and text completion share, and the types they are made of.

Schemas say what a field is and document it; whether a number makes sense is decided in `core/params.py`, whose limits
are repeated here only as documentation. `null` always means the same as leaving a field out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from tidemill.core.params import MAX_BAD_WORDS, MAX_LOGPROBS, MAX_N, MAX_SEED, MAX_STOP_STRINGS

MAX_TOKEN_IDS = 2**20
MAX_ALLOWED_IDS = 2**18
MAX_STOP_IDS = 1024
MAX_BIASES = 4096
MAX_METADATA = 64


@dataclass(frozen=True, slots=True)
class AtMost:
    """A list or an object of too many entries is refused by its length, before any entry is looked at.

    A list is read up to its first wrong entry: a million wrong entries must not become a million reports.
    """

    count: int

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        # pydantic's own FailFast cannot be hashed, so it cannot be part of a union written with `|`.
        entries: Any = schema["schema"] if schema["type"] == "function-before" else schema
        if entries["type"] == "list":
            entries["fail_fast"] = True
        return core_schema.no_info_before_validator_function(self._checked, schema)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        described = handler(schema)
        described["maxItems" if described["type"] == "array" else "maxProperties"] = self.count
        return described

    def _checked(self, value: Any) -> Any:
        if isinstance(value, list | dict) and len(value) > self.count:
            raise ValueError(f"at most {self.count} entries are taken, got {len(value)}")
        return value


def whole(value: object) -> object:
    """JSON has one kind of number, so 16.0 is an integer too; some clients have no other way to write it."""
    return int(value) if type(value) is float and value.is_integer() else value


def whole_items(value: object) -> object:
    """`whole` for a long list, at the price of one call for all of it."""
    return [whole(item) for item in value] if isinstance(value, list) and float in set(map(type, value)) else value


Integer = Annotated[int, BeforeValidator(whole)]
Int32 = Annotated[int, Field(ge=-(2**31), le=2**31 - 1), BeforeValidator(whole)]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
Text = Annotated[str, Field(json_schema_extra={"minLength": 1})]
Bias = Annotated[float, Field(json_schema_extra={"minimum": -100, "maximum": 100})]
TokenIds = Annotated[list[TokenId], BeforeValidator(whole_items), AtMost(MAX_TOKEN_IDS)]
AllowedIds = Annotated[list[TokenId], BeforeValidator(whole_items), AtMost(MAX_ALLOWED_IDS)]
StopIds = Annotated[list[TokenId], BeforeValidator(whole_items), AtMost(MAX_STOP_IDS)]
StopTexts = Annotated[list[Text], AtMost(MAX_STOP_STRINGS)]
BadWords = Annotated[list[Text], AtMost(MAX_BAD_WORDS)]
Biases = Annotated[dict[str, Bias], AtMost(MAX_BIASES)]
Labels = Annotated[dict[str, str], AtMost(MAX_METADATA)]
RequestId = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[!-~]+$")]


def documented(description: str | None = None, **schema: Any) -> Any:
    """An optional field with limits that are shown in `/openapi.json` and checked by `SamplingParams`."""
    return Field(default=None, description=description, json_schema_extra=schema or None)


def without_null(schema: dict[str, Any]) -> None:
    """For a field that may be null only in rare company, which a schema cannot say: described as never null."""
    schema["anyOf"] = [branch for branch in schema["anyOf"] if branch != {"type": "null"}]
    schema.pop("default", None)


class RequestBody(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _trimmed(cls, data: Any) -> Any:
        return with_one_unknown(cls, data)


def with_one_unknown(schema: type[BaseModel], data: Any) -> Any:
    """Unknown names are refused; one is enough to say so, and reporting a million would take seconds."""
    if not isinstance(data, dict) or data.keys() <= schema.model_fields.keys():
        return data
    first = next(name for name in data if name not in schema.model_fields)
    return {name: value for name, value in data.items() if name in schema.model_fields or name == first}


class StreamOptions(RequestBody):
    include_usage: bool | None = Field(default=None, description="A last chunk with the usage of the whole request.")
    continuous_usage_stats: bool | None = Field(default=None, description="The usage so far in every chunk.")


class GenerationFields(RequestBody):
    """What both completion endpoints take."""

    model: str | None = Field(default=None, description="One of the names of /v1/models; the first one if left out.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    n: Int32 | None = documented("How many answers to the same prompt.", minimum=1, maximum=MAX_N)
    temperature: float | None = documented("0 is greedy.", minimum=0, maximum=100)
    top_p: float | None = documented(exclusiveMinimum=0, maximum=1)
    top_k: Int32 | None = documented("0 or -1 for all tokens.", minimum=-1)
    min_p: float | None = documented(minimum=0, maximum=1)
    presence_penalty: float | None = documented(minimum=-2, maximum=2)
    frequency_penalty: float | None = documented(minimum=-2, maximum=2)
    repetition_penalty: float | None = documented("1 changes nothing.", exclusiveMinimum=0)
    seed: Integer | None = documented("The same seed gives the same text.", minimum=-(2**63), maximum=MAX_SEED)
    logit_bias: Biases | None = documented(
        "Token id (as a string) to a bias.", propertyNames={"pattern": "^[0-9]{1,9}$"}
    )
    allowed_token_ids: AllowedIds | None = documented("Only these tokens can be chosen.", minItems=1)
    bad_words: BadWords | None = documented("Texts that are never written.")

    max_tokens: Integer | None = documented("The most tokens to write per answer.", minimum=1)
    min_tokens: Int32 | None = documented(minimum=0)
    stop: Text | StopTexts | None = documented("Texts that end the answer.")
    stop_token_ids: StopIds | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None

    prompt_logprobs: Int32 | None = documented("Log-probabilities of the prompt.", minimum=0, maximum=MAX_LOGPROBS)
    truncate_prompt_tokens: Int32 | None = documented("Keep this many tokens from the end; -1: what fits.", minimum=-1)
    add_special_tokens: bool | None = Field(
        default=None, description="Whether the tokenizer adds its BOS and the like."
    )
    return_token_ids: bool | None = Field(
        default=None, description="Adds prompt_token_ids and token_ids to the answer."
    )
    return_tokens_as_token_ids: bool | None = Field(
        default=None, description="Logprobs, which must be asked for, name tokens as `token_id:123`."
    )

    priority: Int32 | None = Field(default=None, description="Lower is served earlier (with priority scheduling).")
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = Field(
        default=None, description="Requests share cached prefixes only with requests of the same salt."
    )
    request_id: RequestId | None = Field(default=None, description="Becomes part of the answer's id.")

    user: str | None = Field(default=None, description="A label; written to the log, nothing else.")
    safety_identifier: str | None = Field(default=None, description="A label; written to the log, nothing else.")
    prompt_cache_key: str | None = Field(
        default=None, description="A label; written to the log. Prefixes are cached by content anyway."
    )
    metadata: Labels | None = Field(default=None, description="Labels; written to the log, nothing else.")


class PromptTokensDetails(BaseModel):
    cached_tokens: int = Field(description="Prompt tokens that were already in the prefix cache.")


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class PromptLogprob(BaseModel):
    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]

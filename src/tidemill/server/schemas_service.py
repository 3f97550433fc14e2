"""The small shapes: models, version, load, tokenising and back."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from tidemill.server.schemas_chat import Documents, Messages, Tools
from tidemill.server.schemas_common import RequestBody, TokenIds


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "tidemill"
    root: str = Field(description="Where the weights came from.")
    parent: str | None = None
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class Version(BaseModel):
    version: str


class Load(BaseModel):
    server_load: int = Field(description="Requests that are waiting or running.")


class Root(BaseModel):
    name: str
    version: str
    docs: str | None
    models: str


class TokenizeTextRequest(RequestBody):
    model: str | None = None
    prompt: str
    add_special_tokens: bool | None = Field(default=None, description="True if left out, as in /v1/completions.")
    return_token_strs: bool | None = None


class TokenizeChatRequest(RequestBody):
    model: str | None = None
    messages: Messages = Field(json_schema_extra={"minItems": 1})
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = Field(default=None, description="False if left out, as in /v1/chat/completions.")
    return_token_strs: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: Documents | None = None
    tools: Tools | None = None


class TokenizeResponse(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(RequestBody):
    model: str | None = None
    tokens: TokenIds


class DetokenizeResponse(BaseModel):
    prompt: str

"""POST /tokenize and /detokenize: what the server makes of a text, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request

from tidemill.errors import InvalidRequest
from tidemill.server.body import parse, read_body
from tidemill.server.conversation import render_chat
from tidemill.server.openapi import body_of, responses
from tidemill.server.prompts import refuse_endless
from tidemill.server.refusals import TOKENIZE_REFUSALS
from tidemill.server.schemas_service import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeChatRequest,
    TokenizeResponse,
    TokenizeTextRequest,
)
from tidemill.server.state import AppState

if TYPE_CHECKING:
    from tidemill.engine.host import ServedModel


def text_routes(state: AppState) -> APIRouter:
    router = APIRouter(tags=["text"])

    @router.post(
        "/tokenize",
        summary="The token ids of a text or a conversation",
        openapi_extra=body_of(TokenizeTextRequest, TokenizeChatRequest),
        responses=responses(TokenizeResponse, 400, 401, 404, 413, 500),
    )
    async def tokenize(request: Request) -> TokenizeResponse:
        body = await read_body(state, request, _tokenize_body)
        if isinstance(body, TokenizeChatRequest):
            return await _tokenize_chat(state, body)
        return await _tokenize_text(state, body)

    @router.post(
        "/detokenize",
        summary="The text of token ids",
        openapi_extra=body_of(DetokenizeRequest),
        responses=responses(DetokenizeResponse, 400, 401, 404, 413, 500),
    )
    async def detokenize(request: Request) -> DetokenizeResponse:
        body = await read_body(state, request, _detokenize_body)
        tokenizer = state.host.find(body.model).tokenizer

        def work() -> str:
            for position, token in enumerate(body.tokens):
                if token >= tokenizer.vocab_size and not tokenizer.knows(token):
                    raise InvalidRequest(
                        f"tokens[{position}] is {token}, but the vocabulary ends at {tokenizer.vocab_size - 1}",
                        param=f"tokens[{position}]",
                    )
            return tokenizer.decode(body.tokens, skip_special_tokens=False)

        return DetokenizeResponse(prompt=await state.off_loop(work, len(body.tokens)))

    return router


def _tokenize_body(raw: dict[str, Any]) -> TokenizeTextRequest | TokenizeChatRequest:
    if "messages" in raw:
        return parse(raw, TokenizeChatRequest, TOKENIZE_REFUSALS)
    return parse(raw, TokenizeTextRequest, TOKENIZE_REFUSALS)


def _detokenize_body(raw: dict[str, Any]) -> DetokenizeRequest:
    return parse(raw, DetokenizeRequest)


async def _tokenize_text(state: AppState, body: TokenizeTextRequest) -> TokenizeResponse:
    model = state.host.find(body.model)
    refuse_endless(body.prompt, "prompt")

    def work() -> TokenizeResponse:
        ids = model.tokenizer.encode(body.prompt, add_special_tokens=body.add_special_tokens is not False)
        return _response(model, ids, body.return_token_strs)

    return await state.off_loop(work, len(body.prompt))


async def _tokenize_chat(state: AppState, body: TokenizeChatRequest) -> TokenizeResponse:
    model = state.host.find(body.model)

    def work() -> TokenizeResponse:
        text = render_chat(
            model,
            body.messages,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            tools=body.tools,
            documents=body.documents,
            template_kwargs=body.chat_template_kwargs,
        )
        refuse_endless(text, "messages")
        ids = model.tokenizer.encode(text, add_special_tokens=bool(body.add_special_tokens))
        return _response(model, ids, body.return_token_strs)

    # Never on the event loop: how long a template takes cannot be told from what it is given.
    return await state.in_thread(work)


def _response(model: ServedModel, ids: list[int], with_strs: bool | None) -> TokenizeResponse:
    strs = [model.tokenizer.token_text(token) for token in ids] if with_strs else None
    return TokenizeResponse(count=len(ids), max_model_len=model.max_model_len, tokens=ids, token_strs=strs)

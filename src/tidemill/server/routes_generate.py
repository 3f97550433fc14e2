"""POST /v1/chat/completions and /v1/completions: read, prepare, then answer whole or as a stream."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from tidemill.errors import ContextTooLong
from tidemill.server import chat_answers, completion_answers
from tidemill.server.body import parse, read_body
from tidemill.server.conversation import render_chat
from tidemill.server.generation import Work, plan_work, unless_client_leaves
from tidemill.server.openapi import body_of, responses
from tidemill.server.prompts import Prompt, encode_within, split_prompts, tokenize_all
from tidemill.server.refusals import CHAT_REFUSALS, COMPLETION_REFUSALS
from tidemill.server.sampling import chat_params, completion_params, refuse_stream_conflicts
from tidemill.server.schemas_chat import ChatCompletion, ChatCompletionRequest
from tidemill.server.schemas_completion import Completion, CompletionRequest
from tidemill.server.sse import open_stream
from tidemill.server.state import AppState


def generation_routes(state: AppState) -> APIRouter:
    router = APIRouter(tags=["generation"])

    @router.post(
        "/v1/chat/completions",
        summary="Continue a conversation",
        response_class=Response,
        openapi_extra=body_of(ChatCompletionRequest),
        responses=responses(ChatCompletion, 400, 401, 404, 413, 429, 500, 503, streams=True),
    )
    async def create_chat_completion(request: Request) -> Response:
        body = await read_body(state, request, _chat_body)
        try:
            work = await _chat_work(state, request, body)
            if body.stream:
                return await open_stream(request.receive, chat_answers.chunks(state, work, body))
            return await _answer(request, chat_answers.whole(state, work, body))
        except ContextTooLong as problem:
            raise _in_chat_words(problem, body) from None

    @router.post(
        "/v1/completions",
        summary="Continue a text",
        response_class=Response,
        openapi_extra=body_of(CompletionRequest),
        responses=responses(Completion, 400, 401, 404, 413, 429, 500, 503, streams=True),
    )
    async def create_completion(request: Request) -> Response:
        body = await read_body(state, request, _completion_body)
        work = await _completion_work(state, request, body)
        if body.stream:
            return await open_stream(request.receive, completion_answers.chunks(state, work, body))
        return await _answer(request, completion_answers.whole(state, work, body))

    return router


def _chat_body(raw: dict[str, Any]) -> ChatCompletionRequest:
    return parse(raw, ChatCompletionRequest, CHAT_REFUSALS)


def _completion_body(raw: dict[str, Any]) -> CompletionRequest:
    return parse(raw, CompletionRequest, COMPLETION_REFUSALS)


def _in_chat_words(problem: ContextTooLong, body: ChatCompletionRequest) -> ContextTooLong:
    """The engine knows a prompt and max_tokens; here the problem names the fields the caller wrote."""
    message, param = problem.message, problem.param
    if param == "prompt":
        param = "messages"
    elif param == "max_tokens" and body.max_completion_tokens is not None:
        param = "max_completion_tokens"
        message = message.replace("max_tokens", param)
    return ContextTooLong(message, param=param, cause=problem.cause, fix=problem.fix)


async def _chat_work(state: AppState, request: Request, body: ChatCompletionRequest) -> Work:
    model = state.host.find(body.model)
    refuse_stream_conflicts(body)
    params = chat_params(body, model)

    def prepare() -> Prompt:
        text = render_chat(
            model,
            body.messages,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            tools=body.tools,
            documents=body.documents,
            template_kwargs=body.chat_template_kwargs,
        )
        # The template has already written the special tokens, so the tokenizer adds none unless asked to.
        ids = encode_within(
            model,
            text,
            add_special_tokens=bool(body.add_special_tokens),
            truncates=body.truncate_prompt_tokens is not None,
            param="messages",
        )
        return Prompt(ids, text)

    # Never on the event loop: how long a template takes cannot be told from what it is given.
    prompt = await state.in_thread(prepare)
    return plan_work(state, "chatcmpl", request, body, model, [prompt], params)


async def _completion_work(state: AppState, request: Request, body: CompletionRequest) -> Work:
    model = state.host.find(body.model)
    refuse_stream_conflicts(body)
    params = completion_params(body, model)
    prompts = await tokenize_all(
        state,
        model,
        split_prompts(body.prompt),
        add_special_tokens=body.add_special_tokens is not False,
        truncates=body.truncate_prompt_tokens is not None,
        param="prompt",
    )
    return plan_work(state, "cmpl", request, body, model, prompts, params)


async def _answer(request: Request, answer: Coroutine[Any, Any, dict[str, Any]]) -> Response:
    result = await unless_client_leaves(request.receive, answer)
    return Response(msgspec.json.encode(result), media_type="application/json")

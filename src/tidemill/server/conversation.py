"""From the messages of a chat to the one text the model continues.

Knows what a chat template expects; the template itself, and the tokenizer, belong to `text/`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tidemill.errors import InvalidRequest, TidemillError, UnsupportedParameter
from tidemill.server.schemas_chat import ContentPart, Message, ToolCall
from tidemill.text.chat_input import check_content

if TYPE_CHECKING:
    from tidemill.engine.host import ServedModel
    from tidemill.text.chat import ChatTemplate


def render_chat(
    model: ServedModel,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool | None = None,
    continue_final_message: bool | None = None,
    tools: list[dict[str, Any]] | None = None,
    documents: list[dict[str, Any]] | None = None,
    template_kwargs: dict[str, Any] | None = None,
) -> str:
    template = model.chat_template
    if template is None:
        raise InvalidRequest(
            f"the model {model.names[0]!r} has no chat template, so it cannot chat",
            param="messages",
            fix="use /v1/completions, or start the server with --chat-template",
        )
    if not messages:
        raise InvalidRequest("messages must hold at least one message", param="messages")
    kwargs = template_kwargs or {}
    turns = [_turn(message, f"messages[{i}]", template) for i, message in enumerate(messages)]
    template.refuse_unread(turns, tools=tools, documents=documents, kwargs=kwargs)
    opens_turn = add_generation_prompt if add_generation_prompt is not None else not continue_final_message
    try:
        return template.render(
            turns,
            add_generation_prompt=opens_turn,
            continue_final_message=bool(continue_final_message),
            tools=tools or None,
            documents=documents,
            kwargs=kwargs,
        )
    except TidemillError:
        raise
    except Exception as error:
        # A template is a program over the caller's messages: whatever it raises, it was the messages it did not take.
        raise InvalidRequest(f"the chat template does not take these messages: {error}", param="messages") from error


def _turn(message: Message, path: str, template: ChatTemplate) -> dict[str, Any]:
    """One message as templates know it: text or text parts, parsed tool arguments, no empty fields."""
    role: str = message.role
    if role == "developer" and not template.mentions(role):
        # What newer clients call `developer` is `system` to the templates of most models.
        role = "system"
    turn: dict[str, Any] = {"role": role, "content": _content(message, path)}
    for name in ("name", "tool_call_id", "reasoning_content", "reasoning"):
        if (value := getattr(message, name)) is not None:
            turn[name] = value
    if message.tool_calls:
        turn["tool_calls"] = [_tool_call(call, f"{path}.tool_calls[{i}]") for i, call in enumerate(message.tool_calls)]
    return turn


def _content(message: Message, path: str) -> str | list[dict[str, Any]]:
    content = message.content
    if content is None:
        check_content(content, message.role == "assistant" and bool(message.tool_calls), path)
        return ""
    if isinstance(content, str):
        return content
    return [_text_part(part, f"{path}.content[{i}]") for i, part in enumerate(content)]


def _text_part(part: ContentPart, path: str) -> dict[str, Any]:
    if part.type != "text":
        raise UnsupportedParameter(
            f"{path} has type {part.type[:40]!r}, but the model reads text only", param=f"{path}.type"
        )
    if part.text is None:
        raise InvalidRequest(f"{path}.text is required", param=f"{path}.text")
    return {"type": "text", "text": part.text}


def _tool_call(call: ToolCall, path: str) -> dict[str, Any]:
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        name = f"{path}.function.arguments"
        raise InvalidRequest(f"{name} should be a JSON object, as text", param=name)
    return {"id": call.id, "type": call.type, "function": {"name": call.function.name, "arguments": arguments}}

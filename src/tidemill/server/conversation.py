"""From the messages of a chat to the one text the model continues.

Knows what a chat template expects; the template itself, and the tokenizer, belong to `text/`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tidemill.errors import InvalidRequest, TidemillError, UnsupportedParameter
from tidemill.server.schemas_chat import ContentPart, Message, ToolCall

if TYPE_CHECKING:
    from tidemill.engine.host import ServedModel
    from tidemill.text.chat import ChatTemplate

RESERVED_KWARGS = frozenset(
    {"messages", "add_generation_prompt", "continue_final_message", "tools", "documents", "self", "tokenize"}
)


# What a template writes around a message, and the time it takes, are about those of so many characters.
CHARS_PER_MESSAGE = 32


def count_chars(messages: Sequence[Message]) -> int:
    """Roughly how much text there is, to decide where to work on it."""
    total = CHARS_PER_MESSAGE * len(messages)
    for message in messages:
        if isinstance(message.content, str):
            total += len(message.content)
        else:
            total += sum(CHARS_PER_MESSAGE + len(part.text or "") for part in message.content or ())
    return total


def render_chat(
    model: ServedModel,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool | None = None,
    continue_final_message: bool | None = None,
    documents: list[dict[str, Any]] | None = None,
    template_kwargs: dict[str, Any] | None = None,
) -> str:
    if model.chat_template is None:
        raise InvalidRequest(
            f"the model {model.names[0]!r} has no chat template, so it cannot chat",
            param="messages",
            fix="use /v1/completions, or start the server with --chat-template",
        )
    if not messages:
        raise InvalidRequest("messages must hold at least one message", param="messages")
    if continue_final_message and add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt exclude each other", param="continue_final_message"
        )
    kwargs = template_kwargs or {}
    if reserved := RESERVED_KWARGS & kwargs.keys():
        raise InvalidRequest(
            f"chat_template_kwargs cannot set {', '.join(sorted(reserved))}", param="chat_template_kwargs"
        )
    _refuse_unread(model.chat_template, documents, kwargs)
    turns = [_turn(message, f"messages[{i}]") for i, message in enumerate(messages)]
    opens_turn = add_generation_prompt if add_generation_prompt is not None else not continue_final_message
    try:
        return model.chat_template.render(
            turns,
            add_generation_prompt=opens_turn,
            continue_final_message=bool(continue_final_message),
            documents=documents,
            **kwargs,
        )
    except TidemillError:
        raise
    except Exception as error:
        # A template is a program over the caller's messages: whatever it raises, it was the messages it did not take.
        raise InvalidRequest(f"the chat template does not take these messages: {error}", param="messages") from error


def _refuse_unread(template: ChatTemplate, documents: list[dict[str, Any]] | None, kwargs: dict[str, Any]) -> None:
    """What the template never reads would be ignored without a word."""
    if documents and "documents" not in template.variables:
        raise UnsupportedParameter(
            "documents are not read by this model's chat template", param="documents", fix="put them into a message"
        )
    for name in kwargs:
        if name not in template.variables:
            known = sorted(template.variables - RESERVED_KWARGS - template.special_tokens.keys())
            raise UnsupportedParameter(
                f"chat_template_kwargs: this model's chat template does not read {name[:60]!r}",
                param=f"chat_template_kwargs.{name[:60]}",
                fix=f"it reads {', '.join(known)}" if known else "leave chat_template_kwargs out",
            )


def _turn(message: Message, path: str) -> dict[str, Any]:
    """One message as templates know it: string content, parsed tool arguments, no empty fields."""
    turn: dict[str, Any] = {
        # `developer` is what newer clients call `system`; templates of open models know only the latter.
        "role": "system" if message.role == "developer" else message.role,
        "content": _text(message, path),
    }
    if message.name is not None:
        turn["name"] = message.name
    if message.tool_call_id is not None:
        turn["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        turn["tool_calls"] = [_tool_call(call, f"{path}.tool_calls[{i}]") for i, call in enumerate(message.tool_calls)]
    return turn


def _text(message: Message, path: str) -> str:
    content = message.content
    if content is None:
        if message.role == "assistant" and message.tool_calls:
            return ""
        raise InvalidRequest(f"{path}.content is required", param=f"{path}.content")
    if isinstance(content, str):
        return content
    return "\n".join(_part_text(part, f"{path}.content[{i}]") for i, part in enumerate(content))


def _part_text(part: ContentPart, path: str) -> str:
    if part.type != "text":
        raise UnsupportedParameter(
            f"{path} has type {part.type[:40]!r}, but the model reads text only", param=f"{path}.type"
        )
    if part.text is None:
        raise InvalidRequest(f"{path}.text is required", param=f"{path}.text")
    return part.text


def _tool_call(call: ToolCall, path: str) -> dict[str, Any]:
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        name = f"{path}.function.arguments"
        raise InvalidRequest(f"{name} should be a JSON object, as text", param=name)
    return {"id": call.id, "type": call.type, "function": {"name": call.function.name, "arguments": arguments}}

"""What a chat may be made of, checked before a template sees it: a template would print whatever it is given.

Over HTTP the schemas see to most of this; from Python anything may come. Content is checked here for both. Does not
know templates: what one reads is its own word.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tidemill.errors import InvalidRequest
from tidemill.text.chat import text_of
from tidemill.text.template_environment import plain


def as_sequence(value: Any, param: str) -> Sequence[Any]:
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Sequence):
        raise InvalidRequest(f"{param} must be a list, got {type(value).__name__}", param=param)
    return value


def split_conversations(messages: Any) -> list[Sequence[Any]]:
    """One conversation is a list of messages, several are a list of such lists."""
    given = as_sequence(messages, "messages")
    if given and isinstance(given[0], list | tuple):
        return [as_sequence(conversation, f"messages[{index}]") for index, conversation in enumerate(given)]
    return [given] if given else []


def check_messages(messages: Sequence[Any]) -> None:
    if not messages:
        raise InvalidRequest("messages must hold at least one message", param="messages")
    for index, message in enumerate(messages):
        path = f"messages[{index}]"
        fields = _plain(message, path)
        if not isinstance(fields, dict):
            raise InvalidRequest(
                f"{path} must be an object with role and content, got {type(message).__name__}",
                param=path,
                fix='{"role": "user", "content": "..."}',
            )
        if not isinstance(fields.get("role"), str):
            raise InvalidRequest(f"{path}.role must be a text such as user", param=f"{path}.role")
        check_content(fields.get("content"), bool(fields.get("tool_calls")), path)
        check_objects(fields.get("tool_calls"), f"{path}.tool_calls")


def check_content(content: Any, has_calls: bool, path: str) -> None:
    """A text, or a list of text parts; nothing only beside tool calls."""
    if isinstance(content, list):
        for part in content:
            text_of(part)
    elif content is None and not has_calls:
        raise InvalidRequest(f"{path}.content is required", param=f"{path}.content")
    elif content is not None and not isinstance(content, str):
        raise InvalidRequest(
            f"{path}.content must be a text or a list of text parts, got {type(content).__name__}",
            param=f"{path}.content",
        )


def check_objects(value: Any, param: str) -> None:
    if value is None:
        return
    for index, item in enumerate(as_sequence(value, param)):
        if not isinstance(_plain(item, f"{param}[{index}]"), dict):
            raise InvalidRequest(
                f"{param}[{index}] must be an object, got {type(item).__name__}", param=f"{param}[{index}]"
            )


def check_keywords(kwargs: Any) -> None:
    if kwargs is None:
        return
    if not isinstance(kwargs, Mapping) or not all(isinstance(name, str) for name in kwargs):
        raise InvalidRequest("chat_template_kwargs must be values by name", param="chat_template_kwargs")
    _plain(kwargs, "chat_template_kwargs")


def _plain(value: Any, param: str) -> Any:
    try:
        return plain(value)
    except RecursionError:
        raise InvalidRequest(f"{param} contains itself, or is nested too deep", param=param) from None

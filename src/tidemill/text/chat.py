"""Chat templates: messages in, prompt text out, exactly as transformers renders them.

Brings the messages into the shape a template takes (text or parts, names of reasoning, arguments of calls) and refuses
what it would ignore. Where models keep their templates is known by `chat_files`, what a template reads by
`template_reading`. Does not know tokens or HTTP.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jinja2

from tidemill.errors import InvalidRequest, UnsupportedParameter
from tidemill.text.template_budget import BudgetExceeded
from tidemill.text.template_environment import compile_template, plain, render
from tidemill.text.template_reading import ContentFormat, Reading, read_template

Messages = Sequence[Mapping[str, Any]]
Objects = Sequence[Mapping[str, Any]]

DEFAULT, TOOL_USE = "default", "tool_use"
RESERVED_KWARGS = frozenset(
    {"messages", "add_generation_prompt", "continue_final_message", "tools", "documents", "self", "tokenize"}
)
# Put at the end of the message to continue, and looked for in the rendered text to know where to cut.
_CONTINUE_MARK = "CONTINUE_FINAL_MESSAGE_TAG "
_REASONING = ("reasoning_content", "thinking", "reasoning")
MESSAGE_FIELDS = frozenset({"role", "content", "name", "tool_calls", "tool_call_id", *_REASONING})


@dataclass(frozen=True, slots=True)
class _Compiled:
    source: str
    template: jinja2.Template
    reading: Reading


class ChatTemplate:
    """The compiled templates of a model: one, or several by name, of which `tool_use` is taken when there are tools."""

    def __init__(
        self, templates: str | Mapping[str, str], special_tokens: Mapping[str, str], origin: str = "the model's own"
    ) -> None:
        named = {DEFAULT: templates} if isinstance(templates, str) else dict(templates)
        self._named = {
            name: _Compiled(source, compile_template(source), read_template(source)) for name, source in named.items()
        }
        self._default = self._named.get(DEFAULT) or next(iter(self._named.values()))
        self.special_tokens = dict(special_tokens)
        self.origin = origin

    @property
    def source(self) -> str:
        return self._default.source

    @property
    def sources(self) -> dict[str, str]:
        return {name: one.source for name, one in self._named.items()}

    @property
    def variables(self) -> frozenset[str]:
        """The names any of the templates reads from outside: whatever else they are given has no effect."""
        return frozenset().union(*(one.reading.variables for one in self._named.values()))

    @property
    def content_format(self) -> ContentFormat:
        return self._default.reading.content_format

    def mentions(self, text: str) -> bool:
        return any(text in one.source for one in self._named.values())

    @property
    def keywords(self) -> list[str]:
        """What chat_template_kwargs may set."""
        return sorted(self.variables - RESERVED_KWARGS - self.special_tokens.keys())

    def render(
        self,
        messages: Messages,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool | str = False,
        tools: Objects | None = None,
        documents: Objects | None = None,
        content_format: ContentFormat | Literal["auto"] = "auto",
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt. `kwargs` are further variables of the template (enable_thinking and the like).

        `continue_final_message` may name the field to continue, as in transformers: "reasoning_content".
        """
        chosen = self._chosen(tools)
        chat = [_shaped(plain(message), chosen.reading, content_format) for message in messages]
        field = continue_final_message if isinstance(continue_final_message, str) else "content"
        final = ""
        if continue_final_message:
            if add_generation_prompt:
                raise InvalidRequest(
                    "continue_final_message and add_generation_prompt exclude each other",
                    param="continue_final_message",
                    fix="set add_generation_prompt to false",
                )
            final = _mark_end(chat, field)
        variables = plain({**self.special_tokens, **(kwargs or {}), "tools": tools, "documents": documents})
        variables["add_generation_prompt"] = add_generation_prompt
        try:
            text = _rendered(chosen.template, chat, variables)
        except BudgetExceeded as error:
            raise InvalidRequest(
                f"the chat template ({self.origin}) was stopped while it rendered these messages: {error}",
                param="messages",
                cause=str(error),
                fix="send fewer or shorter messages, or start the server with another --chat-template",
            ) from error
        except jinja2.TemplateError as error:
            raise InvalidRequest(
                f"the chat template refuses these messages: {error}",
                param="messages",
                cause=str(error),
                fix="change the messages as the template asks, or start the server with another --chat-template",
            ) from error
        except Exception as error:
            # Anything else is a template tripping over data it did not expect: a missing field, a wrong type.
            raise InvalidRequest(
                f"the chat template cannot render these messages: {type(error).__name__}: {error}",
                param="messages",
                cause=f"{type(error).__name__}: {error}",
                fix="check roles and content of the messages, or start the server with another --chat-template",
            ) from error
        return _cut_at_mark(text, final) if continue_final_message else text

    def refuse_unread(
        self,
        messages: Messages = (),
        *,
        tools: Objects | None = None,
        documents: Objects | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Raises for what the template never reads: it would be ignored without a word."""
        reading = self._chosen(tools or None).reading
        for name, given in (("tools", tools), ("documents", documents)):
            if given and name not in reading.variables:
                raise UnsupportedParameter(
                    f"{name} are not read by this model's chat template", param=name, fix=self._fix_for(name)
                )
        for name in kwargs or {}:
            _refuse_reserved(name)
            if name not in reading.variables:
                known = ", ".join(self.keywords)
                raise UnsupportedParameter(
                    f"chat_template_kwargs: this model's chat template does not read {name[:60]!r}",
                    param=f"chat_template_kwargs.{name[:60]}",
                    fix=f"it reads {known}" if known else "leave chat_template_kwargs out",
                )
        for index, message in enumerate(messages):
            _refuse_unread_fields(message, reading, f"messages[{index}]")

    def _chosen(self, tools: Objects | None) -> _Compiled:
        return self._named.get(TOOL_USE, self._default) if tools is not None else self._default

    def _fix_for(self, name: str) -> str:
        able = [other for other, one in self._named.items() if name in one.reading.variables]
        if able:
            return f"start the server with --chat-template {able[0]}, which is another of the model's templates"
        return f"write them into a message, or start the server with a --chat-template that reads {name}"


def _rendered(template: jinja2.Template, chat: list[dict[str, Any]], variables: dict[str, Any]) -> str:
    try:
        return render(template, {**variables, "messages": chat})
    except TypeError:
        # Templates take the arguments of a call as an object, as transformers documents; a few (DeepSeek's) take the
        # JSON text, and adding an object to a text is a TypeError.
        as_text = [_with_arguments_as_text(message) for message in chat]
        if as_text == chat:
            raise
        return render(template, {**variables, "messages": as_text})


def _with_arguments_as_text(message: dict[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [_call_with_text(call) for call in calls]}


def _call_with_text(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), dict):
        return call
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}


def _shaped(message: dict[str, Any], reading: Reading, content_format: str) -> dict[str, Any]:
    """The message with content in the shape the template takes and reasoning under the names it may look for."""
    reasoning = next((message[name] for name in _REASONING if message.get(name) is not None), None)
    if reasoning is not None:
        message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
    content = message.get("content")
    wanted = reading.content_format if content_format == "auto" else content_format
    if wanted == "string" and isinstance(content, list):
        return {**message, "content": "\n".join(map(text_of, content))}
    takes_text = content_format == "auto" and reading.tells_text_from_parts
    if wanted == "openai" and isinstance(content, str) and not takes_text:
        return {**message, "content": [{"type": "text", "text": content}]}
    return message


def text_of(part: Any) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(text := part.get("text"), str):
        return text
    raise InvalidRequest(
        f"content parts must be {{'type': 'text', 'text': ...}} for a text model, got {part!r:.80}", param="messages"
    )


def _refuse_reserved(name: str) -> None:
    if name in RESERVED_KWARGS:
        raise InvalidRequest(
            f"chat_template_kwargs cannot set {name}", param="chat_template_kwargs", fix=f"send {name} beside it"
        )


def _refuse_unread_fields(message: Mapping[str, Any], reading: Reading, path: str) -> None:
    if message.get("tool_calls") and "tool_calls" not in reading.words:
        raise UnsupportedParameter(
            f"{path}.tool_calls are not read by this model's chat template, so the model would not see them",
            param=f"{path}.tool_calls",
            fix="write the calls into the message's content",
        )
    unknown = [name for name in message if name not in MESSAGE_FIELDS and message[name] not in (None, [], {})]
    for name in unknown:
        if name not in reading.words:
            raise UnsupportedParameter(
                f"{path}.{str(name)[:60]} is not read by this model's chat template",
                param=f"{path}.{str(name)[:60]}",
                fix="leave it out, or write it into the message's content",
            )
    given = next((name for name in _REASONING if message.get(name)), None)
    if given is not None and not reading.words.intersection(_REASONING):
        raise UnsupportedParameter(
            f"{path}.{given} is not read by this model's chat template, so the model would not see it",
            param=f"{path}.{given}",
            fix="leave it out, or write it into the message's content",
        )


def _mark_end(chat: list[dict[str, Any]], field: str) -> str:
    """Marks the end of the last message's text and returns that text."""
    last = chat[-1] if chat else {}
    value = last.get(field)
    if isinstance(value, str):
        # Reasoning stands there under several names, and the template reads one of them.
        same = [name for name in _REASONING if last.get(name) == value] if field in _REASONING else [field]
        for name in same:
            last[name] = value + _CONTINUE_MARK
        return value
    if isinstance(value, list):
        for part in reversed(value):
            if isinstance(part, dict) and isinstance(part.get("text"), str):
                text: str = part["text"]
                part["text"] = text + _CONTINUE_MARK
                return text
    raise InvalidRequest(
        "continue_final_message needs a final message with text to continue",
        param="continue_final_message",
        fix=f"end the messages with an assistant message that has {field}",
    )


def _cut_at_mark(text: str, final: str) -> str:
    at = text.rfind(_CONTINUE_MARK.strip())
    if at < 0 or final.strip() not in text:
        raise InvalidRequest(
            "continue_final_message cannot work with this chat template: it drops the final message",
            param="continue_final_message",
            fix="leave continue_final_message out, or start the server with another --chat-template",
        )
    # Where the template trims its messages, the space before the cut is its own.
    kept = text[at : at + len(_CONTINUE_MARK)] == _CONTINUE_MARK
    return text[:at] if kept else text[:at].rstrip()

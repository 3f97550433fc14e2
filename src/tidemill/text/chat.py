"""Chat templates: messages in, prompt text out, exactly as transformers renders them.

Templates come with models and are not trusted: they run in jinja2's immutable sandbox and see plain data only. Knows
where models keep their templates; does not know tokens, tools formats or HTTP.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tidemill.errors import BadCheckpoint, ConfigError, InvalidRequest
from tidemill.text.tokenizer_files import folder_special_tokens, tokenizer_config
from tidemill.weights.json_file import read_json
from tidemill.weights.location import ModelFiles

# Put at the end of the message to continue, and looked for in the rendered text to know where to cut.
_CONTINUE_MARK = "CONTINUE_FINAL_MESSAGE_TAG "
_REASONING = ("reasoning_content", "thinking", "reasoning")


class ChatTemplate:
    """A compiled template, and the one for tool use where a model has two."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], tool_source: str | None = None) -> None:
        self.source = source
        self.special_tokens = dict(special_tokens)
        self._template = _compile(source)
        self._tool_template = None if tool_source is None else _compile(tool_source)
        self.variables: frozenset[str] = frozenset().union(
            *(_variables(text) for text in (source, tool_source) if text is not None)
        )
        """The names a template reads from outside: whatever else it is given has no effect."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt. `kwargs` reach the template (enable_thinking and the like)."""
        chat = [_with_reasoning_names(message) for message in messages]
        final = ""
        if continue_final_message:
            if add_generation_prompt:
                raise InvalidRequest(
                    "continue_final_message and add_generation_prompt exclude each other",
                    param="continue_final_message",
                    fix="set add_generation_prompt to false",
                )
            final = _mark_end(chat)
        template = self._tool_template if tools is not None and self._tool_template is not None else self._template
        variables = {**self.special_tokens, **kwargs, "add_generation_prompt": add_generation_prompt}
        try:
            text = template.render(messages=chat, tools=tools, documents=documents, **variables)
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


def plain_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with content parts joined to one text, which is what templates of text models take."""
    content = message.get("content")
    if not isinstance(content, list):
        return dict(message)
    texts = []
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise InvalidRequest(
                f"content parts must be {{'type': 'text', 'text': ...}} for a text model, got {part!r:.80}",
                param="messages",
            )
        texts.append(part["text"])
    return {**message, "content": "\n".join(texts)}


def load_chat_template(files: ModelFiles, override: str | None = None) -> ChatTemplate | None:
    """The template given by the user (a file, or the text itself), else the model's own, else None."""
    if files.kind == "gguf":
        from tidemill.text.gguf_tokenizer import special_tokens_of
        from tidemill.weights.gguf_file import read_gguf

        metadata = read_gguf(files.path).metadata
        named, special = _gguf_templates(metadata), special_tokens_of(metadata)
    else:
        named, special = _folder_templates(files.path), folder_special_tokens(files.path)
    if override is not None:
        return ChatTemplate(_override_source(override), special)
    source = named.get("default") or next(iter(named.values()), None)
    return None if source is None else ChatTemplate(source, special, named.get("tool_use"))


def _folder_templates(folder: Path) -> dict[str, str]:
    """Template by name. Separate files are newer than the entry in tokenizer_config.json and win over it."""
    templates: dict[str, str] = {}
    if (folder / "chat_template.jinja").is_file():
        templates["default"] = _read(folder / "chat_template.jinja")
        for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
            templates[path.stem] = _read(path)
        return templates
    value = read_json(folder / "chat_template.json").get("chat_template")
    value = value or tokenizer_config(folder).get("chat_template")
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list):
        return {entry["name"]: entry["template"] for entry in value}
    return dict(value) if isinstance(value, dict) else {}


def _gguf_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    prefix = "tokenizer.chat_template"
    named = {key[len(prefix) + 1 :]: text for key, text in metadata.items() if key.startswith(f"{prefix}.")}
    return {"default": metadata[prefix], **named} if prefix in metadata else named


def _override_source(override: str) -> str:
    """Text holds a tag or a line break; anything else is meant as a path."""
    if any(sign in override for sign in ("{{", "{%", "\n")):
        return override
    path = Path(override).expanduser()
    if not path.is_file():
        raise ConfigError(
            f"no chat template at {override}",
            param="chat_template",
            cause=f"{path.absolute()} is not a file, and the value is not a template either",
            fix="--chat-template path/to/template.jinja",
        )
    return _read(path)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadCheckpoint(f"{path} cannot be read", cause=str(error), fix="check the file") from error


def _variables(source: str) -> set[str]:
    environment = _environment()
    return meta.find_undeclared_variables(environment.parse(source)) - environment.globals.keys()


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _compile(source: str) -> jinja2.Template:
    try:
        return _environment().from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(
            f"the chat template has a syntax error on line {error.lineno}: {error.message}",
            param="chat_template",
            cause=f"{error.message} (line {error.lineno})",
            fix="correct it, or pass another one: --chat-template path/to/template.jinja",
        ) from error


class _GenerationTag(Extension):
    """Accepts {% generation %}...{% endgeneration %}, which marks assistant text for training, as plain text."""

    tags = {"generation"}  # noqa: RUF012 - the type is jinja2's

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_render"), [], [], body).set_lineno(line)

    def _render(self, caller: Any) -> str:
        return str(caller())


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes HTML, which no model was trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _with_reasoning_names(message: Mapping[str, Any]) -> dict[str, Any]:
    """Reasoning travels under three names; templates read one or the other."""
    plain = dict(message)
    reasoning = next((plain[name] for name in _REASONING if plain.get(name) is not None), None)
    return plain if reasoning is None else {"thinking": reasoning, **plain, "reasoning_content": reasoning}


def _mark_end(chat: list[dict[str, Any]]) -> str:
    """Marks the end of the last message's text and returns that text."""
    content = chat[-1].get("content") if chat else None
    if isinstance(content, str):
        chat[-1]["content"] = content + _CONTINUE_MARK
        return content
    if isinstance(content, (list, tuple)):
        parts = [dict(part) if isinstance(part, Mapping) else part for part in content]
        for part in reversed(parts):
            if isinstance(part, dict) and isinstance(part.get("text"), str):
                text: str = part["text"]
                part["text"] = text + _CONTINUE_MARK
                chat[-1]["content"] = parts
                return text
    raise InvalidRequest(
        "continue_final_message needs a final message with text to continue",
        param="continue_final_message",
        fix="end the messages with an assistant message that has content",
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

"""Where models keep their chat templates: files of their own, tokenizer_config.json, GGUF metadata, or Mistral's code.

Gives a `ChatTemplate`, or None where there is none. Does not render, and does not read tokenizers: the special tokens
a template may write are handed in.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tidemill.errors import BadCheckpoint, ConfigError
from tidemill.text.chat import DEFAULT, ChatTemplate
from tidemill.text.tekken_file import TEKKEN_FILE
from tidemill.text.tokenizer_files import tokenizer_config
from tidemill.weights.json_file import read_json
from tidemill.weights.lfs import refuse_lfs_pointer
from tidemill.weights.location import ModelFiles

logger = logging.getLogger(__name__)

Templates = dict[str, str]


def load_chat_template(
    places: Sequence[ModelFiles], special_tokens: Mapping[str, str], override: str | None = None
) -> ChatTemplate | None:
    """The template the user gives, else the model's own; of several places the first that has one counts."""
    if override is not None and _is_source(override):
        return ChatTemplate(_override_source(override), special_tokens, _asked(override))
    # A name may be meant, so the model's own are read; compiled is only what is used, for another may be broken.
    named, origin = _first_templates(places)
    if override is not None:
        return _chosen(override, named, origin, special_tokens)
    return ChatTemplate(named, special_tokens, origin) if named else None


def given_template(override: str, special_tokens: Mapping[str, str], own: ChatTemplate | None) -> ChatTemplate:
    """A file, the text of a template, or the name of one of the model's."""
    return _chosen(override, {} if own is None else own.sources, "" if own is None else own.origin, special_tokens)


def _asked(override: str) -> str:
    return "as asked for" if _is_text(override) else f"{Path(override).name}, as asked for"


def _is_source(override: str) -> bool:
    """Whether it is the text of a template or a file that is there, so that the model's own do not matter."""
    return _is_text(override) or Path(override).expanduser().is_file()


def _chosen(override: str, named: Templates, origin: str, special_tokens: Mapping[str, str]) -> ChatTemplate:
    if override in named:
        return ChatTemplate({**named, DEFAULT: named[override]}, special_tokens, f"{override!r} of {origin}")
    return ChatTemplate(_override_source(override, named), special_tokens, _asked(override))


def _first_templates(places: Sequence[ModelFiles]) -> tuple[Templates, str]:
    for files in dict.fromkeys(places):
        named, origin = _gguf_templates(files.path) if files.kind == "gguf" else _folder_templates(files.path)
        if named:
            return named, origin
    return {}, ""


def _folder_templates(folder: Path) -> tuple[Templates, str]:
    """Template by name, and what they were read from. Separate files are newer than tokenizer_config.json and win."""
    if (folder / "chat_template.jinja").is_file():
        templates = {DEFAULT: _read(folder / "chat_template.jinja")}
        for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
            templates[path.stem] = _read(path)
        return templates, "chat_template.jinja"
    for file, config in (
        ("chat_template.json", read_json(folder / "chat_template.json")),
        ("tokenizer_config.json", tokenizer_config(folder)),
    ):
        if named := _by_name(config.get("chat_template"), folder / file):
            return named, file
    if (folder / TEKKEN_FILE).is_file():
        return _mistral_template(folder / TEKKEN_FILE), "mistral-common, for the version of tekken.json"
    return {}, ""


def _by_name(value: Any, path: Path) -> Templates:
    """One template is a text; several are a list of names and templates, or an object."""
    if isinstance(value, str):
        return {DEFAULT: value} if value else {}
    try:
        named = {entry["name"]: entry["template"] for entry in value} if isinstance(value, list) else dict(value or {})
    except (TypeError, KeyError, ValueError):
        named = {"": None}
    if not all(isinstance(text, str) for text in named.values()):
        raise BadCheckpoint(
            f"{path} holds a chat_template that is neither a text nor texts by name",
            cause="a list of objects with name and template is expected",
            fix="correct it, or pass another one: --chat-template path/to/template.jinja",
        )
    return named


def _gguf_templates(path: Path) -> tuple[Templates, str]:
    from tidemill.weights.gguf_file import read_gguf

    prefix = "tokenizer.chat_template"
    metadata = read_gguf(path).metadata
    named = {key[len(prefix) + 1 :]: text for key, text in metadata.items() if key.startswith(f"{prefix}.")}
    return ({DEFAULT: metadata[prefix], **named} if prefix in metadata else named), "the GGUF file"


def _mistral_template(path: Path) -> Templates:
    """Mistral ships the format of its prompts as code, which its own package also writes as a template."""
    try:
        from mistral_common.integrations.chat_templates.chat_templates import convert_tokenizer_to_chat_template
    except ImportError:
        logger.warning("%s: its chat template is written by a package: pip install mistral-common", path)
        return {}
    try:
        return {DEFAULT: convert_tokenizer_to_chat_template(path)}
    except Exception as error:
        # Without chat the model still completes texts, so a version the package does not know is no reason to stop.
        logger.warning("%s: mistral-common writes no chat template for it: %s", path, error)
        return {}


def _is_text(override: str) -> bool:
    """Text holds a tag or a line break; anything else is meant as a path."""
    return any(sign in override for sign in ("{{", "{%", "\n"))


def _override_source(override: str, named: Iterable[str] = ()) -> str:
    if _is_text(override):
        return override
    path = Path(override).expanduser()
    if not path.is_file():
        names = list(named)
        others = f", nor the name of one of the model's ({', '.join(names)})" if len(names) > 1 else ""
        raise ConfigError(
            f"no chat template at {override}",
            param="chat_template",
            cause=f"{path.absolute()} is not a file, and the value is not a template either{others}",
            fix="--chat-template path/to/template.jinja",
        )
    return _read(path)


def _read(path: Path) -> str:
    refuse_lfs_pointer(path)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadCheckpoint(
            f"{path} cannot be read as text",
            cause=str(error),
            fix="check the file, or pass another one: --chat-template path/to/template.jinja",
        ) from error

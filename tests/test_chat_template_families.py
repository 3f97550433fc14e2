"""Templates in the manner of known families: each conversation is rendered, or refused, as in transformers."""

import json
from functools import cache

import pytest
import tokenizers
from tokenizers import models

from tests.helpers.chat_templates import COMMAND_R, DEEPSEEK, FAMILIES, GRANITE, LLAMA31, MISTRAL, QWEN3, QWEN25
from tidemill.errors import InvalidRequest
from tidemill.text.chat import ChatTemplate

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


def weather(city: str, days: int = 1, hourly: bool | None = None):
    """
    Tells the weather in a <city> & 'around' it.

    Args:
        city: Where, such as "Zürich".
        days: How many days ahead. (choices: [1, 3, 7])
        hourly: Whether to go by hours.
    """


def add(numbers: list[float]) -> float:
    """
    Adds numbers.

    Args:
        numbers: What to add.

    Returns:
        The sum.
    """
    return sum(numbers)


CALL = {"city": "Zürich", "days": 3}


def called(arguments=CALL, content="", count=1):
    calls = [
        {"id": f"call{i:05d}", "type": "function", "function": {"name": "weather", "arguments": arguments}}
        for i in range(count)
    ]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def answered(number=0):
    return {"role": "tool", "name": "weather", "tool_call_id": f"call{number:05d}", "content": '{"sun": true}'}


ASK = {"role": "user", "content": " What's the weather in 東京 <b>&</b> Zürich? \n"}
CHATS = {
    "one turn": [ASK],
    "system": [{"role": "system", "content": " Be brief. "}, ASK],
    "turns": [ASK, {"role": "assistant", "content": " Sunny 👍 "}, {"role": "user", "content": "And\n\nnow?"}],
    "twice a user": [ASK, ASK],
    "assistant first": [{"role": "assistant", "content": "Hello"}, ASK],
    "system in between": [ASK, {"role": "assistant", "content": "ok"}, {"role": "system", "content": "x"}, ASK],
    "thought": [
        ASK,
        {"role": "assistant", "content": "Sunny.", "reasoning_content": "\nLet me think.\n"},
        {"role": "user", "content": "Why?"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nBecause."},
    ],
    "a call": [ASK, called()],
    "a call and its result": [ASK, called(), answered()],
    "a call, its result, an answer": [
        ASK,
        called(content="Let me see."),
        answered(),
        {"role": "assistant", "content": "Sun"},
    ],
    "two calls": [{"role": "system", "content": "S"}, ASK, called(count=2), answered(0), answered(1)],
}


@pytest.fixture(scope="module")
def reference():
    from transformers import PreTrainedTokenizerFast

    backend = tokenizers.Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1}, unk_token="<s>"))
    return PreTrainedTokenizerFast(tokenizer_object=backend, **SPECIAL)


@pytest.fixture(scope="module")
def schemas():
    from transformers.utils import get_json_schema

    return [get_json_schema(weather), get_json_schema(add)]


def theirs(reference, chat, template, **options) -> str | None:
    """None where the template refuses, or trips over, the conversation."""
    try:
        return reference.apply_chat_template(chat, chat_template=template, tokenize=False, **options)
    except Exception:
        return None


@cache
def compiled(template: str) -> ChatTemplate:
    return ChatTemplate(template, SPECIAL)


def ours(chat, template, **options) -> str | None:
    try:
        return compiled(template).render(chat, **options)
    except InvalidRequest:
        return None


@pytest.mark.parametrize("add_generation_prompt", [True, False], ids=["opens a turn", "opens none"])
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_conversation_is_rendered_or_refused_as_in_transformers(reference, family, chat, add_generation_prompt):
    template, messages = FAMILIES[family], CHATS[chat]
    if family == "deepseek":
        # It takes the arguments of a call as text; see below for what happens to objects.
        messages = with_arguments_as_text(messages)
    expected = theirs(reference, messages, template, add_generation_prompt=add_generation_prompt)
    assert ours(messages, template, add_generation_prompt=add_generation_prompt) == expected


def test_the_conversations_tell_the_families_apart(reference):
    """Else the comparison above would hold for templates that do nothing."""
    rendered = {family: [ours(chat, template) for chat in CHATS.values()] for family, template in FAMILIES.items()}
    assert len({tuple(texts) for texts in rendered.values()}) == len(FAMILIES)
    assert all(any(texts) for texts in rendered.values())
    refused = {family for family, texts in rendered.items() if None in texts}
    assert {"mistral", "gemma", "llama 3.1"} <= refused


@pytest.mark.parametrize("chat", ["one turn", "turns", "a call and its result", "two calls"])
@pytest.mark.parametrize("family", ["llama 3.1", "qwen 2.5", "qwen 3", "mistral", "granite"])
def test_tools_are_written_as_in_transformers(reference, schemas, family, chat):
    """transformers is given the functions themselves, which it turns into the schemas given here."""
    expected = theirs(reference, CHATS[chat], FAMILIES[family], tools=[weather, add], add_generation_prompt=True)
    rendered = ours(CHATS[chat], FAMILIES[family], tools=schemas)
    assert rendered == expected
    if rendered is not None:
        assert "Tells the weather in a <city> & 'around' it." in rendered


def test_tools_keep_the_order_they_were_written_in(reference):
    tool = {"function": {"parameters": {"type": "object"}, "name": "late", "description": "d"}, "type": "function"}
    rendered = ours([ASK], QWEN25, tools=[tool])
    assert json.dumps(tool) in rendered
    assert rendered == theirs(reference, [ASK], QWEN25, tools=[tool], add_generation_prompt=True)


@pytest.mark.parametrize(
    ("template", "kwargs"),
    [
        (QWEN3, {"enable_thinking": False}),
        (QWEN3, {"enable_thinking": True}),
        (LLAMA31, {"date_string": "1 Jan 2030"}),
        (LLAMA31, {"tools_in_user_message": False, "custom_tools": [{"name": "own"}]}),
        (GRANITE, {"controls": {"length": "short", "citations": True}}),
        (COMMAND_R["rag"], {"citation_mode": "fast"}),
        (MISTRAL, {"bos_token": "<begin>"}),
    ],
)
def test_keywords_reach_the_template(reference, template, kwargs):
    documents = [{"title": "T", "text": "Tides & mills"}]
    expected = theirs(reference, [ASK], template, documents=documents, add_generation_prompt=True, **kwargs)
    assert expected is not None
    assert ours([ASK], template, documents=documents, kwargs=kwargs) == expected
    assert expected != ours([ASK], template, documents=documents) or kwargs == {"enable_thinking": True}


@pytest.mark.parametrize("template", [GRANITE, COMMAND_R["rag"]], ids=["granite", "command r"])
def test_documents_are_written_as_in_transformers(reference, schemas, template):
    documents = [{"title": "Tide", "text": "It rises.\nIt falls."}, {"title": "Mühle", "text": "Sie <dreht> sich."}]
    for tools in (None, schemas):
        expected = theirs(reference, CHATS["system"], template, documents=documents, tools=tools)
        assert "Sie <dreht> sich." in expected
        options = {"documents": documents, "tools": tools, "add_generation_prompt": False}
        assert ours(CHATS["system"], template, **options) == expected


def test_of_named_templates_tools_choose_tool_use_as_in_transformers(schemas):
    from transformers import PreTrainedTokenizerFast

    backend = tokenizers.Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1}, unk_token="<s>"))
    named = PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=COMMAND_R, **SPECIAL)
    template = ChatTemplate(COMMAND_R, SPECIAL)
    for tools in (None, schemas):
        options = {"tools": tools, "add_generation_prompt": True}
        expected = named.apply_chat_template(CHATS["system"], tokenize=False, **options)
        assert template.render(CHATS["system"], **options) == expected
    assert "def weather(city: str, days: Optional[int] = None" in expected


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"generation"}))
@pytest.mark.parametrize("content", ["Sunny, the", "Sunny ", "Sun\n"])
def test_the_final_message_is_continued_as_in_transformers(reference, family, content):
    chat = [ASK, {"role": "assistant", "content": content}]
    expected = theirs(reference, chat, FAMILIES[family], continue_final_message=True)
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert ours(chat, FAMILIES[family], **options) == expected
    assert expected is not None


def test_reasoning_is_continued_too(reference):
    chat = [ASK, {"role": "assistant", "content": "", "reasoning_content": "Let me see"}]
    expected = theirs(reference, chat, QWEN3, continue_final_message="reasoning_content")
    options = {"add_generation_prompt": False, "continue_final_message": "reasoning_content"}
    assert ours(chat, QWEN3, **options) == expected
    assert expected.endswith("<think>\nLet me see")


def with_arguments_as_text(messages):
    def with_text(call):
        arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        return {**call, "function": {**call["function"], "arguments": arguments}}

    return [
        {**message, "tool_calls": [with_text(call) for call in message["tool_calls"]]}
        if "tool_calls" in message
        else message
        for message in messages
    ]


@pytest.mark.parametrize("chat", ["a call", "a call and its result", "two calls"])
def test_a_template_that_takes_arguments_as_text_gets_them_as_text(reference, chat):
    """Clients send them as text, transformers documents objects, and some templates add them to a text."""
    assert theirs(reference, CHATS[chat], DEEPSEEK) is None
    expected = theirs(reference, with_arguments_as_text(CHATS[chat]), DEEPSEEK)
    assert ours(CHATS[chat], DEEPSEEK, add_generation_prompt=False) == expected
    assert '"Zürich"' in expected

"""Everything a chat template takes, over HTTP: the prompt the model sees is the one transformers writes."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import tokenizers
from tokenizers import models

from tests.helpers.chat_templates import QWEN3
from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.server import start_server

CHAT = "/v1/chat/completions"
DOUBLING = "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}"
ENDLESS = DOUBLING + "{% if endless %}{{ m(40) }}{% endif %}"
TEMPLATE = ENDLESS + "{% if documents %}<docs>{{ documents | tojson(indent=2) }}</docs>{% endif %}" + QWEN3
ASK = {"role": "user", "content": "What is the weather in <Zürich> & 東京?"}
# Not the usual order: what is written into the prompt is what was sent.
FUNCTION = {"parameters": {"type": "object", "properties": {}}, "name": "weather", "description": "Tells & <warns>"}
TOOL = {"function": FUNCTION, "type": "function"}
CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich", "days": 3}}}
RESULT = {"role": "tool", "tool_call_id": "1", "content": '{"sun": true}'}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A small random model that reads and writes the default model's tokens."""
    folder = tmp_path_factory.mktemp("small")
    write_checkpoint(folder, "Llama", vocab_size=49152, max_position_embeddings=2048, eos_token_id=2)
    template = folder / "everything.jinja"
    template.write_text(TEMPLATE)
    flags = ["--tokenizer", "smollm2", "--chat-template", str(template), "--dtype", "float32"]
    with start_server(str(folder), *flags) as server:
        yield server


@pytest.fixture(scope="module")
def http(served):
    with httpx.Client(base_url=served.url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def reference():
    from transformers import PreTrainedTokenizerFast

    backend = tokenizers.Tokenizer(models.WordLevel({"x": 0}, unk_token="x"))
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def prompt_of(http, **body) -> str:
    """The text of the tokens the model was given, after checking that /tokenize says the same."""
    answer = http.post(CHAT, json={"max_tokens": 1, "return_token_ids": True, **body})
    assert answer.status_code == 200, answer.text
    message = answer.json()["choices"][0]["message"]
    assert message["role"] == "assistant" and "tool_calls" not in message
    ids = answer.json()["prompt_token_ids"]
    same = {name: value for name, value in body.items() if name != "tool_choice"}
    assert http.post("/tokenize", json=same).json()["tokens"] == ids
    return http.post("/detokenize", json={"tokens": ids}).json()["prompt"]


def expected(reference, messages, **options) -> str:
    options = {"add_generation_prompt": not options.get("continue_final_message"), **options}
    return reference.apply_chat_template(messages, chat_template=TEMPLATE, tokenize=False, **options)


def problem(http, **body) -> dict:
    response = http.post(CHAT, json={"messages": [ASK], **body})
    assert response.status_code == 400, response.text
    return response.json()["error"]


def test_the_start_says_what_the_template_reads(served):
    (line,) = [line for line in served.output.splitlines() if line.strip().startswith("chat ")]
    assert "reads tools, documents, enable_thinking" in line


def test_tools_are_written_into_the_prompt(http, reference):
    prompt = prompt_of(http, messages=[ASK], tools=[TOOL], tool_choice="none")
    assert prompt == expected(reference, [ASK], tools=[TOOL])
    assert json.dumps(TOOL, ensure_ascii=False) in prompt


def test_calls_and_results_of_the_history(http, reference):
    """Clients send arguments as text; templates are given the object."""
    as_sent = {**CALL, "function": {**CALL["function"], "arguments": json.dumps(CALL["function"]["arguments"])}}
    turns = [ASK, {"role": "assistant", "content": None, "tool_calls": [as_sent]}, RESULT]
    rendered = [ASK, {"role": "assistant", "content": "", "tool_calls": [CALL]}, RESULT]
    prompt = prompt_of(http, messages=turns, tools=[TOOL], tool_choice="none")
    assert prompt == expected(reference, rendered, tools=[TOOL])
    assert '"arguments": {"city": "Zürich", "days": 3}' in prompt
    assert "<tool_response>" in prompt


def test_documents(http, reference):
    documents = [{"title": "Tides", "text": "They rise\nand <fall>."}, {"text": "Zweites"}]
    assert prompt_of(http, messages=[ASK], documents=documents) == expected(reference, [ASK], documents=documents)


@pytest.mark.parametrize("enable_thinking", [True, False])
def test_keywords(http, reference, enable_thinking):
    kwargs = {"enable_thinking": enable_thinking}
    prompt = prompt_of(http, messages=[ASK], chat_template_kwargs=kwargs)
    assert prompt == expected(reference, [ASK], **kwargs)
    assert ("<think>" in prompt) is not enable_thinking


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_reasoning_of_the_history(http, reference, name):
    turns = [ASK, {"role": "assistant", "content": "Sunny.", name: "Let me think."}]
    prompt = prompt_of(http, messages=turns, add_generation_prompt=False)
    assert prompt == expected(reference, turns, add_generation_prompt=False)
    assert "<think>\nLet me think.\n</think>" in prompt


def test_text_parts(http, reference):
    parts = [{"type": "text", "text": "What is"}, {"type": "text", "text": "the weather?"}]
    prompt = prompt_of(http, messages=[{"role": "user", "content": parts}])
    assert prompt == expected(reference, [{"role": "user", "content": "What is\nthe weather?"}])


def test_a_developer_is_the_system_of_templates_that_know_no_developer(http, reference):
    prompt = prompt_of(
        http, messages=[{"role": "developer", "content": "Be brief."}, ASK], tools=[TOOL], tool_choice="none"
    )
    assert prompt == expected(reference, [{"role": "system", "content": "Be brief."}, ASK], tools=[TOOL])


def test_the_final_message_is_continued(http, reference):
    turns = [ASK, {"role": "assistant", "content": "Sunny with a"}]
    prompt = prompt_of(http, messages=turns, continue_final_message=True)
    assert prompt == expected(reference, turns, continue_final_message=True)
    assert prompt.endswith("Sunny with a")


@pytest.mark.parametrize(
    ("choice", "param"),
    [
        ({}, "tools"),
        ({"tool_choice": "auto"}, "tools"),
        ({"tool_choice": "required"}, "tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "weather"}}}, "tools"),
    ],
)
def test_tools_that_would_have_to_be_called_say_what_works(http, choice, param):
    error = problem(http, tools=[TOOL], **choice)
    assert error["param"] == param
    assert error["code"] == "unsupported_parameter"
    assert 'tool_choice "none"' in error["message"]


@pytest.mark.parametrize(
    "tool", [{}, {"type": "function"}, {"type": "function", "function": {}}, {"type": "web", "function": FUNCTION}, 5]
)
def test_a_tool_that_is_none_is_named(http, tool):
    error = problem(http, tools=[TOOL, tool], tool_choice="none")
    assert error["param"] == "tools[1]"


@pytest.mark.parametrize("body", [{"tools": []}, {"tools": [], "tool_choice": "none"}, {"tool_choice": "auto"}])
def test_no_tools_are_no_tools(http, body):
    assert http.post(CHAT, json={"messages": [ASK], "max_tokens": 1, **body}).status_code == 200


def test_a_keyword_the_template_does_not_read(http):
    error = problem(http, chat_template_kwargs={"enable_dreaming": True})
    assert error["param"] == "chat_template_kwargs.enable_dreaming"
    assert "enable_thinking" in error["message"]


def test_continuing_excludes_a_generation_prompt(http):
    error = problem(http, continue_final_message=True, add_generation_prompt=True)
    assert error["param"] == "continue_final_message"
    assert "set add_generation_prompt to false" in error["message"]


def test_a_template_that_never_ends_is_stopped_and_nobody_else_waits(http, served):
    body = {"messages": [ASK], "chat_template_kwargs": {"endless": True}}
    with ThreadPoolExecutor(1) as thread:
        stuck = thread.submit(httpx.post, served.url + CHAT, json=body, timeout=60)
        answered = 0
        while not stuck.done():
            answered += http.get("/health").status_code == 200
    # On the event loop, rendering would let through only what came before it.
    assert answered > 10
    error = stuck.result().json()["error"]
    assert (stuck.result().status_code, error["param"]) == (400, "messages")
    assert "everything.jinja" in error["message"]
    assert "steps" in error["message"] and "--chat-template" in error["message"]
    assert http.post(CHAT, json={"messages": [ASK], "max_tokens": 1}).status_code == 200

"""Bad input over HTTP: each a clear 4xx in OpenAI's shape that names the field, and the server goes on serving."""

from __future__ import annotations

import json

import httpx
import pytest

from tests.helpers.server import private_bytes

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
PROMPT = {"prompt": "Hello", "max_tokens": 1}


@pytest.fixture(scope="module")
def http(server):
    with httpx.Client(base_url=server.url, timeout=120) as client:
        yield client


def problem(response: httpx.Response, status: int) -> dict:
    """The error object, after checking everything that holds for all errors."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    body = response.json()
    assert body.keys() == {"error"}
    error = body["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    assert "Traceback" not in error["message"]
    return error


@pytest.fixture(autouse=True)
def server_still_serves(http):
    yield
    assert http.post(TEXT, json=PROMPT).status_code == 200
    assert http.get("/health").status_code == 200


CHAT_FIELDS = [
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": "Hello"}, "messages"),
    ({"messages": ["Hello"]}, "messages[0]"),
    ({"messages": [{"content": "Hello"}]}, "messages[0].role"),
    ({"messages": [{"role": "wizard", "content": "Hello"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
     "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": "Hello", "mood": "good"}]}, "messages[0].mood"),
    ({"max_completion_tokens": 0, "max_tokens": None}, "max_completion_tokens"),
    ({"max_completion_tokens": 5, "max_tokens": 6}, "max_tokens"),
    ({"max_completion_tokens": 10**9, "max_tokens": None}, "max_completion_tokens"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": 3}, "logprobs"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"enable_dreaming": True}}, "chat_template_kwargs.enable_dreaming"),
    ({"documents": [{"text": "The tide is low."}]}, "documents"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"}, "tools"),
    ({"tools": "f", "tool_choice": "none"}, "tools"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}]},
     "messages[0].tool_calls"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "5"}}]}]},
     "messages[0].tool_calls[0].function.arguments"),
    ({"messages": [{"role": "assistant", "content": "Hi", "reasoning_content": "hm"}]},
     "messages[0].reasoning_content"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
]  # fmt: skip

SAMPLING_FIELDS = [
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 10**12}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -5}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": 10**9}, "max_tokens"),
    ({"max_tokens": 10**40}, "max_tokens"),
    ({"min_tokens": 2, "max_tokens": 1}, "min_tokens"),
    ({"n": 0}, "n"),
    ({"n": 10**6}, "n"),
    ({"seed": 2**70}, "seed"),
    ({"stop": [str(i) for i in range(100)]}, "stop"),
    ({"stop": [""]}, "stop"),
    ({"stop": [1]}, "stop[0]"),
    ({"stop_token_ids": [10**7]}, "stop_token_ids"),
    ({"logit_bias": {"10000000": 1}}, "logit_bias"),
    ({"logit_bias": {"hello": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 1000}}, "logit_bias"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [10**7]}, "allowed_token_ids"),
    ({"bad_words": [""]}, "bad_words"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"request_id": "a b"}, "request_id"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"temprature": 1}, "temprature"),
    ({"return_tokens_as_token_ids": True}, "return_tokens_as_token_ids"),
]

PROMPTS = [
    (None, "prompt"),
    ("", "prompt"),
    ([], "prompt"),
    ([[]], "prompt"),
    ([""], "prompt"),
    (5, "prompt"),
    ({"text": "Hello"}, "prompt"),
    ([1, "Hello"], "prompt[1]"),
    ([-1], "prompt[0]"),
    ([10**7], "prompt"),
    ([2**40], "prompt[0]"),
    ([[1], [10**7]], "prompt"),
    (["Hello"] * 5000, "prompt"),
]

UNSUPPORTED = [
    (CHAT, {"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    (CHAT, {"tool_choice": "required"}, "tool_choice"),
    (CHAT, {"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    (CHAT, {"response_format": {"type": "json_object"}}, "response_format"),
    (CHAT, {"functions": [{"name": "f"}]}, "functions"),
    (CHAT, {"modalities": ["text", "audio"]}, "modalities"),
    (CHAT, {"store": True}, "store"),
    (CHAT, {"prediction": {"type": "content", "content": "x"}}, "prediction"),
    (CHAT, {"reasoning_effort": "high"}, "reasoning_effort"),
    (CHAT, {"web_search_options": {}}, "web_search_options"),
    (CHAT, {"chat_template": "{{ messages }}"}, "chat_template"),
    (TEXT, {"suffix": "!"}, "suffix"),
    (TEXT, {"best_of": 3}, "best_of"),
    (TEXT, {"use_beam_search": True}, "use_beam_search"),
    (TEXT, {"guided_json": {}}, "guided_json"),
    (TEXT, {"logits_processors": ["x"]}, "logits_processors"),
]


def names(cases: list) -> list[str]:
    return [json.dumps(case[0])[:60] for case in cases]


@pytest.mark.parametrize(("change", "field"), CHAT_FIELDS, ids=names(CHAT_FIELDS))
def test_a_bad_chat_field_is_named(http, change, field):
    error = problem(http.post(CHAT, json=HELLO | change), 400)
    assert error["param"] == field
    assert field.split("[")[0].split(".")[0] in error["message"]


@pytest.mark.parametrize(("change", "field"), SAMPLING_FIELDS, ids=names(SAMPLING_FIELDS))
@pytest.mark.parametrize(("path", "good"), [(CHAT, HELLO), (TEXT, PROMPT)], ids=["chat", "text"])
def test_a_bad_sampling_field_is_named(http, path, good, change, field):
    error = problem(http.post(path, json=good | change), 400)
    assert error["param"] == field
    assert field in error["message"]


@pytest.mark.parametrize(("prompt", "field"), PROMPTS, ids=names(PROMPTS))
def test_a_bad_prompt_is_named(http, prompt, field):
    error = problem(http.post(TEXT, json=PROMPT | {"prompt": prompt}), 400)
    assert error["param"] == field
    assert "prompt" in error["message"]


@pytest.mark.parametrize(("path", "change", "field"), UNSUPPORTED, ids=[case[2] for case in UNSUPPORTED])
def test_what_cannot_act_is_refused_by_name(http, path, change, field):
    error = problem(http.post(path, json=(HELLO if path == CHAT else PROMPT) | change), 400)
    assert error["param"] == field
    assert error["code"] == "unsupported_parameter"
    assert field in error["message"]


@pytest.mark.parametrize("path", [CHAT, TEXT, "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "empty"),
        (b"   ", "empty"),
        (b"{", "JSON"),
        (b"[]", "JSON object"),
        (b'"text"', "JSON object"),
        (b"{'prompt': 1}", "JSON"),
        (b'{"prompt": NaN}', "JSON"),
        (b'{"prompt": "\xff\xfe"}', "UTF-8"),
        (b'{"prompt": "\\ud800"}', "unicode"),
        (b'{"prompt": ' + b"[" * 100_000, "nested too deeply"),
        (b'{"prompt": ' + b'{"a":' * 100_000, "nested too deeply"),
        (b'{"seed": ' + b"9" * 10_000 + b"}", "JSON"),
    ],
    ids=["empty", "blank", "cut", "array", "string", "quotes", "nan", "utf8", "surrogate", "bomb", "objects", "digits"],
)
def test_a_body_that_is_no_json_object_says_why(http, path, body, words):
    error = problem(http.post(path, content=body), 400)
    assert words in error["message"]


def test_infinity_is_no_number(http):
    error = problem(http.post(TEXT, content=b'{"prompt": "Hello", "temperature": 1e999}'), 400)
    assert error["param"] == "temperature"


def test_control_characters_and_rare_characters_are_text(http):
    for text in ("a\x00b", "\u2028", "\U0001f600", "e\u0301", "\ufffd", "<|im_end|>"):
        assert http.post(TEXT, json=PROMPT | {"prompt": text}).status_code == 200


HOSTILE = {
    "objects": (TEXT, {"prompt": [{}] * 300_000}, "prompt"),
    "few objects": (TEXT, {"prompt": [{}] * 1000}, "prompt[0]"),
    "mixed ids": (TEXT, {"prompt": [1] * 300_000 + ["a"]}, "prompt[300000]"),
    "ids": (TEXT, {"prompt": [1] * 2_000_000}, "prompt"),
    "id lists": (TEXT, {"prompt": [[1]] * 1000 + [[{}] * 300_000]}, "prompt[1000][0]"),
    "numbers": (CHAT, {"messages": [0] * 300_000}, "messages"),
    "few numbers": (CHAT, {"messages": [0] * 4000}, "messages[0]"),
    "empty messages": (CHAT, {"messages": [{"role": "user", "content": ""}] * 300_000}, "messages"),
    "parts": (CHAT, {"messages": [{"role": "user", "content": [0] * 300_000}]}, "messages[0].content"),
    "names": (CHAT, {"messages": [HELLO["messages"][0] | {f"a{i}": 1 for i in range(50_000)}]}, "messages[0].a0"),
    "stop ids": (TEXT, {"stop_token_ids": [[]] * 300_000}, "stop_token_ids"),
    "few stop ids": (TEXT, {"stop_token_ids": [[]] * 1000}, "stop_token_ids[0]"),
    "biases": (TEXT, {"logit_bias": {str(i): "a" for i in range(100_000)}}, "logit_bias"),
    "metadata": (TEXT, {"metadata": {str(i): 1 for i in range(100_000)}}, "metadata"),
    "options": (TEXT, {"stream_options": {f"a{i}": 1 for i in range(100_000)}}, "stream_options.a0"),
    "one name": (TEXT, {"a" * 1_000_000: 1}, "a" * 60),
}


@pytest.mark.parametrize(("path", "change", "field"), HOSTILE.values(), ids=HOSTILE)
def test_a_body_of_many_mistakes_costs_no_more_than_one(http, server, path, change, field):
    pid = server.process.pid
    before = private_bytes(pid)
    error = problem(http.post(path, json=(HELLO if path == CHAT else PROMPT) | change, timeout=5), 400)
    assert error["param"] == field
    assert private_bytes(pid) - before < 300_000_000


def test_a_body_of_nothing_but_braces_is_not_even_parsed(http):
    body = b'{"prompt": [' + b"{}," * 2_000_000 + b"{}]}"
    assert "1000000" in problem(http.post(TEXT, content=body), 400)["message"]


def test_a_limit_on_entries_names_it(http):
    error = problem(http.post(CHAT, json=HELLO | {"messages": HELLO["messages"] * 5000}), 400)
    assert "4096" in error["message"]
    assert "5000" in error["message"]


def test_a_ten_megabyte_prompt_is_too_long(http):
    error = problem(http.post(TEXT, json=PROMPT | {"prompt": "tide mill " * 1_000_000}), 400)
    assert error["code"] == "context_length_exceeded"
    assert "2048" in error["message"]
    message = {"role": "user", "content": "tide mill " * 1_000_000}
    error = problem(http.post(CHAT, json=HELLO | {"messages": [message]}), 400)
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == "messages"


def test_text_without_end_is_not_tokenised(http):
    """A long run of spaces is few tokens, so that its start does not tell that it is too long."""
    endless = " " * 5_000_000
    for change in ({}, {"truncate_prompt_tokens": 5}):
        error = problem(http.post(TEXT, json=PROMPT | {"prompt": endless} | change), 400)
        assert error["code"] == "context_length_exceeded"
        assert "4194304" in error["message"]
    for body in ({"prompt": endless}, {"messages": [{"role": "user", "content": endless}]}):
        error = problem(http.post("/tokenize", json=body), 413)
        assert error["param"] in body
        assert "4194304" in error["message"]


def test_a_prompt_one_token_too_long_names_both_lengths(http):
    error = problem(http.post(TEXT, json={"prompt": [5] * 2048, "max_tokens": 1}), 400)
    assert error["code"] == "context_length_exceeded"
    assert error["message"].count("2048") >= 2


def test_a_hundred_megabyte_body_is_refused_as_announced(http):
    error = problem(http.post(TEXT, content=b" " * 100_000_000), 413)
    assert error["code"] == "request_too_large"


def test_a_hundred_megabyte_body_is_refused_as_counted(http):
    def pieces():
        for _ in range(100):
            yield b" " * 1_000_000

    assert problem(http.post(TEXT, content=pieces()), 413)["code"] == "request_too_large"


def test_an_unknown_model_lists_the_served_ones(http):
    served = [card["id"] for card in http.get("/v1/models").json()["data"]]
    for path, good in ((CHAT, HELLO), (TEXT, PROMPT), ("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [1]})):
        error = problem(http.post(path, json=good | {"model": "no/such-model"}), 404)
        assert error["code"] == "model_not_found"
        assert all(name in error["message"] for name in served)
    assert problem(http.get("/v1/models/no/such-model"), 404)["code"] == "model_not_found"


def test_a_misspelt_parameter_gets_a_hint(http):
    error = problem(http.post(TEXT, json=PROMPT | {"temprature": 1}), 400)
    assert "temperature" in error["message"]


def test_an_unknown_route_and_a_wrong_method(http):
    assert problem(http.get("/v1/nothing"), 404)["code"] == "not_found"
    assert problem(http.post("/v1/models"), 405)["code"] == "method_not_allowed"
    response = http.get(CHAT)
    assert problem(response, 405)["code"] == "method_not_allowed"
    assert response.headers["allow"] == "POST"


def test_detokenize_refuses_ids_outside_the_vocabulary(http):
    error = problem(http.post("/detokenize", json={"tokens": [1, 10**7]}), 400)
    assert error["param"] == "tokens[1]"


def test_a_request_id_that_cannot_be_a_header_is_replaced(http):
    response = http.get("/v1/nothing", headers={"X-Request-Id": "x" * 500})
    problem(response, 404)
    assert len(response.headers["x-request-id"]) == 32

"""The Python API with the real model: results in vLLM's shape, every parameter acting."""

from __future__ import annotations

import json

import pytest

from tests.helpers.chat_templates import COMMAND_R, GRANITE, PARTS_ONLY, QWEN3
from tests.helpers.checkpoints import write_checkpoint
from tidemill import LLM, SamplingParams
from tidemill.errors import ConfigError, ContextTooLong, InvalidRequest, UnsupportedParameter


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("smollm2", dtype="float32", max_model_len=512, max_num_seqs=8)


def say(llm: LLM, prompt="The capital of France is", **params):
    (output,) = llm.generate(prompt, SamplingParams(**{"temperature": 0, "max_tokens": 8, **params}), use_tqdm=False)
    return output


def test_generate_gives_results_in_order_and_in_vllms_shape(llm):
    outputs = llm.generate(["One, two,", "Red, green,"], SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
    assert [output.prompt for output in outputs] == ["One, two,", "Red, green,"]
    for output in outputs:
        assert output.finished and output.prompt_token_ids == llm.tokenizer.encode(output.prompt)
        (one,) = output.outputs
        assert (one.index, one.finish_reason, len(one.token_ids)) == (0, "length", 4)
        assert one.text == llm.tokenizer.decode(one.token_ids)
    assert "three" in outputs[0].outputs[0].text


def test_prompts_as_ids_and_dicts(llm):
    ids = llm.tokenizer.encode("The capital of France is")
    texts = {
        say(llm, prompt).outputs[0].text for prompt in ("The capital of France is", ids, {"prompt_token_ids": ids})
    }
    assert len(texts) == 1


def test_chat_renders_the_template(llm):
    (output,) = llm.chat(
        [{"role": "user", "content": "Say hello."}], SamplingParams(temperature=0, max_tokens=12), use_tqdm=False
    )
    assert output.prompt.endswith("<|im_start|>assistant\n") and "Say hello." in output.prompt
    assert output.outputs[0].text


def test_content_parts_are_joined_and_other_kinds_refused(llm):
    parts = [{"type": "text", "text": "Say"}, {"type": "text", "text": "hello."}]
    params = SamplingParams(temperature=0, max_tokens=4)
    (output,) = llm.chat([{"role": "user", "content": parts}], params, use_tqdm=False)
    assert "Say\nhello." in output.prompt
    with pytest.raises(InvalidRequest, match="image_url"):
        llm.chat([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], params, use_tqdm=False)


HELLO = [{"role": "user", "content": "Hello"}]
SHORT = SamplingParams(temperature=0, max_tokens=1)


def weather(city: str):
    """
    Tells the weather.

    Args:
        city: Where.
    """


WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "Where."}},
            "required": ["city"],
        },
    },
}


def prompt_of(llm: LLM, messages=HELLO, **options) -> str:
    """What the template makes of a chat, seen through a real request."""
    (output,) = llm.chat(messages, SHORT, use_tqdm=False, **options)
    assert output.prompt_token_ids == llm.tokenizer.encode(output.prompt, add_special_tokens=False)
    return output.prompt


class TestChat:
    def test_tools_are_schemas_or_functions(self, llm):
        by_schema = prompt_of(llm, chat_template=QWEN3, tools=[WEATHER])
        assert json.dumps(WEATHER) in by_schema
        assert prompt_of(llm, chat_template=QWEN3, tools=[weather]) == by_schema

    @pytest.mark.parametrize("tool", [5, lambda city: None], ids=["a number", "without a docstring"])
    def test_other_tools_are_refused(self, llm, tool):
        with pytest.raises(InvalidRequest) as caught:
            prompt_of(llm, chat_template=QWEN3, tools=[tool])
        assert caught.value.param == "tools"

    def test_documents_and_keywords(self, llm):
        documents = [{"title": "Tides", "text": "They rise."}]
        kwargs = {"controls": {"length": "short"}}
        prompt = prompt_of(llm, chat_template=GRANITE, documents=documents, chat_template_kwargs=kwargs)
        assert "They rise." in prompt and '{"length": "short"}' in prompt

    def test_what_the_template_does_not_read_is_refused(self, llm):
        for given, param in (
            ({"tools": [WEATHER]}, "tools"),
            ({"documents": [{"text": "x"}]}, "documents"),
            ({"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs.enable_thinking"),
        ):
            with pytest.raises(UnsupportedParameter) as caught:
                prompt_of(llm, **given)
            assert caught.value.param == param

    def test_a_template_may_come_as_text_or_as_a_file(self, llm, tmp_path):
        path = tmp_path / "mine.jinja"
        path.write_text("{{ messages[0].content }} from a file{{ eos_token }}")
        assert prompt_of(llm, chat_template=str(path)) == "Hello from a file<|im_end|>"
        assert prompt_of(llm, chat_template="{{ messages[0].content }}!") == "Hello!"
        with pytest.raises(ConfigError, match="nowhere"):
            prompt_of(llm, chat_template="nowhere.jinja")

    def test_the_final_message_is_continued(self, llm):
        chat = [*HELLO, {"role": "assistant", "content": "Hi there, my"}]
        assert prompt_of(llm, chat, continue_final_message=True).endswith("<|im_start|>assistant\nHi there, my")
        assert not prompt_of(llm, add_generation_prompt=False).endswith("assistant\n")
        with pytest.raises(InvalidRequest, match="exclude each other"):
            prompt_of(llm, chat, continue_final_message=True, add_generation_prompt=True)

    def test_the_format_of_content_follows_the_template_or_the_caller(self, llm):
        assert prompt_of(llm, chat_template=PARTS_ONLY) == "User:Hello<end>\nAssistant:"
        as_json = "{{ messages[0].content | tojson }}"
        assert prompt_of(llm, chat_template=as_json) == '"Hello"'
        shaped = prompt_of(llm, chat_template=as_json, chat_template_content_format="openai")
        assert json.loads(shaped) == [{"type": "text", "text": "Hello"}]
        with pytest.raises(InvalidRequest) as caught:
            prompt_of(llm, chat_template_content_format="xml")
        assert caught.value.param == "chat_template_content_format"

    def test_calls_and_their_results_are_part_of_the_history(self, llm):
        call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich"}}}
        chat = [
            *HELLO,
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": "sunny"},
        ]
        prompt = prompt_of(llm, chat, chat_template=QWEN3, tools=[WEATHER])
        assert '{"name": "weather", "arguments": {"city": "Zürich"}}' in prompt
        assert "<tool_response>\nsunny\n</tool_response>" in prompt
        with pytest.raises(UnsupportedParameter) as caught:
            prompt_of(llm, chat)
        assert caught.value.param == "messages[1].tool_calls"

    def test_conversations_are_rendered_one_by_one(self, llm):
        outputs = llm.chat([HELLO, [{"role": "user", "content": "Bye"}]], SHORT, use_tqdm=False)
        assert ["Hello" in output.prompt for output in outputs] == [True, False]


def test_the_name_of_a_template_is_enough(tmp_path):
    named = [{"name": name, "template": text} for name, text in COMMAND_R.items()]
    write_checkpoint(tmp_path, "Llama")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named, "bos_token": "w1"}))
    llm = LLM(str(tmp_path), dtype="float32", max_num_seqs=1)
    with pytest.raises(UnsupportedParameter, match="documents"):
        prompt_of(llm, documents=[{"text": "x"}])
    assert "text: x" in prompt_of(llm, documents=[{"text": "x"}], chat_template="rag")


def _containing_itself() -> list:
    values: list = []
    values.append(values)
    return values


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ("hello", "messages"),
        (5, "messages"),
        (["hello"], "messages[0]"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": 5, "content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": "x", "mood": "gay"}], "messages[0].mood"),
        ([{"role": "user", "content": _containing_itself()}], "messages[0]"),
        ([HELLO, []], "messages"),
    ],
)
def test_what_is_no_conversation_is_named(llm, messages, param):
    with pytest.raises(InvalidRequest) as caught:
        llm.chat(messages, SHORT, use_tqdm=False)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"documents": "x"}, "documents"),
        ({"documents": ["x"]}, "documents[0]"),
        ({"tools": 5}, "tools"),
        ({"tools": [{"x": _containing_itself()}]}, "tools[0]"),
        ({"chat_template_kwargs": {5: 1}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": 5}, "chat_template_kwargs"),
    ],
)
def test_what_a_template_cannot_be_given_is_named(llm, options, param):
    with pytest.raises(InvalidRequest) as caught:
        prompt_of(llm, chat_template=GRANITE, **options)
    assert caught.value.param == param


def test_a_chat_template_that_is_no_text(llm):
    with pytest.raises(InvalidRequest) as caught:
        prompt_of(llm, chat_template=5)
    assert caught.value.param == "chat_template"


def test_a_model_without_a_template_generates_but_does_not_chat(tmp_path):
    write_checkpoint(tmp_path, "Llama")
    llm = LLM(str(tmp_path), dtype="float32", max_num_seqs=1)
    assert len(say(llm, "w1 w2", max_tokens=3, ignore_eos=True).outputs[0].token_ids) == 3
    with pytest.raises(InvalidRequest, match="no chat template") as caught:
        prompt_of(llm)
    assert "chat_template=" in caught.value.fix and "generate()" in caught.value.fix
    assert prompt_of(llm, chat_template="{% for message in messages %}w{{ loop.index }}{% endfor %}") == "w1"


def test_n_choices_differ_and_seeds_repeat(llm):
    first = say(llm, n=3, temperature=1.0, seed=11, max_tokens=12)
    again = say(llm, n=3, temperature=1.0, seed=11, max_tokens=12)
    texts = [choice.text for choice in first.outputs]
    assert texts == [choice.text for choice in again.outputs]
    assert len(set(texts)) == 3 and [choice.index for choice in first.outputs] == [0, 1, 2]


def test_a_seeded_request_is_the_same_alone_and_among_others(llm):
    seeded = SamplingParams(temperature=0.8, top_p=0.95, seed=5, max_tokens=16)
    alone = llm.generate("Once upon a time", seeded, use_tqdm=False)[0].outputs[0].text
    others = [SamplingParams(temperature=1.0, max_tokens=10 + i) for i in range(5)]
    prompts = ["Some other prompt"] * 3 + ["Once upon a time"] + ["More"] * 2
    outputs = llm.generate(prompts, [*others[:3], seeded, *others[3:]], use_tqdm=False)
    assert outputs[3].outputs[0].text == alone


def test_stop_strings_and_stop_tokens(llm):
    full = say(llm, "1 2 3 4 5", max_tokens=16).outputs[0]
    stopped = say(llm, "1 2 3 4 5", max_tokens=16, stop=["8"]).outputs[0]
    assert stopped.finish_reason == "stop" and stopped.stop_reason == "8"
    assert full.text.startswith(stopped.text) and "8" not in stopped.text
    token = full.token_ids[3]
    by_token = say(llm, "1 2 3 4 5", max_tokens=16, stop_token_ids=[token]).outputs[0]
    assert by_token.finish_reason == "stop" and by_token.stop_reason == token and by_token.token_ids[-1] == token


def test_min_tokens_ignore_eos_and_the_end_of_sequence(llm):
    question = [{"role": "user", "content": "Reply with the word yes."}]
    params = {"temperature": 0, "max_tokens": 60}
    (ended,) = llm.chat(question, SamplingParams(**params), use_tqdm=False)
    one = ended.outputs[0]
    assert one.finish_reason == "stop" and one.token_ids[-1] in llm.config.eos_ids and len(one.token_ids) < 60
    (longer,) = llm.chat(question, SamplingParams(**params, min_tokens=len(one.token_ids) + 3), use_tqdm=False)
    assert len(longer.outputs[0].token_ids) >= len(one.token_ids) + 3
    (ignoring,) = llm.chat(question, SamplingParams(**params, ignore_eos=True), use_tqdm=False)
    assert len(ignoring.outputs[0].token_ids) == 60


def test_logprobs_and_prompt_logprobs(llm):
    output = say(llm, logprobs=3, prompt_logprobs=2)
    one = output.outputs[0]
    assert len(one.logprobs) == len(one.token_ids)
    for token, scores in zip(one.token_ids, one.logprobs, strict=True):
        assert scores[token].rank == 1 and len(scores) == 3
        assert scores[token].decoded_token == llm.tokenizer.token_text(token)
    total = sum(scores[token].logprob for token, scores in zip(one.token_ids, one.logprobs, strict=True))
    assert one.cumulative_logprob == pytest.approx(total)
    assert output.prompt_logprobs[0] is None and len(output.prompt_logprobs) == len(output.prompt_token_ids)
    assert all(t in s for t, s in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True))


def test_bad_words_allowed_tokens_and_bias(llm):
    plain = say(llm).outputs[0]
    assert "Paris" in plain.text
    assert "Paris" not in say(llm, bad_words=["Paris"]).outputs[0].text
    allowed = llm.tokenizer.encode(" London")
    assert set(say(llm, allowed_token_ids=allowed).outputs[0].token_ids) <= set(allowed)
    assert set(say(llm, logit_bias={allowed[0]: 100}).outputs[0].token_ids) == {allowed[0]}


def test_truncate_prompt_tokens_keeps_the_end(llm):
    output = say(llm, "one two three four five six", truncate_prompt_tokens=2)
    assert output.prompt_token_ids == llm.tokenizer.encode("one two three four five six")[-2:]


def test_prefix_hits_are_reported(llm):
    prompt = "A preface that is long enough to fill several blocks of the cache, said twice. " * 3
    say(llm, prompt)
    assert say(llm, prompt).num_cached_tokens >= 32


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"n": 0}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"min_tokens": 20, "max_tokens": 10}, "min_tokens"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"stop": ["x"] * 100}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"logit_bias": {5: 1000}}, "logit_bias"),
        ({"logprobs": 100}, "logprobs"),
        ({"seed": 2**70}, "seed"),
        ({"max_tokens": 2.5}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"n": True}, "n"),
        ({"top_k": 2.5}, "top_k"),
        ({"temperature": "hot"}, "temperature"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids"),
        ({"logit_bias": {"5": 1.0}}, "logit_bias"),
        ({"bad_words": ["x"] * 300}, "bad_words"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
    ],
)
def test_parameters_out_of_range_are_refused_by_name(params, field):
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**params)
    assert caught.value.param == field and field in caught.value.message


@pytest.mark.parametrize(
    ("prompt", "params", "words"),
    [
        ([], {}, "empty"),
        ([1, 2, 10**6], {}, "vocabulary"),
        ([1, -5], {}, "vocabulary"),
        ([1], {"logit_bias": {10**6: 1}}, "logit_bias"),
        ([1], {"stop_token_ids": [10**6]}, "stop_token_ids"),
        ([5] * 600, {}, "600 tokens.*512"),
        ([5] * 500, {"max_tokens": 100}, "max_tokens of at most 12"),
    ],
)
def test_what_does_not_fit_the_model_is_refused_and_nothing_leaks(llm, prompt, params, words):
    with pytest.raises(InvalidRequest, match=words):
        llm.generate([prompt], SamplingParams(**params), use_tqdm=False)
    assert not llm._core.has_work and llm._core.stats.kv_usage == 0


def test_lengths_up_to_the_very_end_of_the_context(llm):
    assert say(llm, [5] * 511, max_tokens=1).outputs[0].finish_reason == "length"
    assert len(say(llm, [5] * 500, max_tokens=None, ignore_eos=True).outputs[0].token_ids) == 12
    with pytest.raises(ContextTooLong):
        say(llm, [5] * 512, max_tokens=1)


def test_constraints_that_leave_no_token_end_the_request_by_name(llm):
    with pytest.raises(InvalidRequest, match=r"allowed_token_ids.*leave no token"):
        say(llm, allowed_token_ids=[llm.config.eos_ids[0]], min_tokens=3)
    assert "Paris" in say(llm).outputs[0].text


def test_null_lists_mean_none_and_numpy_prompts_are_ids(llm):
    numpy = pytest.importorskip("numpy")
    ids = numpy.array(llm.tokenizer.encode("The capital of France is"))
    assert "Paris" in say(llm, ids, bad_words=None, stop_token_ids=None, stop=None).outputs[0].text


def test_unknown_setting_lists_the_known_ones():
    with pytest.raises(InvalidRequest, match="max_model_len"):
        LLM("smollm2", max_modle_len=5)

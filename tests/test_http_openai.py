"""The official OpenAI client against a real server: what it sends is served, what fails is its typed exception."""

from __future__ import annotations

import httpx
import openai
import pytest

QUESTION = [{"role": "user", "content": "Name three colours."}]


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=120) as client:
        yield client


@pytest.fixture(scope="module")
def model(client):
    return client.models.list().data[0].id


def test_models_are_listed_and_found_by_name(client, model):
    card = client.models.retrieve(model)
    assert card.id == model
    assert card.max_model_len == 2048


def test_chat_answers(client, model):
    answer = client.chat.completions.create(model=model, messages=QUESTION, max_completion_tokens=8, temperature=0)
    choice = answer.choices[0]
    assert answer.id.startswith("chatcmpl-")
    assert answer.object == "chat.completion"
    assert answer.model == model
    assert answer.system_fingerprint
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason in ("stop", "length")
    assert answer.usage.completion_tokens <= 8
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_chat_takes_text_parts_and_returns_what_it_was_sent_back(client, model):
    first = client.chat.completions.create(model=model, messages=QUESTION, max_tokens=8, temperature=0)
    follow_up = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Name three"}, {"type": "text", "text": "colours."}]},
        first.choices[0].message,
        {"role": "user", "content": "And one more."},
    ]
    answer = client.chat.completions.create(model=model, messages=follow_up, max_tokens=4, temperature=0)
    assert answer.choices[0].message.content
    assert answer.usage.prompt_tokens > first.usage.prompt_tokens


def test_chat_continues_the_final_message(client, model):
    opening = [*QUESTION, {"role": "assistant", "content": "Red, green and"}]
    extra = {"continue_final_message": True, "add_generation_prompt": False}
    answer = client.chat.completions.create(
        model=model, messages=opening, max_tokens=4, temperature=0, extra_body=extra
    )
    assert "blue" in answer.choices[0].message.content


def test_a_chat_stream_says_what_the_whole_answer_says(client, model):
    asked = {"model": model, "messages": QUESTION, "max_tokens": 24, "temperature": 0}
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    finishes = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert text == whole.choices[0].message.content
    assert finishes[-1] == whole.choices[0].finish_reason
    assert set(finishes[:-1]) == {None}
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


def test_usage_can_come_with_every_chunk(client, model):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(
        client.completions.create(model=model, prompt="One two", max_tokens=5, stream=True, stream_options=options)
    )
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[0] >= 1
    assert counts[-1] <= 5


def test_chat_logprobs(client, model):
    answer = client.chat.completions.create(
        model=model, messages=QUESTION, max_tokens=5, temperature=0, logprobs=True, top_logprobs=3
    )
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    for entry in content:
        assert entry.logprob <= 0
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].logprob == pytest.approx(entry.logprob), "greedy takes the most likely token"
    written = b"".join(bytes(entry.bytes) for entry in content).decode()
    assert written.startswith(answer.choices[0].message.content)


def test_streamed_logprobs_cover_every_token(client, model):
    asked = {"model": model, "messages": QUESTION, "max_tokens": 6, "temperature": 0, "logprobs": True}
    whole = client.chat.completions.create(**asked)
    chunks = client.chat.completions.create(**asked, stream=True)
    streamed = [
        entry.token
        for chunk in chunks
        if chunk.choices and chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content
    ]
    assert streamed == [entry.token for entry in whole.choices[0].logprobs.content]


def test_three_answers_to_one_question(client, model):
    answer = client.chat.completions.create(model=model, messages=QUESTION, max_tokens=12, n=3, temperature=1.0, seed=7)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in answer.choices}) > 1
    assert answer.usage.completion_tokens <= 36


def test_three_answers_stream_side_by_side(client, model):
    asked = {"model": model, "messages": QUESTION, "max_tokens": 6, "n": 3, "temperature": 1.0, "seed": 11}
    whole = client.chat.completions.create(**asked)
    texts = {0: "", 1: "", 2: ""}
    for chunk in client.chat.completions.create(**asked, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert list(texts.values()) == [choice.message.content for choice in whole.choices]


def test_a_stop_string_ends_the_text_before_it(client, model):
    asked = {"model": model, "prompt": "1, 2, 3, 4, 5,", "max_tokens": 24, "temperature": 0}
    free = client.completions.create(**asked).choices[0].text
    stop = free.strip()[1:3]
    choice = client.completions.create(**asked, stop=[stop]).choices[0]
    kept = client.completions.create(**asked, stop=stop, extra_body={"include_stop_str_in_output": True}).choices[0]
    assert choice.finish_reason == "stop"
    assert choice.stop_reason == stop
    assert choice.text == free[: free.index(stop)]
    assert kept.text == choice.text + stop


def test_a_seed_repeats_the_answer(client, model):
    asked = {"model": model, "messages": QUESTION, "max_tokens": 16, "temperature": 1.0}
    texts = [client.chat.completions.create(**asked, seed=42).choices[0].message.content for _ in range(2)]
    other = client.chat.completions.create(**asked, seed=43).choices[0].message.content
    assert texts[0] == texts[1] != other


def test_a_repeated_prompt_is_found_in_the_cache(client, model):
    asked = {"model": model, "prompt": "The tide comes in and goes out. " * 20, "max_tokens": 1, "temperature": 0}
    client.completions.create(**asked)
    usage = client.completions.create(**asked).usage
    assert 0 < usage.prompt_tokens_details.cached_tokens < usage.prompt_tokens


def test_a_salt_keeps_caches_apart(client, model):
    asked = {"model": model, "prompt": "Salt water and sweet water. " * 20, "max_tokens": 1}
    client.completions.create(**asked, extra_body={"cache_salt": "mine"})
    usage = client.completions.create(**asked, extra_body={"cache_salt": "yours"}).usage
    assert usage.prompt_tokens_details.cached_tokens == 0


def test_completions_take_lists_of_prompts(client, model):
    prompts = ["The sky is", "Water is", "Fire is"]
    asked = {"model": model, "max_tokens": 4, "temperature": 0}
    together = client.completions.create(**asked, prompt=prompts)
    alone = [client.completions.create(**asked, prompt=prompt) for prompt in prompts]
    assert [choice.index for choice in together.choices] == [0, 1, 2]
    assert [choice.text for choice in together.choices] == [answer.choices[0].text for answer in alone]
    assert together.usage.prompt_tokens == sum(answer.usage.prompt_tokens for answer in alone)


def test_choices_of_several_prompts_come_prompt_by_prompt(client, model):
    asked = {"model": model, "prompt": ["One", "Two"], "n": 2, "max_tokens": 1, "echo": True, "temperature": 1.0}
    whole = client.completions.create(**asked)
    assert [choice.text[:3] for choice in whole.choices] == ["One", "One", "Two", "Two"]
    streamed = {chunk.choices[0].index for chunk in client.completions.create(**asked, stream=True)}
    assert streamed == {0, 1, 2, 3}


def test_completions_take_token_ids(client, model, server):
    text = "The sky is"
    ids = httpx.post(f"{server.url}/tokenize", json={"prompt": text}).json()["tokens"]
    asked = {"model": model, "max_tokens": 4, "temperature": 0}
    from_text = client.completions.create(**asked, prompt=text).choices[0].text
    assert client.completions.create(**asked, prompt=ids).choices[0].text == from_text
    both = client.completions.create(**asked, prompt=[ids, ids]).choices
    assert [choice.text for choice in both] == [from_text, from_text]


def test_completion_logprobs(client, model):
    answer = client.completions.create(model=model, prompt="The sky is", max_tokens=4, temperature=0, logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert len(logprobs.tokens) == answer.usage.completion_tokens
    assert logprobs.text_offset[0] == 0
    assert all(value <= 0 for value in logprobs.token_logprobs)
    assert all(2 <= len(top) <= 3 for top in logprobs.top_logprobs)
    assert "".join(logprobs.tokens).startswith(answer.choices[0].text)


def test_echo_puts_the_prompt_and_its_logprobs_first(client, model):
    prompt = "The sky is blue and"
    asked = {"model": model, "prompt": prompt, "max_tokens": 3, "temperature": 0, "echo": True, "logprobs": 1}
    answer = client.completions.create(**asked)
    logprobs = answer.choices[0].logprobs
    assert answer.choices[0].text.startswith(prompt)
    assert len(logprobs.tokens) == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert logprobs.token_logprobs[0] is None
    assert all(value <= 0 for value in logprobs.token_logprobs[1:])
    streamed = list(client.completions.create(**asked, stream=True))
    assert "".join(chunk.choices[0].text for chunk in streamed) == answer.choices[0].text
    offsets = [offset for chunk in streamed for offset in chunk.choices[0].logprobs.text_offset]
    assert offsets == logprobs.text_offset


@pytest.mark.parametrize("skips", [True, False], ids=["skipped", "written"])
@pytest.mark.parametrize("as_ids", [True, False], ids=["ids", "text"])
def test_offsets_are_positions_in_the_returned_text(client, model, server, skips, as_ids):
    text = "<|im_start|>user\nGrüße 🌊<|im_end|>\n"
    ids = httpx.post(f"{server.url}/tokenize", json={"prompt": text}).json()["tokens"]
    asked = {"model": model, "prompt": ids if as_ids else text, "max_tokens": 3, "temperature": 0}
    asked |= {"echo": True, "logprobs": 0, "extra_body": {"skip_special_tokens": skips, "ignore_eos": True}}
    choice = client.completions.create(**asked).choices[0]
    logprobs = choice.logprobs
    for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        if "\ufffd" not in token and not (skips and token.startswith("<|")):
            assert choice.text[offset:].startswith(token)
    streamed = list(client.completions.create(**asked, stream=True))
    offsets = [offset for chunk in streamed for offset in chunk.choices[0].logprobs.text_offset]
    assert offsets == logprobs.text_offset


def test_prompt_logprobs_have_vllms_shape(client, model):
    answer = client.completions.create(
        model=model, prompt="The sky is blue", max_tokens=1, extra_body={"prompt_logprobs": 2, "return_token_ids": True}
    )
    choice = answer.choices[0]
    assert choice.prompt_logprobs[0] is None
    assert len(choice.prompt_logprobs) == answer.usage.prompt_tokens
    for token, entry in zip(choice.prompt_token_ids[1:], choice.prompt_logprobs[1:], strict=True):
        assert {"logprob", "rank", "decoded_token"} == entry[str(token)].keys()


def test_token_ids_are_returned_on_request(client, model):
    asked = {"model": model, "messages": QUESTION, "max_tokens": 4, "temperature": 0}
    answer = client.chat.completions.create(**asked, extra_body={"return_token_ids": True})
    assert len(answer.prompt_token_ids) == answer.usage.prompt_tokens
    assert len(answer.choices[0].token_ids) == answer.usage.completion_tokens
    named = client.chat.completions.create(**asked, logprobs=True, extra_body={"return_tokens_as_token_ids": True})
    names = [entry.token for entry in named.choices[0].logprobs.content]
    assert names == [f"token_id:{token}" for token in answer.choices[0].token_ids]


def test_sampling_extras_act(client, model):
    asked = {"model": model, "prompt": "The sky is", "max_tokens": 6, "temperature": 0}
    free = client.completions.create(**asked, extra_body={"return_token_ids": True}).choices[0]
    first = free.token_ids[0]
    banned = client.completions.create(**asked, logit_bias={str(first): -100}, extra_body={"return_token_ids": True})
    assert banned.choices[0].token_ids[0] != first
    only = client.completions.create(**asked, extra_body={"allowed_token_ids": [first], "return_token_ids": True})
    assert set(only.choices[0].token_ids) == {first}
    long = client.completions.create(**asked, extra_body={"min_tokens": 6, "ignore_eos": True})
    assert long.usage.completion_tokens == 6
    cut = client.completions.create(**asked, extra_body={"truncate_prompt_tokens": 2})
    assert cut.usage.prompt_tokens == 2


def test_neutral_values_of_what_cannot_act_are_accepted(client, model):
    answer = client.chat.completions.create(
        model=model,
        messages=QUESTION,
        max_tokens=1,
        response_format={"type": "text"},
        store=False,
        service_tier="auto",
        user="someone",
        metadata={"run": "7"},
        extra_body={"tools": [], "best_of": 1, "use_beam_search": False},
    )
    assert answer.usage.completion_tokens == 1


def test_errors_are_typed_exceptions(client, model):
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=model, messages=QUESTION, temperature=-1)
    assert bad.value.param == "temperature"
    assert bad.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="no-such-model", messages=QUESTION)
    assert missing.value.code == "model_not_found"
    assert model in missing.value.message, "the message lists what is served"
    with pytest.raises(openai.BadRequestError) as early:
        list(client.chat.completions.create(model=model, messages=QUESTION, max_tokens=10**6, stream=True))
    assert early.value.code == "context_length_exceeded", "a stream that cannot start is a plain HTTP error"


def test_a_prompt_that_is_too_long_names_both_lengths(client, model):
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=model, prompt=[5] * 3000, max_tokens=1)
    assert long.value.code == "context_length_exceeded"
    assert "3000" in long.value.message
    assert "2048" in long.value.message


def test_request_ids_are_kept_or_made(client, model):
    asked = {"model": model, "prompt": "Hi", "max_tokens": 1}
    kept = client.completions.with_raw_response.create(**asked, extra_headers={"X-Request-Id": "my-id-1"})
    assert kept.headers["x-request-id"] == "my-id-1"
    assert kept.parse().id == "cmpl-my-id-1"
    made = client.completions.with_raw_response.create(**asked)
    assert made.parse().id == f"cmpl-{made.headers['x-request-id']}"

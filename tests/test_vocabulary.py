"""A tokenizer and the rows of its model: what does not fit is explained at the start, what is only spare is not."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from tests.helpers.checkpoints import write_checkpoint
from tidemill import LLM, SamplingParams
from tidemill.config import EngineArgs
from tidemill.engine.output import Detokenizer
from tidemill.engine.prepare import prepare
from tidemill.errors import BadCheckpoint, ConfigError, InvalidRequest

ROWS = 203
PAD = {"content": "<pad>", "special": True}


@pytest.fixture
def folder(tmp_path):
    write_checkpoint(tmp_path, "Llama")
    return tmp_path


def write_words(folder, count):
    backend = Tokenizer(models.WordLevel({f"w{i}": i for i in range(count)}, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.save(str(folder / "tokenizer.json"))


def configure(folder, **config):
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def note_of(folder, **args) -> str | None:
    notes = prepare(EngineArgs(str(folder), **args)).notes
    return next((note.reason for note in notes if note.name == "vocabulary"), None)


@pytest.mark.parametrize("count", [ROWS, ROWS - 43, 5])
def test_rows_to_spare_are_nothing_to_tell(folder, count):
    write_words(folder, count)
    assert note_of(folder) is None


def test_added_tokens_that_nobody_needs_are_a_line(folder):
    configure(folder, added_tokens_decoder={str(ROWS): PAD, str(ROWS + 1): {"content": "<x>"}}, pad_token="<pad>")
    note = note_of(folder)
    assert f"'<pad>' ({ROWS})" in note and f"'<x>' ({ROWS + 1})" in note
    assert "refused" in note


def test_many_tokens_are_counted_not_listed(folder):
    configure(folder, added_tokens_decoder={str(ROWS + i): {"content": f"<{i}>"} for i in range(100)})
    assert "and 95 more" in note_of(folder)


@pytest.mark.parametrize("name", ["bos_token", "eos_token"])
def test_the_ends_of_a_text_must_have_weights(folder, name):
    configure(folder, **{name: "<end>"})
    with pytest.raises(BadCheckpoint, match="<end>") as caught:
        note_of(folder)
    assert name in caught.value.cause and str(ROWS) in caught.value.cause
    assert "--tokenizer" in caught.value.fix


def test_tokens_of_the_chat_template_must_have_weights(folder):
    added = {str(ROWS): PAD, str(ROWS + 1): {"content": "<|turn|>", "special": True}}
    template = "{% for message in messages %}<|turn|>{{ message.content }}{% endfor %}"
    configure(folder, added_tokens_decoder=added, chat_template=template)
    with pytest.raises(BadCheckpoint) as caught:
        note_of(folder)
    assert "<|turn|>" in caught.value.message and "<pad>" not in caught.value.message
    assert "chat template" in caught.value.cause
    assert "<|turn|>" in note_of(folder, chat_template="{{ messages[0].content }}")


def test_ordinary_tokens_must_have_weights(folder):
    write_words(folder, ROWS + 40)
    with pytest.raises(BadCheckpoint, match=f"'w{ROWS}' \\({ROWS}\\).* and 35 more") as caught:
        note_of(folder)
    assert f"{ROWS} rows" in caught.value.cause and str(ROWS + 39) in caught.value.cause


def test_a_tokenizer_that_was_asked_for_is_the_one_to_leave_out(folder, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    write_words(other, ROWS + 40)
    (other / "config.json").write_text("{}")
    with pytest.raises(ConfigError) as caught:
        note_of(folder, tokenizer=str(other))
    assert caught.value.param == "tokenizer"
    assert "leave --tokenizer out" in caught.value.fix
    write_words(other, ROWS)
    assert note_of(folder, tokenizer=str(other)) is None


def test_a_prompt_with_such_a_token_is_refused_by_its_id(folder, caplog):
    configure(folder, added_tokens_decoder={str(ROWS): PAD})
    llm = LLM(str(folder), dtype="float32", max_num_seqs=1)
    assert "'<pad>'" in caplog.text
    with pytest.raises(InvalidRequest, match=str(ROWS)):
        llm.generate("w1 <pad>", SamplingParams(max_tokens=1), use_tqdm=False)
    assert llm.generate("w1 w2", SamplingParams(max_tokens=1), use_tqdm=False)[0].outputs[0].token_ids


def test_ids_that_the_tokenizer_does_not_know_can_be_sampled(folder):
    write_words(folder, 100)
    llm = LLM(str(folder), dtype="float32", max_num_seqs=1)
    spare = list(range(100, ROWS))
    params = SamplingParams(allowed_token_ids=spare, max_tokens=100, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    (output,) = llm.generate("w1 w2", params, use_tqdm=False)
    one = output.outputs[0]
    assert len(one.token_ids) == 100 and set(one.token_ids) <= set(spare)
    assert one.text == ""
    scored = zip(one.token_ids, one.logprobs, strict=True)
    assert {scores[token].decoded_token for token, scores in scored} == {""}
    mixed = SamplingParams(allowed_token_ids=[5, 150], max_tokens=40, ignore_eos=True, temperature=1.0, seed=3)
    one = llm.generate("w1 w2", mixed, use_tqdm=False)[0].outputs[0]
    assert {5, 150} == set(one.token_ids)
    assert one.text.split() == ["w5"] * one.token_ids.count(5)


def test_unknown_ids_do_not_end_a_stream_of_text(folder):
    write_words(folder, 100)
    tokenizer = prepare(EngineArgs(str(folder))).tokenizer
    detokenizer = Detokenizer(tokenizer, tokenizer.encode("w1 w2"), skip_special_tokens=True)
    ids = [3, *([150] * 40), 4]
    text = "".join(detokenizer.push([token]) for token in ids) + detokenizer.flush()
    assert text.split() == ["w3", "w4"]

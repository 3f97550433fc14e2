"""Tokens to text: no half characters, no early stop strings, nothing lost."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.core.params import SamplingParams
from tidemill.engine.messages import SequenceOutput
from tidemill.engine.output import Choice, Detokenizer, StopStrings
from tidemill.text.tokenizer import load_tokenizer
from tidemill.weights.location import locate


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(locate("smollm2"))


@settings(max_examples=100, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=60), data=st.data())
def test_pieces_join_to_the_text_and_are_never_half_a_character(tokenizer, text, data):
    ids = tokenizer.encode(text)
    prompt = tokenizer.encode(data.draw(st.sampled_from(["", "Hello", "é", "日本"])))
    detokenizer = Detokenizer(tokenizer, prompt, skip_special_tokens=True)
    pieces = [detokenizer.push([token]) for token in ids]
    if "\ufffd" not in tokenizer.decode(ids):  # this vocabulary lacks a few bytes of rare planes
        assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) + detokenizer.flush() == tokenizer.decode(ids)


@pytest.mark.parametrize(
    "before", ["\U00040000" * 2, "\ufffd" * 12], ids=["bytes-that-are-no-text", "replacements-that-are-text"]
)
def test_a_character_stays_whole_after_many_replacements(tokenizer, before):
    ids = tokenizer.encode(before + "\U000c0000")
    detokenizer = Detokenizer(tokenizer, [], skip_special_tokens=True)
    pieces = [detokenizer.push([token]) for token in ids]
    assert "".join(pieces) == tokenizer.decode(ids)
    assert pieces[-1].endswith("\U000c0000")


@pytest.mark.parametrize("model", ["smollm2", "gemma3-270m"], ids=["byte-level", "byte-fallback"])
def test_a_character_stays_whole_after_many_tokens_without_text(model):
    tokenizer = load_tokenizer(locate(model))
    character = tokenizer.encode("\U000c0000")
    detokenizer = Detokenizer(tokenizer, [], skip_special_tokens=True)
    pieces = [detokenizer.push([token]) for token in [*character, *tokenizer.eos_ids[:1] * 12, *character]]
    assert [piece for piece in pieces if piece] == ["\U000c0000"] * 2


def test_bytes_that_are_no_text_do_not_wait_for_the_end(tokenizer):
    lone = tokenizer.encode("\U000c0000")[-1]
    assert tokenizer.decode([lone]) == "\ufffd"
    detokenizer = Detokenizer(tokenizer, [], skip_special_tokens=True)
    assert "\ufffd" in detokenizer.push([lone] * 10)


def test_a_character_cut_off_by_the_end_is_flushed_as_a_replacement(tokenizer):
    ids = tokenizer.encode("😀")
    assert len(ids) > 1
    detokenizer = Detokenizer(tokenizer, [], skip_special_tokens=True)
    assert detokenizer.push(ids[:-1]) == ""
    assert "\ufffd" in detokenizer.flush()


@settings(max_examples=300, deadline=None)
@given(
    text=st.text("abc", max_size=30),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
    cuts=st.lists(st.integers(0, 30), max_size=10),
    include=st.booleans(),
)
def test_stop_strings_are_found_wherever_the_text_is_cut(text, stops, cuts, include):
    finder = StopStrings(stops, include)
    shown, found = "", None
    edges = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    for start, end in pairwise(edges):
        piece, found = finder.push(text[start:end])
        shown += piece
        assert text.startswith(shown)
        if found:
            break
        assert not any(stop in shown for stop in stops)
    if found is None:
        assert shown + finder.flush() == text
        assert not any(stop in text for stop in stops)
    else:
        before = shown[: -len(found)] if include else shown
        assert text.startswith(before + found)


def test_text_that_cannot_become_a_stop_string_is_not_held_back():
    finder = StopStrings(["###"], include=False)
    assert finder.push("hello #") == ("hello ", None)
    assert finder.push(" x") == ("# x", None)
    assert finder.push("##") == ("", None)
    assert finder.push("# and more") == ("", "###")


def feed(choice: Choice, ids: list[int], finish: str | None = None) -> tuple[str, str | None, object]:
    text = ""
    for index, token in enumerate(ids):
        last = index == len(ids) - 1
        delta = choice.feed(SequenceOutput("x", [token], finish if last else None))
        text += delta.text
        if delta.finish_reason:
            return text, delta.finish_reason, delta.stop_reason
    return text, None, None


def test_stop_string_ends_a_choice_and_is_the_stop_reason(tokenizer):
    ids = tokenizer.encode("one two three four")
    choice = Choice(0, [1], SamplingParams(stop=["three"]), tokenizer)
    assert feed(choice, ids) == ("one two ", "stop", "three")
    choice = Choice(0, [1], SamplingParams(stop=["three"], include_stop_str_in_output=True), tokenizer)
    assert feed(choice, ids) == ("one two three", "stop", "three")


def test_min_tokens_come_before_stop_strings(tokenizer):
    ids = tokenizer.encode("a b a b a b")
    choice = Choice(0, [1], SamplingParams(stop=["b"], min_tokens=4), tokenizer)
    text, finish, _ = feed(choice, ids)
    assert (text, finish) == ("a b a b a ", "stop")


def test_the_token_that_ended_it_is_no_text_unless_asked_for(tokenizer):
    end = tokenizer.eos_ids[0]
    ids = [*tokenizer.encode("done"), end]
    plain = Choice(0, [1], SamplingParams(skip_special_tokens=False), tokenizer)
    assert feed(plain, ids, "stop")[0] == "done"
    both = SamplingParams(skip_special_tokens=False, include_stop_str_in_output=True)
    assert feed(Choice(0, [1], both, tokenizer), ids, "stop")[0] == "done" + tokenizer.decode([end], False)

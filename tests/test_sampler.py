"""Sampling against its definitions: each parameter does what its name says, and a seed draws the same in any batch."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.core.params import SamplingParams
from tidemill.runtime.sampler import Draw, sample
from tidemill.runtime.scores import Scores

VOCABULARY = 40


def draw(params, tokens=(1, 2, 3), num_prompt=3, seed=0, **more) -> Draw:
    defaults = {"stop_ids": []}
    return Draw(params, np.array(tokens, dtype=np.int64), num_prompt, seed, **{**defaults, **more})


def logits(seed: int = 0, rows: int = 1) -> torch.Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 3


def drawn(params: SamplingParams, scores: torch.Tensor, count: int = 400, **more) -> Counter:
    """Tokens drawn at many different seeds."""
    draws = [draw(params, seed=seed, **more) for seed in range(count)]
    return Counter(sample(scores.repeat(count, 1), draws).tolist())


def test_temperature_zero_is_the_best_token():
    scores = logits(rows=5)
    best = scores.argmax(-1).tolist()
    assert sample(scores.clone(), [draw(SamplingParams(temperature=0))] * 5).tolist() == best


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_distribution(temperature):
    scores = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    count = 20_000
    found = drawn(SamplingParams(temperature=temperature), scores, count)
    want = (scores[0] / temperature).softmax(-1)
    for token in range(4):
        deviation = math.sqrt(want[token] * (1 - want[token]) / count)
        assert abs(found[token] / count - want[token]) < 5 * deviation


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**64 - 1), others=st.integers(0, 5), place=st.integers(0, 5), data=st.data())
def test_a_seed_draws_the_same_in_any_batch(seed, others, place, data):
    params = SamplingParams(temperature=0.9, top_p=data.draw(st.sampled_from([1.0, 0.8])), top_k=20)
    scores = logits(7)
    (alone,) = sample(scores.clone(), [draw(params, seed=seed)]).tolist()
    batch = logits(3, rows=others + 1)
    place = min(place, others)
    batch[place] = scores[0]
    draws = [draw(SamplingParams(temperature=i % 2, repetition_penalty=1.3), seed=i) for i in range(others + 1)]
    draws[place] = draw(params, seed=seed)
    assert sample(batch, draws).tolist()[place] == alone


def test_other_positions_and_seeds_draw_independently():
    scores = torch.zeros(1, VOCABULARY)
    params = SamplingParams()
    by_seed = drawn(params, scores, 4000)
    by_position = Counter(
        sample(scores.repeat(400, 1), [draw(params, tokens=(1,) * n) for n in range(1, 401)]).tolist()
    )
    assert len(by_seed) == VOCABULARY and max(by_seed.values()) < 3 * 4000 / VOCABULARY
    assert len(by_position) > VOCABULARY * 0.9


@pytest.mark.parametrize("top_k", [1, 3, 10])
def test_top_k_keeps_the_k_best(top_k):
    scores = logits(1)
    found = drawn(SamplingParams(top_k=top_k, temperature=3.0), scores)
    assert set(found) <= set(scores[0].topk(top_k).indices.tolist())
    assert len(found) > 1 or top_k == 1


@pytest.mark.parametrize("top_k", [-1, 0])
def test_top_k_off_keeps_all(top_k):
    assert len(drawn(SamplingParams(top_k=top_k), torch.zeros(1, VOCABULARY), 2000)) == VOCABULARY


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("width", [VOCABULARY, 2000])
def test_top_p_keeps_the_smallest_set_with_that_mass(top_p, width):
    scores = torch.randn(1, width, generator=torch.Generator().manual_seed(2)) * 0.5
    probabilities, order = scores[0].softmax(-1).sort(descending=True)
    size = int((probabilities.cumsum(0) < top_p).sum()) + 1
    assert set(drawn(SamplingParams(top_p=top_p), scores, 600)) <= set(order[:size].tolist())


def test_top_p_counts_the_mass_that_top_k_leaves():
    scores = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    assert set(drawn(SamplingParams(top_k=2, top_p=0.5), scores)) == {0}
    assert set(drawn(SamplingParams(top_k=2, top_p=0.6), scores)) == {0, 1}


def test_min_p_is_relative_to_the_best():
    scores = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    assert set(drawn(SamplingParams(min_p=0.2), scores, 2000)) == {0, 1, 2}


def test_allowed_token_ids_and_logit_bias():
    assert set(drawn(SamplingParams(allowed_token_ids=[4, 7]), torch.zeros(1, VOCABULARY))) == {4, 7}
    assert set(drawn(SamplingParams(logit_bias={9: 100.0}), logits())) == {9}
    assert 0 not in drawn(SamplingParams(logit_bias={0: -100.0}), torch.zeros(1, VOCABULARY), 2000)


def test_bad_words_forbid_the_last_token_only_after_the_first_ones():
    flat = torch.zeros(1, VOCABULARY)
    after = {"tokens": (1, 8), "num_prompt": 1}
    assert 9 not in drawn(SamplingParams(), flat, 2000, bad_sequences=[[8, 9]], **after)
    assert 9 in drawn(SamplingParams(), flat, 2000, bad_sequences=[[7, 9]], **after)
    assert 9 not in drawn(SamplingParams(), flat, 2000, banned_ids=[9])
    # The prompt does not count as the beginning of a bad word.
    assert 9 in drawn(SamplingParams(), flat, 2000, bad_sequences=[[8, 9]], tokens=(1, 8), num_prompt=2)


def test_min_tokens_forbid_stop_tokens_until_then():
    flat = torch.zeros(1, VOCABULARY)
    params = SamplingParams(min_tokens=2)
    assert 5 not in drawn(params, flat, 2000, stop_ids=[5], tokens=(1, 2), num_prompt=1)
    assert 5 in drawn(params, flat, 2000, stop_ids=[5], tokens=(1, 2, 3), num_prompt=1)


def penalised(params: SamplingParams, tokens: tuple[int, ...], num_prompt: int) -> torch.Tensor:
    """The scores after penalties, read off through greedy choices: sample() changes its logits in place."""
    scores = logits(5)
    sample(scores, [draw(params, tokens=tokens, num_prompt=num_prompt)])
    return scores[0]


def test_penalties_follow_their_definitions():
    tokens, num_prompt = (3, 4, 5, 5, 6), 2
    raw = logits(5)[0]
    repeated = penalised(SamplingParams(temperature=0, repetition_penalty=2.0), tokens, num_prompt)
    for token in range(VOCABULARY):
        want = raw[token] if token not in tokens else raw[token] / 2 if raw[token] > 0 else raw[token] * 2
        assert torch.isclose(repeated[token], want)
    both = SamplingParams(temperature=0, frequency_penalty=0.5, presence_penalty=0.25)
    scores = penalised(both, tokens, num_prompt)
    counts = Counter(tokens[num_prompt:])
    for token in range(VOCABULARY):
        want = raw[token] - 0.5 * counts[token] - 0.25 * (counts[token] > 0)
        assert torch.isclose(scores[token], want)


@pytest.mark.parametrize("temperature", [1e-6, 1e-9, 1e-30])
def test_a_temperature_close_to_zero_is_greedy(temperature):
    scores = logits(rows=3) * 10
    best = scores.argmax(-1).tolist()
    assert sample(scores, [draw(SamplingParams(temperature=temperature))] * 3).tolist() == best


def test_low_temperatures_still_draw_the_best():
    scores = logits(4) * 10
    assert set(drawn(SamplingParams(temperature=2e-5), scores)) == {int(scores.argmax())}


def test_constraints_that_leave_no_token_are_told():
    params = SamplingParams(allowed_token_ids=[5], min_tokens=2)
    draws = [draw(params, stop_ids=[5]), draw(SamplingParams(temperature=0))]
    assert sample(logits(rows=2), draws).tolist()[0] == -1
    assert sample(logits(), [draw(SamplingParams(allowed_token_ids=[5]), banned_ids=[5])]).tolist() == [-1]


def test_logprobs_ranks_and_alternatives():
    scores = logits(rows=2)
    tokens = torch.tensor([int(scores[0].argmax()), int(scores[1].argmin())])
    first, second = Scores(scores, tokens, [3, 0]).read()
    want = scores.log_softmax(-1)
    assert first.rank == 1 and second.rank == VOCABULARY
    assert first.logprob == pytest.approx(want[0].max().item())
    assert second.logprob == pytest.approx(want[1].min().item())
    values, ids = want[0].topk(3)
    assert first.top == list(zip(ids.tolist(), values.tolist(), strict=True)) and second.top == []

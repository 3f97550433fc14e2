"""Sampling on the device draws what `runtime/sampler.py` draws, reads tokens only there, and writes them where they
belong. Without a GPU the kernels run in Triton's interpreter."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.core.params import SamplingParams
from tidemill.ops.triton import sampling
from tidemill.ops.triton.sampling_search import search
from tidemill.runtime import device_edits
from tidemill.runtime.device_sampler import DeviceSampler, Pick
from tidemill.runtime.problems import NO_TOKEN_LEFT, NOT_FINITE
from tidemill.runtime.rows import RowState
from tidemill.runtime.sampler import MASKED, Draw, _keep_top, sample
from tidemill.runtime.scores import Scores

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
NUM_ROWS = 1024 if ON_GPU else 300
MAX_LEN = 64
VOCABULARIES = [37, 1000, 128_256] if ON_GPU else [37, 300, 1000]
GREEDY = SamplingParams(temperature=0)


@dataclass
class Request:
    params: SamplingParams
    tokens: list[int] = field(default_factory=lambda: [1, 2, 3])
    num_prompt: int = 3
    seed: int = 0
    stop_ids: list[int] = field(default_factory=list)
    banned_ids: list[int] = field(default_factory=list)
    bad_sequences: list[list[int]] = field(default_factory=list)

    def draw(self) -> Draw:
        tokens = np.array(self.tokens, dtype=np.int64)
        lists = (self.stop_ids, self.banned_ids, self.bad_sequences)
        return Draw(self.params, tokens, self.num_prompt, self.seed, *lists)

    def state(self) -> RowState:
        lists = (self.stop_ids, self.banned_ids, self.bad_sequences)
        return RowState(self.params, self.num_prompt, self.num_prompt, self.seed, *lists, [0], len(self.tokens))


def on_device(logits: torch.Tensor, requests: list[Request]):
    """What the device's sampler reads back, after checking that it wrote the tokens to their rows and nothing else."""
    count, vocab = logits.shape
    sampler = DeviceSampler(NUM_ROWS, vocab, DEVICE)
    before = torch.full((NUM_ROWS + 1, MAX_LEN + 1), 7_777_777, dtype=torch.int32)
    picks = []
    for index, request in enumerate(requests):
        row = (index * 7 + 5) % NUM_ROWS
        before[row, : len(request.tokens)] = torch.tensor(request.tokens, dtype=torch.int32)
        state = request.state()
        sampler.enter(row, state)
        picks.append(Pick(row, state, len(request.tokens)))
    tokens = before.to(DEVICE, copy=True)
    rows, lengths = (
        torch.tensor(numbers, dtype=torch.int32, device=DEVICE)
        for numbers in ([pick.row for pick in picks], [pick.num_tokens for pick in picks])
    )
    sampled = sampler.launch(logits.to(DEVICE, copy=True), picks, rows, lengths, tokens)
    if ON_GPU:
        torch.cuda.synchronize()
    results = sampled.read()
    assert len(results) == count
    for pick, (token, _, _) in zip(picks, results, strict=True):
        if token is not None:
            before[pick.row, pick.num_tokens] = token
    assert torch.equal(tokens.cpu(), before)
    return results


def tokens_of(logits: torch.Tensor, requests: list[Request]) -> list[int | None]:
    return [token for token, _, _ in on_device(logits, requests)]


def expected(logits: torch.Tensor, requests: list[Request]) -> list[int]:
    return sample(logits.clone(), [request.draw() for request in requests]).tolist()


def random_logits(rows: int, vocab: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


@pytest.mark.parametrize("vocab", [37, 300, 1000, 9000])
def test_temperature_zero_is_the_best_token(vocab):
    scores = random_logits(9 if vocab == 9000 else 3, vocab)
    assert tokens_of(scores, [Request(GREEDY)] * len(scores)) == scores.argmax(-1).tolist()


def test_the_first_of_equal_scores_is_the_best():
    scores = torch.zeros(2, 3000)
    scores[0, [1500, 2900]] = 1.0
    assert tokens_of(scores, [Request(GREEDY)] * 2) == [1500, 0]


@triton.jit
def _noise_kernel(bits, noise, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    tl.store(noise + at, sampling.gumbel_of(tl.load(bits + at).to(tl.uint32)))


def test_noise_is_exact_to_its_ends():
    edges = [0, 1, 2, 2**23 - 2, 2**23 - 1, 2**23, 2**23 + 1, 2**24 - 3, 2**24 - 2, 2**24 - 1]
    others = torch.randint(0, 2**24, (4096 - len(edges),), generator=torch.Generator().manual_seed(0)).tolist()
    bits = torch.tensor(edges + others, dtype=torch.int32, device=DEVICE)
    noise = torch.empty(4096, dtype=torch.float32, device=DEVICE)
    _noise_kernel[(1,)](bits, noise, COUNT=4096)
    uniform = (bits.cpu().double() + 0.5) * 2.0**-24
    assert torch.allclose(noise.cpu().double(), -torch.log(-torch.log(uniform)), rtol=2e-7, atol=1e-6)


penalty = st.sampled_from([0.0, 0.0, 0.7, -1.2])
biases = st.dictionaries(st.integers(0, 36), st.sampled_from([-100.0, -2.0, 3.5]), max_size=3)
id_lists = st.lists(st.integers(0, 36), max_size=3)
params_of = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_p=st.sampled_from([1.0, 1.0, 0.9, 0.35]),
    top_k=st.sampled_from([0, -1, 1, 7, 30, 5000]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.6]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.7, 0.8]),
    frequency_penalty=penalty,
    presence_penalty=penalty,
    logit_bias=st.none() | biases,
    allowed_token_ids=st.none() | st.lists(st.integers(0, 36), min_size=1, max_size=20),
    min_tokens=st.integers(0, 5),
)
requests_of = st.builds(
    Request,
    params=params_of,
    tokens=st.lists(st.integers(0, 36), min_size=6, max_size=20),
    num_prompt=st.integers(1, 6),
    seed=st.integers(-(2**63), 2**64 - 1),
    stop_ids=id_lists,
    banned_ids=id_lists,
    bad_sequences=st.lists(st.lists(st.integers(0, 36), min_size=2, max_size=3), max_size=2),
)


@settings(max_examples=60 if ON_GPU else 25, deadline=None, derandomize=True)
@given(requests=st.lists(requests_of, min_size=1, max_size=4), vocab=st.sampled_from(VOCABULARIES), data=st.data())
def test_any_parameters_draw_what_the_reference_draws(requests, vocab, data):
    for request in requests:
        if request.bad_sequences and data.draw(st.booleans()):
            # Bad words whose beginning is there are what matters, and chance rarely makes them.
            request.bad_sequences[0][:-1] = request.tokens[1 - len(request.bad_sequences[0]) :]
    scores = random_logits(len(requests), vocab, seed=data.draw(st.integers(0, 1000)))
    want = [None if token < 0 else token for token in expected(scores, requests)]
    assert tokens_of(scores, requests) == want


@pytest.mark.parametrize("top_p", [1.0, 0.2, 0.6, 0.99])
@pytest.mark.parametrize("top_k", [0, 1, 40, 200])
@pytest.mark.parametrize("min_p", [0.0, 0.02])
def test_the_cut_keeps_what_the_reference_keeps(top_p, top_k, min_p):
    """With little room aside, so that both ways of searching are taken."""
    vocab, count = 300, 2
    params = SamplingParams(top_p=top_p, top_k=top_k, min_p=min_p)
    scores = random_logits(count, vocab, seed=top_k, scale=1.5)
    scores[1, :50] = MASKED
    want = scores.clone()
    if min_p:
        want[want < want.amax(-1, keepdim=True) + math.log(min_p)] = MASKED
    _keep_top(want, [Request(params).draw()] * count)
    sampler = DeviceSampler(count, vocab, DEVICE)
    sampler.enter(1, Request(params).state())
    sampler._send_entered()
    given_scores = scores.to(DEVICE, copy=True)
    rows = torch.ones(count, dtype=torch.int32, device=DEVICE)
    best = sampling.Chunks.empty(count, vocab, DEVICE)
    sampling.scan(given_scores, rows, rows, sampler.table, best, None, scale=True)
    thresholds = torch.empty(count, device=DEVICE)
    search(given_scores, rows, sampler.table, best, torch.empty(count, 32, device=DEVICE), thresholds)
    kept = (given_scores >= thresholds[:, None]) & (given_scores > MASKED)
    assert torch.equal(kept.cpu(), want > MASKED)


def test_equal_scores_at_the_cut_all_stay():
    scores = torch.zeros(40, 37)
    scores[:, 3] = 0.5
    requests = [Request(SamplingParams(top_k=5, temperature=5.0), seed=seed) for seed in range(40)]
    assert len(set(tokens_of(scores, requests))) > 10


@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_a_seed_draws_the_same_in_any_batch(top_p):
    scores = random_logits(12, 300, scale=1.0)
    wanted = Request(SamplingParams(top_p=top_p, temperature=1.4), seed=2**63 + 11)
    others = [Request(SamplingParams(temperature=i % 2, top_k=i, repetition_penalty=1.2), seed=i) for i in range(11)]
    (alone,) = tokens_of(scores[:1], [wanted])
    batch = torch.cat((scores[1:8], scores[:1], scores[8:]))
    assert tokens_of(batch, [*others[:7], wanted, *others[7:]])[7] == alone


def test_other_positions_draw_otherwise():
    scores = torch.zeros(20, 300)
    drawn = tokens_of(scores, [Request(SamplingParams(), tokens=[1] * (i + 1), num_prompt=1) for i in range(20)])
    assert len(set(drawn)) > 15


@pytest.mark.parametrize("more", [{}, {"top_k": 3}])
def test_draws_follow_the_distribution(more):
    count = 1000 if ON_GPU else 50 if more else 200
    scores = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    requests = [Request(SamplingParams(temperature=1.5, **more), seed=seed) for seed in range(count)]
    drawn = tokens_of(scores.repeat(count, 1), requests)
    left = scores[0] / 1.5
    left[more.get("top_k", 4) :] = MASKED
    for token, share in enumerate(left.softmax(-1).tolist()):
        assert abs(drawn.count(token) / count - share) <= 4 * math.sqrt(share * (1 - share) / count)


def test_penalties_count_in_turns_when_rows_are_many(monkeypatch):
    monkeypatch.setattr(device_edits, "COUNT_BYTES", 2 * 4 * 37)
    generator = np.random.default_rng(0)
    requests = [
        Request(
            SamplingParams(temperature=0, repetition_penalty=1.5, frequency_penalty=1.0, presence_penalty=0.5 * i),
            tokens=generator.integers(0, 37, 10 + i).tolist(),
            num_prompt=4,
        )
        for i in range(5)
    ]
    scores = random_logits(5, 37, scale=1.0)
    assert tokens_of(scores, requests) == expected(scores, requests)
    assert expected(scores, requests) != scores.argmax(-1).tolist()


def test_bad_words_and_penalties_see_tokens_that_the_host_has_not_read():
    """Two steps are launched before the first one is read."""
    vocab = 37
    requests = [
        Request(GREEDY, bad_sequences=[[9, 9]]),
        Request(SamplingParams(temperature=0, presence_penalty=2.0)),
        Request(GREEDY),
    ]
    sampler = DeviceSampler(NUM_ROWS, vocab, DEVICE)
    tokens = torch.zeros(NUM_ROWS + 1, MAX_LEN + 1, dtype=torch.int32, device=DEVICE)
    states = [request.state() for request in requests]
    for row, state in enumerate(states):
        sampler.enter(row, state)
    tokens[:3, :3] = torch.tensor([1, 2, 3], device=DEVICE)
    rows = torch.arange(3, dtype=torch.int32, device=DEVICE)
    scores = torch.zeros(3, vocab, device=DEVICE)
    scores[:, 9], scores[:, 4] = 5.0, 4.0
    launched = []
    for length in (3, 4):
        picks = [Pick(row, state, length) for row, state in enumerate(states)]
        lengths = torch.full((3,), length, dtype=torch.int32, device=DEVICE)
        launched.append(sampler.launch(scores.clone(), picks, rows, lengths, tokens))
    if ON_GPU:
        torch.cuda.synchronize()
    assert [[token for token, _, _ in step.read()] for step in launched] == [[9, 9, 9], [4, 4, 9]]


def test_constraints_that_leave_nothing_are_told_and_nothing_is_written():
    params = SamplingParams(allowed_token_ids=[5], min_tokens=2)
    requests = [
        Request(params, stop_ids=[5]),
        Request(GREEDY),
        Request(SamplingParams(allowed_token_ids=[4, 5], top_k=3), banned_ids=[5, 4]),
    ]
    scores = random_logits(3, 37)
    results = on_device(scores, requests)
    assert results == [(None, None, NO_TOKEN_LEFT), (int(scores[1].argmax()), None, None), (None, None, NO_TOKEN_LEFT)]


@pytest.mark.parametrize(
    "more", [{}, {"top_p": 0.7}, {"allowed_token_ids": list(range(30)), "repetition_penalty": 2.0}]
)
def test_numbers_that_are_not_finite_disturb_nobody_else(more):
    params = SamplingParams(temperature=0.8, **more)
    requests = [Request(params, seed=seed) for seed in range(4)]
    scores = random_logits(4, 37)
    want = expected(scores, requests)
    scores[0, 35] = math.nan
    scores[2, 3] = math.inf
    scores[3] = MASKED
    results = on_device(scores, requests)
    assert [problem for _, _, problem in results] == [NOT_FINITE, None, NOT_FINITE, NOT_FINITE]
    assert results[1][0] == want[1]


@pytest.mark.parametrize("more", [{}, {"top_k": 4, "logit_bias": {3: 50.0}}])
def test_logprobs_are_those_of_the_model(more):
    scores = random_logits(4, 300)
    wanted = [None, 3, 0, 5]
    requests = [Request(SamplingParams(logprobs=count, **more), seed=i) for i, count in enumerate(wanted)]
    results = on_device(scores, requests)
    assert results[0][1] is None
    tokens = torch.tensor([token for token, _, _ in results])
    want = Scores(scores[1:], tokens[1:], [3, 0, 5]).read()
    for (_, got, _), correct in zip(results[1:], want, strict=True):
        assert (got.token, got.rank, [i for i, _ in got.top]) == (
            correct.token,
            correct.rank,
            [i for i, _ in correct.top],
        )
        assert got.logprob == pytest.approx(correct.logprob, abs=1e-5)
        assert [value for _, value in got.top] == pytest.approx([value for _, value in correct.top], abs=1e-5)


def test_a_row_that_is_entered_again_has_its_new_parameters():
    vocab = 37
    sampler = DeviceSampler(2, vocab, DEVICE)
    tokens = torch.zeros(3, MAX_LEN + 1, dtype=torch.int32, device=DEVICE)
    rows, lengths = (torch.tensor([number], dtype=torch.int32, device=DEVICE) for number in (1, 3))
    scores = random_logits(1, vocab, scale=0.1)
    for request in (Request(SamplingParams(), seed=5), Request(GREEDY), Request(SamplingParams(top_k=2), seed=6)):
        state = request.state()
        sampler.enter(1, state)
        sampled = sampler.launch(scores.to(DEVICE, copy=True), [Pick(1, state, 3)], rows, lengths, tokens)
        if ON_GPU:
            torch.cuda.synchronize()
        assert [token for token, _, _ in sampled.read()] == expected(scores, [request])

"""The GPU's runner and kernels in Triton's interpreter, on tiny models: a whole engine says what the reference says.

`tests/gpu` asks the same of real cards. The kernels' own tests are in `test_triton_*.py`.
"""

from __future__ import annotations

import pytest
import torch

from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.parity import assert_greedy, reference_of
from tests.helpers.traffic import assert_empty, run_traffic, steps
from tidemill import LLM, SamplingParams
from tidemill.ops import kernels

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="runs in Triton's interpreter: with a GPU, Triton refuses CPU tensors"
)

VOCABULARY = 61
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}
SETTINGS = {"dtype": "float32", "device": "cpu", "block_size": 4, "max_model_len": 32, "max_num_seqs": 3}
GREEDY = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
PROMPTS = [[7, 3, 9, 1, 4], [7, 3, 9, 1, 4, 8, 2, 2, 60], [5], [11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21]]


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    return reference_of(write_checkpoint(folder, "Llama", **SMALL)), str(folder)


@pytest.fixture
def interpreted(monkeypatch):
    """Engines built from now on run the GPU's code path."""
    monkeypatch.setattr(kernels, "FORCED", True)


def device_engine(folder: str, **settings) -> LLM:
    llm = LLM(folder, **{**SETTINGS, **settings})
    assert type(llm._core.runner).__name__ == "DeviceRunner"
    return llm


def answers(llm: LLM, prompts, params) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


def test_a_mixed_batch_in_chunks_with_preemption_and_prefix_hits(llama, interpreted):
    reference, folder = llama
    llm = device_engine(folder, max_num_batched_tokens=7, num_gpu_blocks_override=9)
    found = answers(llm, PROMPTS, GREEDY)
    for prompt, answer in zip(PROMPTS, found, strict=True):
        assert len(answer) == GREEDY.max_tokens
        assert_greedy(reference, prompt, answer)
    stats = llm._core.stats
    assert stats.preemptions > 0 and stats.prefix_hits > 0
    assert_empty(llm)


def test_seeds_penalties_and_scores_are_those_of_the_reference_runner(llama, monkeypatch):
    _, folder = llama
    asked = [
        SamplingParams(temperature=0.9, seed=5, max_tokens=6, ignore_eos=True),
        SamplingParams(temperature=1.1, seed=6, top_k=7, max_tokens=6, ignore_eos=True),
        SamplingParams(temperature=0, repetition_penalty=1.4, logprobs=2, prompt_logprobs=2, max_tokens=4),
    ]
    prompts = PROMPTS[:3]
    want = LLM(folder, **SETTINGS).generate(prompts, asked, use_tqdm=False)
    monkeypatch.setattr(kernels, "FORCED", True)
    got = device_engine(folder).generate(prompts, asked, use_tqdm=False)
    assert [one.outputs[0].token_ids for one in got] == [one.outputs[0].token_ids for one in want]
    for mine, theirs in zip(got[2].prompt_logprobs[1:], want[2].prompt_logprobs[1:], strict=True):
        assert set(mine) == set(theirs)
        assert all(abs(mine[token].logprob - theirs[token].logprob) < 1e-4 for token in mine)
    for mine, theirs in zip(got[2].outputs[0].logprobs, want[2].outputs[0].logprobs, strict=True):
        assert set(mine) == set(theirs)


def test_steps_overlap_and_none_is_computed_for_nobody(llama, interpreted):
    """Two steps are in flight while answers go on; a request that ends by a token the host has not read yet leaves one
    step too many, whose token nobody sees."""
    reference, folder = llama
    llm = device_engine(folder)
    assert llm._core._steps_in_flight == 2
    (free,) = answers(llm, [PROMPTS[0]], GREEDY)
    stop = SamplingParams(temperature=0, max_tokens=6, stop_token_ids=[free[2]])
    (stopped,) = answers(llm, [PROMPTS[0]], stop)
    assert stopped == free[: free.index(free[2]) + 1]
    assert_greedy(reference, PROMPTS[0], free)
    assert_empty(llm)


def test_random_traffic_with_few_blocks_and_aborts_leaves_nothing_behind(llama, interpreted):
    reference, folder = llama
    llm = device_engine(folder, max_num_batched_tokens=8, max_model_len=20, num_gpu_blocks_override=6)
    asked = run_traffic(llm, seed=59, vocab=VOCABULARY, longest=20, waiting=3, until=steps(10))
    assert_empty(llm)
    assert any(one.aborted for one in asked) and llm._core.stats.preemptions > 0
    repeatable = [one for one in asked if one.repeatable]
    assert len(repeatable) > 2
    for one in repeatable:
        assert_greedy(reference, one.prompt, one.tokens)


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("Qwen2", {"num_hidden_layers": 2, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
        ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    ],
    ids=["a-layer-with-a-window", "experts"],
)
def test_other_kinds_of_layers(tmp_path, interpreted, family, config):
    reference = reference_of(write_checkpoint(tmp_path, family, **{**SMALL, **config}))
    llm = device_engine(str(tmp_path), max_num_batched_tokens=8)
    prompts = [PROMPTS[1], PROMPTS[2]]
    for prompt, answer in zip(prompts, answers(llm, prompts, GREEDY), strict=True):
        assert_greedy(reference, prompt, answer)

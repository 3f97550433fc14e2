"""Captured decode steps say what the same steps say launched kernel by kernel, whatever is quantised, and padding or
capturing while requests run changes nobody's answer."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.parity import assert_greedy, prompts_for, reference_of
from tests.helpers.traffic import assert_empty
from tidemill import LLM, SamplingParams

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

WIDE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "initializer_range": 0.1,
}
"""Widths that every quantisation takes."""


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    return reference_of(write_checkpoint(folder, "Llama")), str(folder)


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wide")
    write_checkpoint(folder, "Llama", **WIDE)
    return str(folder)


def engine(folder: str, eager: bool, **settings) -> LLM:
    given = {"dtype": "float32", "device": "cuda", "max_num_seqs": 16, "num_gpu_blocks_override": 64, **settings}
    llm = LLM(folder, enforce_eager=eager, **given)
    assert (llm._core.runner.graphs is None) == eager
    return llm


def answers(llm: LLM, prompts, params) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


def test_any_number_of_sequences_gets_the_tokens_of_transformers(llama):
    """Answers of different lengths: batches shrink through every size, with padding and without."""
    reference, folder = llama
    prompts = prompts_for(4) + prompts_for(5)[:5]
    params = [
        SamplingParams(temperature=0, max_tokens=6 + 3 * index, ignore_eos=True) for index, _ in enumerate(prompts)
    ]
    captured = answers(engine(folder, eager=False), prompts, params)
    for prompt, answer in zip(prompts, captured, strict=True):
        assert_greedy(reference, prompt, answer)
    assert answers(engine(folder, eager=True), prompts, params) == captured


def test_a_size_that_is_captured_while_requests_run_changes_nothing(llama):
    """Three sequences are padded to four until that size has been wanted often enough; meanwhile others hold pages."""
    reference, folder = llama
    llm = engine(folder, eager=False, max_num_seqs=24, block_size=4, num_gpu_blocks_override=256)
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    for count in (5, 11, 3, 9, 21):
        prompts = (prompts_for(count) * 3)[:count]
        prompts = [prompt[:40] for prompt in prompts]
        for prompt, answer in zip(prompts, answers(llm, prompts, params), strict=True):
            assert_greedy(reference, prompt, answer)
    assert_empty(llm)


def test_seeds_draw_the_same_with_and_without_graphs(llama):
    _, folder = llama
    prompts = prompts_for(6)
    params = [
        SamplingParams(temperature=0.9, seed=index, top_k=20, top_p=0.9, max_tokens=20, ignore_eos=True)
        for index, _ in enumerate(prompts)
    ]
    runs = [answers(engine(folder, eager=eager), prompts, params) for eager in (False, True)]
    assert runs[0] == runs[1]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"dtype": "float16"},
        {"quantization": "int4"},
        {"quantization": "int8"},
        {"quantization": "fp8"},
        {"kv_cache_dtype": "fp8"},
        {"kv_cache_dtype": "int8"},
        {"quantization": "int4", "kv_cache_dtype": "fp8"},
    ],
    ids=lambda settings: "-".join(settings.values()) or "bfloat16",
)
def test_narrow_numbers_say_the_same_with_and_without_graphs(wide, settings):
    """Four sequences in step: no padding, so every product has the same shape in both runs, and the same bits."""
    prompts = [prompt[:12] for prompt in prompts_for(7, vocab=200) if len(prompt) >= 12][:4]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    given = {"dtype": "bfloat16", **settings}
    runs = [answers(engine(wide, eager=eager, **given), prompts, params) for eager in (False, True)]
    assert runs[0] == runs[1]
    assert len({token for answer in runs[0] for token in answer}) > 4, "numbers that say nothing"


@pytest.mark.parametrize(
    ("quantization", "dtype", "most"), [("int4", "float32", 1e-2), ("int8", "float32", 1e-2), ("fp8", "bfloat16", 0.6)]
)
def test_quantised_weights_score_a_prompt_as_the_reference_does(wide, quantization, dtype, most):
    """The same packed weights on the CPU, unpacked to float32; fp8 also rounds what it multiplies them with."""
    prompt = prompts_for(8)[6]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)

    def scores(**settings) -> torch.Tensor:
        llm = LLM(wide, quantization=quantization, max_num_seqs=4, num_gpu_blocks_override=16, **settings)
        (output,) = llm.generate([prompt], params, use_tqdm=False)
        found = zip(prompt[1:], output.prompt_logprobs[1:], strict=True)
        return torch.tensor([entry[token].logprob for token, entry in found])

    want, got = scores(device="cpu", dtype="float32"), scores(device="cuda", dtype=dtype)
    assert (want - got).abs().mean() < most

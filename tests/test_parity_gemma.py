"""The real Gemma 3 270M, read from its GGUF: the same greedy tokens as transformers, in a batch with chunks, windows
that slide, and blocks that leave them."""

from __future__ import annotations

from tests.helpers.parity import assert_greedy, reference_of
from tests.helpers.prompts import PROMPTS
from tidemill import LLM, SamplingParams

STORY = "The tide mill stood at the mouth of the river, and its wheel turned twice a day. " * 34
"""More than the window of 512 tokens."""


def test_ten_prompts_continue_as_in_transformers(transformers_gemma3):
    prompts = [*PROMPTS[::6], STORY]
    assert len(prompts) == 10
    llm = LLM("gemma3-270m", dtype="float32", max_model_len=2048, max_num_seqs=6, max_num_batched_tokens=200)
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert len(outputs[-1].prompt_token_ids) > 560
    for output in outputs:
        assert len(output.outputs[0].token_ids) == 32
        assert_greedy(reference_of(transformers_gemma3), output.prompt_token_ids, output.outputs[0].token_ids)
    # Five groups of local layers, one of global ones, and everything given back.
    assert llm._core.config.block_windows == [512] * 5 + [None]
    assert llm._core.stats.kv_usage == 0

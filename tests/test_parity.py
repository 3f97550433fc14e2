"""The real default model against transformers: the same greedy tokens, alone and in mixed batches.

On two slow cores decoding 50 prompts one after the other takes minutes, so by default every seventh runs alone;
TIDEMILL_FULL=1 runs all of them.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from tests.helpers.prompts import PROMPTS
from tidemill import LLM, SamplingParams
from tidemill.weights.location import locate

COUNT = 64
GREEDY = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True)
ALONE = PROMPTS if os.environ.get("TIDEMILL_FULL") else PROMPTS[::7]


def load(**settings: Any) -> LLM:
    return LLM("smollm2", dtype="float32", quantization="none", max_model_len=1024, **settings)


def texts(llm: LLM, prompts: tuple[str, ...]) -> dict[str, list[int]]:
    outputs = llm.generate(list(prompts), GREEDY, use_tqdm=False)
    return {prompt: output.outputs[0].token_ids for prompt, output in zip(prompts, outputs, strict=True)}


@pytest.fixture(scope="module")
def batched() -> dict[str, list[int]]:
    return texts(load(max_num_seqs=25), PROMPTS)


def test_transformers_would_choose_every_one_of_these_tokens(batched, transformers_smollm2):
    """By induction the same as comparing generated texts: each token is transformers' best continuation of the tokens
    before it. One forward pass per prompt instead of 64. The reference is transformers' own reading of the GGUF."""
    from tidemill.text.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(locate("smollm2"))
    for prompt, tokens in batched.items():
        ids = tokenizer.encode(prompt)
        with torch.no_grad():
            logits = transformers_smollm2(torch.tensor([ids + tokens])).logits[0, len(ids) - 1 : -1]
        assert logits.argmax(-1).tolist() == tokens, prompt


def test_alone_gives_the_same(batched):
    llm = load(max_num_seqs=1, enable_prefix_caching=False)
    for prompt in ALONE:
        assert texts(llm, (prompt,))[prompt] == batched[prompt], prompt


def test_small_chunks_preemption_and_prefix_hits_change_nothing(batched):
    llm = load(max_num_seqs=20, max_num_batched_tokens=48, num_gpu_blocks_override=100)
    assert texts(llm, PROMPTS) == batched
    again = PROMPTS[-6:]
    hits = llm._core.stats.prefix_hits
    assert texts(llm, again) == {prompt: batched[prompt] for prompt in again}
    stats = llm._core.stats
    assert stats.prefix_hits > hits > 0 and stats.preemptions > 0 and stats.kv_usage == 0

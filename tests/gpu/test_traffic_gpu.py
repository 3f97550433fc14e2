"""Random traffic on a real card with a tiny pool: nothing leaks, and nobody's answer depends on who else was there.

TIDEMILL_GPU_SECONDS says how long (5 s unless said otherwise).
"""

from __future__ import annotations

import gc
import os

import pytest
import torch

from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.traffic import assert_as_alone, assert_empty, run_traffic, seconds
from tidemill import LLM

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

DURATION = float(os.environ.get("TIDEMILL_GPU_SECONDS", "5"))
FAMILIES = {
    "llama": ("Llama", {}),
    "windows": ("Gemma3", {"head_dim": 16, "sliding_window": 9, "sliding_window_pattern": 2, "num_hidden_layers": 4}),
    "experts": ("Mixtral", {"num_local_experts": 6, "num_experts_per_tok": 2}),
}
MIB = 2**20


def allocated() -> int:
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


@pytest.mark.parametrize("name", FAMILIES)
def test_traffic_with_a_tiny_pool_leaves_nothing_behind(tmp_path, name):
    family, config = FAMILIES[name]
    write_checkpoint(tmp_path, family, **config)
    share = DURATION / len(FAMILIES)
    llm = LLM(
        str(tmp_path),
        dtype="float32",
        device="cuda",
        block_size=16,
        max_model_len=96,
        max_num_batched_tokens=40,
        max_num_seqs=7,
        num_gpu_blocks_override=12 if name != "windows" else 24,
    )
    # The first half meets every batch size: what is compiled, captured or kept for good is there afterwards.
    asked = run_traffic(llm, seed=1, vocab=200, longest=90, until=seconds(share / 2))
    assert_empty(llm)
    before = allocated()
    asked += run_traffic(llm, seed=2, vocab=200, longest=90, until=seconds(share / 2))
    assert_empty(llm)
    # A tensor of the smallest size that stayed of every step would be more than this.
    assert allocated() - before < MIB // 4
    stats = llm._core.stats
    assert stats.preemptions > 0 and stats.prefix_hits > 0 and any(one.aborted for one in asked)
    assert_as_alone(llm, asked, most=40)
    print(f"{name}: {len(asked)} requests in {stats.steps} steps, {stats.preemptions} preemptions")


def test_an_engine_that_is_dropped_gives_its_memory_back(tmp_path):
    write_checkpoint(tmp_path, "Llama")
    levels = []
    for _ in range(3):
        llm = LLM(str(tmp_path), dtype="float32", device="cuda", max_num_seqs=4, num_gpu_blocks_override=64)
        llm.generate([[1, 2, 3]], use_tqdm=False)
        del llm
        levels.append(allocated())
    assert levels[2] <= levels[1] + MIB // 4

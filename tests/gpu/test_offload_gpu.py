"""Weights kept on the host: the card holds less by what was asked, and the answers are the same."""

from __future__ import annotations

import gc

import pytest
import torch

from tests.helpers.checkpoints import write_checkpoint
from tidemill import LLM, SamplingParams

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

LAYERS = 12
SHAPE = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "initializer_range": 0.05,
}
GIB = 2**30


def held_and_said(folder: str, offload: float) -> tuple[int, list[list[int]], int]:
    gc.collect()
    before = torch.cuda.memory_allocated()
    llm = LLM(
        folder,
        dtype="float32",
        device="cuda",
        enforce_eager=True,
        cpu_offload_gb=offload,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        num_gpu_blocks_override=64,
    )
    held = torch.cuda.memory_allocated() - before
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    outputs = llm.generate([[3, 1, 4], [1, 5, 9, 2, 6], list(range(100))], params, use_tqdm=False)
    said = [output.outputs[0].token_ids for output in outputs]
    weights = llm.config.weight_bytes
    return held, said, weights


def test_offloaded_layers_leave_the_card_and_say_the_same(tmp_path):
    write_checkpoint(tmp_path, "Llama", **SHAPE)
    whole, want, weights = held_and_said(str(tmp_path), 0.0)
    asked = 0.5 * weights / GIB
    less, got, _ = held_and_said(str(tmp_path), asked)
    assert got == want
    assert whole - less > 0.98 * asked * GIB

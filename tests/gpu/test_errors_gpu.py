"""What goes wrong with a card ends with its cause and a fix that can be typed. Takes most of the card's memory for a
moment: nothing else should run there meanwhile."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from tests.helpers.checkpoints import write_checkpoint
from tidemill import LLM, SamplingParams
from tidemill.errors import ConfigError, OutOfMemory, TidemillError

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

GIB = 2**30


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("llama")
    write_checkpoint(path, "Llama")
    return str(path)


def test_a_cache_larger_than_the_card_is_refused_before_loading(folder):
    with pytest.raises(OutOfMemory) as caught:
        LLM(folder, device="cuda", num_gpu_blocks_override=10**9)
    assert "num_gpu_blocks_override" in caught.value.message and caught.value.fix


def test_memory_that_others_hold_is_named(folder):
    free, _ = torch.cuda.mem_get_info()
    held = torch.empty(free - GIB, dtype=torch.uint8, device="cuda")
    try:
        with pytest.raises(OutOfMemory) as caught:
            LLM(folder, device="cuda")
        assert "hold" in caught.value.cause and caught.value.fix
    finally:
        del held
        torch.cuda.empty_cache()


def test_running_out_of_memory_at_the_start_has_a_cause_and_a_fix(folder):
    """The allocator's own limit stands for a card whose memory went elsewhere after the plan was made."""
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(0.002)
    try:
        with pytest.raises(TidemillError) as caught:
            LLM(folder, device="cuda", dtype="float32", max_num_seqs=4, kv_cache_memory_bytes=2 * GIB)
        assert "memory" in caught.value.message and "--" in (caught.value.fix or "")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()
    llm = LLM(folder, device="cuda", dtype="float32", max_num_seqs=4, num_gpu_blocks_override=64)
    assert llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2), use_tqdm=False)[0].finished


def test_types_and_devices_that_are_not_there_are_refused_by_name(folder):
    with pytest.raises(ConfigError, match="cuda:7"):
        LLM(folder, device="cuda:7")
    with pytest.raises(ConfigError, match="awq"):
        LLM(folder, device="cuda", quantization="awq")


HIDDEN = """
import sys
from tidemill import LLM
from tidemill.errors import ConfigError
assert LLM(sys.argv[1]).config.device == "cpu"
try:
    LLM(sys.argv[1], device="cuda")
except ConfigError as error:
    print("refused:", error.cause, "|", error.fix)
"""


def test_a_card_that_is_hidden_is_not_used_and_the_variable_is_named(folder):
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", HIDDEN, folder]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert "refused:" in done.stdout and "CUDA_VISIBLE_DEVICES" in done.stdout, done.stderr[-2000:]

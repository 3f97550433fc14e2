"""A family against its reference: same greedy tokens, same logits, through the normal path from disk, in a mixed batch
with chunked prefill, prefix hits and preemption. Every family's test file drives these."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch

from tidemill import LLM, SamplingParams
from tidemill.config import EngineArgs
from tidemill.core.block_groups import pages_for
from tidemill.engine.prepare import prepare

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
"""Where engines run here unless told otherwise: references run on the same one."""

Reference = Callable[[torch.Tensor], torch.Tensor]
"""Token ids [1, length] -> logits [1, length, vocabulary]."""


def prompts_for(seed: int, vocab: int = 200) -> list[list[int]]:
    """Lengths around block and window edges; some share a prefix of more than a block."""
    rng = random.Random(seed)
    shared = [rng.randrange(vocab) for _ in range(24)]
    lengths = (1, 4, 15, 16, 17, 40, 60)
    prompts = [[rng.randrange(vocab) for _ in range(length)] for length in lengths]
    return prompts + [shared + [rng.randrange(vocab) for _ in range(extra)] for extra in (0, 3, 9)]


def reference_of(model: Any) -> Reference:
    """A transformers model as a function, without its cache, on the device the engine runs on."""
    model.to(DEVICE)
    return lambda ids: model(ids.to(DEVICE), use_cache=False).logits.cpu()


@torch.no_grad()
def assert_greedy(reference: Reference, prompt: list[int], answer: list[int]) -> None:
    """Every token of the answer is the reference's best one after the tokens before it: by induction, the same text."""
    logits = reference(torch.tensor([[*prompt, *answer]]))[0, len(prompt) - 1 : -1]
    assert answer == logits.argmax(-1).tolist(), f"prompt of {len(prompt)} tokens"


def assert_same_tokens(reference: Reference, folder: str, max_len: int = 96, **args: Any) -> LLM:
    """Ten prompts at once, few blocks and short steps, twice, so that the second time they are in the cache."""
    prompts = [prompt for prompt in prompts_for(1) if len(prompt) + 20 <= max_len]
    settings = {
        "dtype": "float32",
        "block_size": 4,
        "max_model_len": max_len,
        "max_num_batched_tokens": 13,
        "max_num_seqs": 6,
        **args,
    }
    windows = prepare(EngineArgs(folder, **settings)).config.block_windows
    blocks = int(1.6 * pages_for(max_len, settings["block_size"], windows, settings["max_num_batched_tokens"]))
    llm = LLM(folder, num_gpu_blocks_override=blocks, **settings)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    answers = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
    for prompt, answer in zip(prompts, answers, strict=True):
        assert len(answer) == 20
        assert_greedy(reference, prompt, answer)
    again = llm.generate(prompts, params, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in again] == answers
    stats = llm._core.stats
    assert stats.preemptions > 0 and stats.prefix_hits > 0 and stats.kv_usage == 0
    return llm


@torch.no_grad()
def assert_same_logits(reference: Reference, folder: str, tolerance: float = 1e-4, **args: Any) -> None:
    """The best 20 scores at every position of a prompt computed in chunks of 7."""
    llm = LLM(folder, dtype="float32", block_size=4, max_num_batched_tokens=7, max_num_seqs=4, **args)
    prompt = prompts_for(2)[5]
    want = reference(torch.tensor([prompt]))[0].log_softmax(-1)
    (output,) = llm.generate([prompt], SamplingParams(max_tokens=1, prompt_logprobs=20), use_tqdm=False)
    assert output.prompt_logprobs[0] is None
    for position, scores in enumerate(output.prompt_logprobs[1:]):
        assert prompt[position + 1] in scores
        for token, score in scores.items():
            assert abs(score.logprob - want[position, token].item()) < tolerance

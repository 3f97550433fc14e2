"""transformers on the same card: its continuous batching for speed, its plain forward pass for numbers."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from gpu_parts.driving import release
from gpu_parts.shapes import Shape


def random_model(shape: Shape, dtype: torch.dtype = torch.bfloat16, layers: int | None = None) -> Any:
    """transformers' model of this shape with random weights, made on the card."""
    import transformers

    config = transformers.AutoConfig.for_model(**shape.config())
    config.num_hidden_layers = layers or shape.layers
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    return model.eval()


def continuous_batching_seconds(model: Any, prompts: list[list[int]], max_tokens: int, limit: float) -> float:
    """Seconds from handing in all prompts to the last answer. What it does before it takes requests (warming up) is
    not counted."""
    import transformers

    settings = transformers.GenerationConfig(max_new_tokens=max_tokens, do_sample=False, eos_token_id=-1)
    finished = tokens = 0
    with model.continuous_batching_context_manager(generation_config=settings, block=True, timeout=5) as manager:
        began = time.perf_counter()
        manager.add_requests(inputs=prompts, max_new_tokens=max_tokens)
        while finished < len(prompts):
            result = manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                finished += 1
                tokens += len(result.generated_tokens)
            elif result is None and not manager.is_running():
                raise RuntimeError("transformers' generation thread ended early")
            if time.perf_counter() - began > limit:
                raise TimeoutError(f"transformers finished {finished} of {len(prompts)} requests in {limit:.0f} s")
        seconds = time.perf_counter() - began
    if tokens < max_tokens * len(prompts):
        raise RuntimeError(f"transformers gave {tokens} tokens instead of {max_tokens} for each request")
    return seconds


@torch.no_grad()
def write_and_score(shape: Shape, layers: int, prompt: list[int], folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Save a random model with fewer layers in `folder`; its log-probabilities at every position of the prompt in bf16,
    and of the same weights computed in float32, both on the host."""
    model = random_model(shape, layers=layers)
    model.save_pretrained(folder)
    ids = torch.tensor([prompt], device="cuda")
    found = [model(ids, use_cache=False).logits[0].float().log_softmax(-1).cpu()]
    model = model.float()
    found.append(model(ids, use_cache=False).logits[0].log_softmax(-1).cpu())
    del model
    release()
    return found[0], found[1]

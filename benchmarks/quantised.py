"""What quantised weights cost and save on a CPU: speed and memory beside bf16 and float32, in the same run.

    .venv/bin/python benchmarks/quantised.py                       # SmolLM2, and the shape of a 1B Llama
    .venv/bin/python benchmarks/quantised.py --only smollm2 --rounds 5

Every variant of a model is in memory at once, and rounds go over all of them, a few decode steps each, because a shared
machine drifts within minutes; medians are compared. Writes benchmarks/results/quantised.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from gpu_parts.driving import drain, random_prompts
from gpu_parts.shapes import Shape
from tidemill import LLM, SamplingParams
from tidemill.engine.messages import Add
from tidemill.models.decoder import Decoder
from tidemill.quant.packed import PackedWeight

RESULTS = Path(__file__).parent / "results"
LLAMA_1B = Shape(
    "llama-3.2-1b", "LlamaForCausalLM", hidden=2048, inner=8192, layers=16, heads=32, kv_heads=8, vocab=128256,
    head_dim=64, tied=True, extra=(("max_position_embeddings", 8192), ("rope_theta", 500000.0)),
)  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "bf16": {"dtype": "bfloat16", "quantization": None},
    "float32": {"dtype": "float32", "quantization": None},
    "int8": {"dtype": "float32", "quantization": "int8"},
    "int4": {"dtype": "float32", "quantization": "int4"},
}
BATCHES = (1, 32)
CONTEXT = 64
WARM_UP_STEPS, STEPS = 2, 6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="smollm2,llama-1b", help="models, separated by commas")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    found: dict[str, Any] = {}
    for name in args.only.split(","):
        found[name] = measure(name, args.rounds)
        print(table(name, found[name]), flush=True)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "quantised.json").write_text(json.dumps(found, indent=1) + "\n")


def measure(name: str, rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        engines = opened(name, Path(folder))
    times: dict[str, dict[int, list[float]]] = {variant: {batch: [] for batch in BATCHES} for variant in engines}
    for _ in range(rounds):
        for batch in BATCHES:
            for variant, llm in engines.items():
                times[variant][batch] += step_seconds(llm, batch)
    return {
        variant: {
            "ms": {str(batch): 1e3 * statistics.median(times[variant][batch]) for batch in BATCHES},
            "weights_mb": weight_bytes(llm) / 1e6,
            "planned_mb": llm.config.weight_bytes / 1e6,
        }
        for variant, llm in engines.items()
    }


def opened(name: str, folder: Path) -> dict[str, LLM]:
    shared = {"max_model_len": 512, "max_num_seqs": max(BATCHES), "kv_cache_memory_bytes": 2**30}
    if name != "smollm2":
        model = str(LLAMA_1B.write(folder))
        return {variant: LLM(model, load_format="dummy", **chosen, **shared) for variant, chosen in VARIANTS.items()}
    engines = {}
    for variant, chosen in VARIANTS.items():
        engines[variant] = LLM(name, **{**chosen, "quantization": chosen["quantization"] or "none"}, **shared)
    engines["as stored (Q4_1)"] = LLM(name, dtype="float32", **shared)
    return engines


def step_seconds(llm: LLM, batch: int) -> list[float]:
    """Decode steps in which every sequence of the batch gets a token."""
    core, vocab = llm._core, llm.config.vocab_size
    params = SamplingParams(temperature=0, max_tokens=256, ignore_eos=True)
    ids = [f"bench-{number}" for number in range(batch)]
    for request, prompt in zip(ids, random_prompts(batch, CONTEXT, vocab, seed=time.monotonic_ns()), strict=True):
        core.add(Add(request, prompt, params))
    answered: set[str] = set()
    while len(answered) < batch:
        answered |= {output.id for output in core.step() if output.token_ids}
    for _ in range(WARM_UP_STEPS):
        core.step()
    found = []
    for _ in range(STEPS):
        began = time.perf_counter()
        outputs = core.step()
        found.append(time.perf_counter() - began)
        assert len(outputs) == batch, "not a pure decode step"
    core.abort(ids)
    drain(llm)
    return found


def weight_bytes(llm: LLM) -> int:
    """What the model's parameters really hold."""
    model = llm._core.runner.model
    assert isinstance(model, Decoder)
    seen: dict[int, int] = {}
    for parameter in model.parameters():
        target = getattr(parameter.target, "weight", parameter.target)
        for tensor in target.tensors() if isinstance(target, PackedWeight) else (target,):
            storage = tensor.untyped_storage()
            seen[storage.data_ptr()] = storage.nbytes()
    return sum(seen.values())


def table(name: str, found: dict[str, Any]) -> str:
    lines = [f"\n### {name}", "", "| weights | MB, planned | " + " | ".join(
        f"batch {batch}, ms a step | x bf16 | x float32" for batch in BATCHES) + " |"]  # fmt: skip
    lines.append("|" + "---|" * (2 + 3 * len(BATCHES)))
    for variant, numbers in found.items():
        cells = [variant, f"{numbers['weights_mb']:.0f}, {numbers['planned_mb']:.0f}"]
        for batch in map(str, BATCHES):
            mine = numbers["ms"][batch]
            cells += [f"{mine:.1f}"] + [f"{found[peer]['ms'][batch] / mine:.2f}" for peer in ("bf16", "float32")]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()

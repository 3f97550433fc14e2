"""What the shape of a family costs when decoding, beside a Llama that streams as many weights, in the same run.

    .venv/bin/python benchmarks/families.py                        # every pair, batch 1 and 8
    .venv/bin/python benchmarks/families.py --only mixtral --rounds 3

A mixture of experts is compared with a dense Llama of its active size, Gemma and Phi with a Llama of equal weight
bytes. Models are random and built straight from descriptions, with no checkpoint on disk. Each round alternates between
the two, step by step, because a shared machine drifts within minutes; medians are compared. Writes
benchmarks/results/families.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from tidemill.core.params import SamplingParams
from tidemill.core.step import NewRow, Slice, Step
from tidemill.layers.attention import PagedAttention
from tidemill.layers.parameter import Placement
from tidemill.models.decoder import Decoder
from tidemill.models.registry import describe
from tidemill.runtime.kv_cache import KVCache
from tidemill.runtime.rows import Rows
from tidemill.runtime.runner import Runner

RESULTS = Path(__file__).parent / "results"
BLOCK_SIZE = 16
CONTEXT = 256

Config = dict[str, Any]

LLAMA: Config = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 1024,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
FAMILIES: dict[str, Config] = {
    "mixtral": {
        **LLAMA,
        "architectures": ["MixtralForCausalLM"],
        "intermediate_size": 1792,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "gemma2": {
        **LLAMA,
        "architectures": ["Gemma2ForCausalLM"],
        "vocab_size": 64000,
        "hidden_size": 1152,
        "intermediate_size": 4608,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "sliding_window": 4096,
    },
    "gemma3": {
        **LLAMA,
        "architectures": ["Gemma3ForCausalLM"],
        "vocab_size": 64000,
        "hidden_size": 1152,
        "intermediate_size": 3456,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "sliding_window": 512,
    },
    "phi3": {
        **LLAMA,
        "architectures": ["Phi3ForCausalLM"],
        "num_key_value_heads": 16,
        "intermediate_size": 2816,
        "original_max_position_embeddings": 4096,
    },
    "phi2": {
        **LLAMA,
        "architectures": ["PhiForCausalLM"],
        "vocab_size": 51200,
        "num_key_value_heads": 16,
        "intermediate_size": 4096,
        "hidden_act": "gelu_new",
        "partial_rotary_factor": 0.5,
        "tie_word_embeddings": False,
    },
}
"""The published shapes, scaled to 150 to 300 million weights that a step streams."""


@dataclass(frozen=True)
class Measurement:
    family: str
    batch: int
    round: int
    family_mb: float
    """Weights a step of one token streams."""
    llama_mb: float
    family_ms: float
    """Median time of a decode step."""
    llama_ms: float
    ratio: float


class Decoding:
    """A random model with `batch` sequences in the middle of their answers."""

    def __init__(self, raw: Config, batch: int, steps: int) -> None:
        place = Placement(torch.float32, torch.device("cpu"))
        self.spec = describe(raw)
        max_len = CONTEXT + steps
        self.model = Decoder(self.spec, max_len, place)
        self._randomise()
        self.batch, self.position = batch, CONTEXT - 1
        layout, per_row = self.spec.shape.layout, -(-max_len // BLOCK_SIZE)
        groups = len(layout.windows)
        cache = KVCache(layout, groups * batch * per_row, BLOCK_SIZE, place)
        for tensor in (tensor for slot in cache.slots for tensor in slot if tensor is not None):
            # What is in it does not matter, but pages that were never written would all be the same one.
            tensor.normal_()
        rows = Rows(batch, max_len, BLOCK_SIZE, cache.padding_block, groups)
        attention = PagedAttention(cache.slots, layout, self.spec.alibi)
        self.runner = Runner(self.model, cache, rows, attention, place.device)
        pages = torch.arange(groups * batch * per_row).view(batch, groups, per_row).tolist()
        generator = torch.Generator().manual_seed(0)
        prompts = torch.randint(self.spec.vocab_size, (batch, CONTEXT), generator=generator).tolist()
        params = SamplingParams(temperature=0, max_tokens=steps, ignore_eos=True)
        new = [NewRow(row, prompts[row], CONTEXT, params, 0, [], []) for row in range(batch)]
        self._launch(new, pages)

    def _randomise(self) -> None:
        """Numbers of a realistic size; a million of them, repeated, is as good as more."""
        some = torch.randn(1_000_003, generator=torch.Generator().manual_seed(0)) * 0.02
        for parameter in self.model.parameters():
            target = parameter.target
            if target.dim() == 1:
                target.fill_(1.0)
            else:
                target.copy_(some.repeat(-(-target.numel() // len(some)))[: target.numel()].view(target.shape))

    def step(self) -> float:
        """One token for every sequence; the seconds it took."""
        began = time.perf_counter()
        self._launch([], [[[] for _ in self.runner.rows.tables]] * self.batch)
        return time.perf_counter() - began

    def _launch(self, new: list[NewRow], pages: list[list[list[int]]]) -> None:
        slices = [Slice(row, self.position, 1, pages[row], True) for row in range(self.batch)]
        result = self.runner.launch(Step(self.position, new, slices)).result()
        assert all(one.token is not None for one in result.slices), result
        self.position += 1

    def streamed(self) -> int:
        """Bytes of weights that one token needs: all but the experts it is not routed to, and rows of the embedding."""
        total = sum(parameter.target.nbytes for parameter in self.model.parameters())
        if not self.spec.tie_embeddings:
            total -= self.model.embedding.weight.nbytes
        for layer, built in zip(self.spec.layers, self.model.layers, strict=True):
            if hasattr(layer.mlp, "experts"):
                share = 1 - layer.mlp.top_k / layer.mlp.experts
                total -= int(share * (built.mlp.up.nbytes + built.mlp.down.nbytes))
        return total


def llama_beside(family: Config, streamed: int) -> Config:
    """A Llama of the same depth, vocabulary and widths of hidden states, queries and cache, whose MLP takes up what the
    family's other weights leave."""
    raw = {**LLAMA, **{key: family[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers")}}
    hidden, layers = raw["hidden_size"], raw["num_hidden_layers"]
    scale = family.get("head_dim", hidden // family["num_attention_heads"]) / 64
    heads, kv_heads = (int(family[f"num_{kind}_heads"] * scale) for kind in ("attention", "key_value"))
    raw |= {"head_dim": 64, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
    raw["tie_word_embeddings"] = family["tie_word_embeddings"]
    attention = 2 * (heads + kv_heads) * 64 * hidden
    rest = streamed // 4 - raw["vocab_size"] * hidden - layers * attention
    raw["intermediate_size"] = round(rest / (3 * hidden * layers))
    return raw


def measure(family: str, batch: int, rounds: int, steps: int) -> list[Measurement]:
    whole = (rounds + 1) * steps
    ours = Decoding(FAMILIES[family], batch, whole)
    llama = Decoding(llama_beside(FAMILIES[family], ours.streamed()), batch, whole)
    found = []
    for number in range(rounds):
        times = [(ours.step(), llama.step()) for _ in range(steps)]
        mine, other = (statistics.median(pair[side] for pair in times) for side in (0, 1))
        megabytes = [one.streamed() / 1e6 for one in (ours, llama)]
        found.append(Measurement(family, batch, number, *megabytes, mine * 1e3, other * 1e3, mine / other))
    return found


def table(found: list[Measurement]) -> str:
    lines = [
        f"float32, {CONTEXT} tokens of context, {torch.get_num_threads()} threads, medians of rounds",
        "",
        "| family | batch | weights, MB | Llama's, MB | step, ms | Llama's, ms | ratio (lowest to highest round) |",
        "|---|---|---|---|---|---|---|",
    ]
    for family, batch in dict.fromkeys((one.family, one.batch) for one in found):
        own = [one for one in found if (one.family, one.batch) == (family, batch)]
        ratios = [one.ratio for one in own]
        mine, other = (statistics.median(getattr(one, key) for one in own) for key in ("family_ms", "llama_ms"))
        lines.append(
            f"| {family} | {batch} | {own[0].family_mb:.0f} | {own[0].llama_mb:.0f} | {mine:.1f} | {other:.1f} "
            f"| {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(FAMILIES), help="families, separated by commas")
    parser.add_argument("--batch", default="1,8", type=lambda text: [int(part) for part in text.split(",")])
    parser.add_argument("--rounds", default=5, type=int)
    parser.add_argument("--steps", default=10, type=int, help="decode steps of each model per round")
    args = parser.parse_args()
    found: list[Measurement] = []
    for family in args.only.split(","):
        for batch in args.batch:
            found += measure(family, batch, args.rounds, args.steps)
            print(table(found[-args.rounds :]).splitlines()[-1], flush=True)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "families.json").write_text(json.dumps([asdict(one) for one in found], indent=1) + "\n")
    print(f"\n{table(found)}\nwritten to {RESULTS}/families.json")


if __name__ == "__main__":
    main()

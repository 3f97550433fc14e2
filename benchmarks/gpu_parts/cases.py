"""The cases and their bars, in the order in which they matter. Each adds rows to the report of its run."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from gpu_parts import driving, floors, peer
from gpu_parts.driving import Decoded, opened, random_prompts
from gpu_parts.report import Report, Row
from gpu_parts.shapes import LLAMA_8B, MIXTRAL_8_LAYERS, QWEN3_0_6B, Shape
from tidemill import LLM, SamplingParams

PROMPT = 8192
GIB = 2**30
START_LIMIT = 90.0
"""Seconds after which a start counts as hung."""
NOT_MEASURED = "not measured in this run"
EIGHT_B = {"max_model_len": PROMPT + 256, "max_num_batched_tokens": PROMPT}


@dataclass
class Run:
    report: Report
    folder: Path
    peer_requests: int
    began: float
    figures: dict[str, float] = field(default_factory=dict)
    """What later cases compare with, by name, in plain units (seconds, bytes a second, tokens a second)."""

    def say(self, text: str) -> None:
        print(f"[{time.perf_counter() - self.began:6.1f} s] {text}", flush=True)

    def add(self, row: Row) -> None:
        self.report.rows.append(row)
        self.say(f"{row.case}: {row.measured}; {row.share} (bar {row.bar or 'none'}, pass {row.passed})")

    def ratio(self, name: str, value: float) -> float | None:
        """How many times `value` goes into the figure of that name."""
        return self.figures[name] / value if name in self.figures else None


def floors_of_the_card(run: Run) -> None:
    run.figures["bandwidth"] = bandwidth = floors.copy_bandwidth()
    driving.release()
    run.figures["matmul"] = rate = floors.matmul_rate()
    run.add(Row("floor: device-to-device copy", f"{bandwidth / 1e12:.2f} TB/s read and written"))
    run.add(Row("floor: bf16 matmul of 8192^3", f"{rate / 1e12:.0f} TFLOP/s"))
    gemms = floors.GemmSteps(LLAMA_8B)
    for batch in (1, 64, 256):
        run.figures[f"gemm {batch}"] = seconds = gemms.seconds(batch)
        run.add(Row(f"floor: matmuls of a decode step, batch {batch}", f"{seconds * 1e3:.2f} ms"))


def bf16(run: Run) -> None:
    """Everything that one engine with the 8B shapes in bf16 can show."""
    allocated = torch.cuda.memory_allocated()
    began = time.perf_counter()
    with opened(LLAMA_8B, run.folder, **EIGHT_B) as llm:
        run.say(f"engine ready in {time.perf_counter() - began:.1f} s")
        built = torch.cuda.memory_allocated() - allocated
        one = driving.decode(llm, 1, 512, LLAMA_8B.vocab, steps=120)
        run.figures["bf16 decode 1"] = one.median
        _decode_row(run, "bf16, batch 1 decode, context 512", one, ">= 210 tokens/s", one.rate >= 210)
        run.figures["bf16 prompt"] = seconds = driving.first_token_seconds(llm, PROMPT, LLAMA_8B.vocab)
        _prompt_row(run, "bf16, one 8k prompt", seconds, 0.6)
        for batch, context, least in ((64, 980, 0.8), (256, 550, 0.7)):
            found = driving.decode(llm, batch, context, LLAMA_8B.vocab)
            run.figures[f"bf16 decode {batch}"] = found.median
            share = _share(run, found)
            case = f"bf16, batch {batch} decode, context {found.context:.0f}"
            _decode_row(run, case, found, f">= {least:.0%} of floor", None if share is None else share >= least)
        _offline_row(run, llm)
        _prefix_row(run, llm)
        _memory_rows(run, llm, built)


def _floor(run: Run, found: Decoded) -> float | None:
    """Seconds of the step's matmuls alone, and of reading its keys and values once."""
    if f"gemm {found.batch}" not in run.figures:
        return None
    read = found.batch * found.context * LLAMA_8B.kv_bytes_per_token
    return run.figures[f"gemm {found.batch}"] + read / run.figures["bandwidth"]


def _share(run: Run, found: Decoded) -> float | None:
    floor = _floor(run, found)
    return None if floor is None else floor / found.median


def _decode_row(run: Run, case: str, found: Decoded, bar: str, passed: bool | None) -> None:
    floor, share = _floor(run, found), _share(run, found)
    run.add(
        Row(
            case,
            f"{found.median * 1e3:.2f} ms a step, {found.rate:,.0f} tokens/s",
            NOT_MEASURED if floor is None else f"{floor * 1e3:.2f} ms",
            "" if share is None else f"{share:.0%}",
            bar,
            passed,
            {"median_s": found.median, "mean_s": found.mean, "host_s": found.host, "context": found.context},
        )
    )


def _prompt_row(run: Run, case: str, seconds: float, least: float) -> None:
    rate = LLAMA_8B.prompt_flops(PROMPT) / seconds
    full = run.figures.get("matmul")
    run.add(
        Row(
            case,
            f"{seconds * 1e3:.0f} ms to the first token, {rate / 1e12:.0f} TFLOP/s",
            NOT_MEASURED if full is None else f"{full / 1e12:.0f} TFLOP/s",
            "" if full is None else f"{rate / full:.0%}",
            f">= {least:.0%} of the matmul rate",
            None if full is None else rate / full >= least,
            {"seconds": seconds, "flops_per_s": rate},
        )
    )


def _offline_row(run: Run, llm: LLM) -> None:
    found = driving.generate(llm, random_prompts(256, 512, LLAMA_8B.vocab, seed=11), 128)
    run.figures["offline rate"] = found.rate
    run.add(
        Row(
            "256 requests, 512 in, 128 out, offline",
            f"{found.rate:,.0f} output tokens/s",
            share=f"{found.seconds:.2f} s in all",
            bar=">= 5,000 tokens/s",
            passed=found.rate >= 5000,
            numbers={"seconds": found.seconds, "rate": found.rate},
        )
    )


def _shared_prefix_prompts(count: int, vocab: int) -> list[list[int]]:
    (shared,) = random_prompts(1, 2048, vocab, seed=20)
    return [shared + own for own in random_prompts(count, 32, vocab, seed=21)]


def _prefix_row(run: Run, llm: LLM) -> None:
    found = driving.generate(llm, _shared_prefix_prompts(1000, LLAMA_8B.vocab), 8)
    run.figures["prefix seconds"] = found.seconds
    run.add(
        Row(
            "1,000 requests, shared 2k prefix, 8 out: hits",
            f"{found.prefix_share:.1%} of prompt tokens, {found.seconds:.2f} s",
            bar="> 95%",
            passed=found.prefix_share > 0.95,
            numbers={"seconds": found.seconds, "hits": found.prefix_share},
        )
    )


def _memory_rows(run: Run, llm: LLM, built: int) -> None:
    """What was planned before anything was loaded beside what was taken: of torch after the start, by steps as large as
    they get, and of the whole card."""
    config, allocated = llm.config, torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    driving.first_token_seconds(llm, PROMPT, LLAMA_8B.vocab, times=1)
    driving.generate(llm, random_prompts(256, 32, LLAMA_8B.vocab, seed=40), 4)
    peak = torch.cuda.max_memory_allocated() - allocated
    free, total = torch.cuda.mem_get_info()
    parts = {**config.plan, "KV cache": config.kv_bytes}
    resident = sum(parts.values()) - parts["activations"] - parts.get("CUDA", 0)
    rows = [
        ("weights, cache, tables and graphs", resident, built),
        ("the largest steps beside these", parts["activations"], peak),
        ("the whole card", sum(parts.values()), total - free),
    ]
    for part, plan, measured in rows:
        numbers = {"planned": plan, "measured": measured}
        share = f"{measured / plan:.2f}x the plan"
        run.add(
            Row(
                f"memory: {part}",
                f"{measured / GIB:.2f} GiB",
                f"{plan / GIB:.2f} GiB planned",
                share,
                "",
                None,
                numbers,
            )
        )
    by_part = ", ".join(f"{part} {size / GIB:.2f}" for part, size in parts.items())
    run.report.notes.append(f"memory planned by part, GiB: {by_part}; the card has {total / GIB:.1f}")


def peer_batching(run: Run) -> None:
    model = peer.random_model(LLAMA_8B)
    prompts = random_prompts(run.peer_requests, 512, LLAMA_8B.vocab, seed=11)
    seconds = peer.continuous_batching_seconds(model, prompts, 128, limit=120)
    rate = 128 * len(prompts) / seconds
    ours = run.ratio("offline rate", rate)
    run.add(
        Row(
            f"the same by transformers' continuous batching, {len(prompts)} requests",
            f"{rate:,.0f} output tokens/s",
            share="" if ours is None else f"ours {ours:.1f}x",
            bar="ours >= 9x",
            passed=None if ours is None else ours >= 9,
            numbers={"rate": rate, "seconds": seconds},
        )
    )


def uncached(run: Run) -> None:
    """A tenth of the requests, as each costs the same without a cache; the ratio counts ten times its seconds."""
    with opened(LLAMA_8B, run.folder, enable_prefix_caching=False, **EIGHT_B) as llm:
        prompts = _shared_prefix_prompts(100, LLAMA_8B.vocab)
        driving.generate(llm, prompts[:4], 2)
        found = driving.generate(llm, prompts, 8)
    faster = 10 * found.seconds / run.figures["prefix seconds"] if "prefix seconds" in run.figures else None
    run.add(
        Row(
            "shared 2k prefix without the cache, 100 of the 1,000 requests",
            f"{found.seconds:.2f} s, so {10 * found.seconds:.0f} s for 1,000",
            share="" if faster is None else f"cached {faster:.1f}x",
            bar="cached >= 5x",
            passed=None if faster is None else faster >= 5,
            numbers={"seconds": found.seconds},
        )
    )


def int4(run: Run) -> None:
    with opened(LLAMA_8B, run.folder, quantization="int4", **EIGHT_B) as llm:
        for batch, context, least in ((1, 512, 2.2), (64, 980, 1.0)):
            found = driving.decode(llm, batch, context, LLAMA_8B.vocab)
            _against_bf16(run, f"W4A16, batch {batch} decode", f"decode {batch}", found.median, least)
        seconds = driving.first_token_seconds(llm, PROMPT, LLAMA_8B.vocab, times=2)
        _against_bf16(run, "W4A16, one 8k prompt", "prompt", seconds, None)


def fp8(run: Run) -> None:
    with opened(LLAMA_8B, run.folder, quantization="fp8", **EIGHT_B) as llm:
        for batch, context, least in ((1, 512, 1.5), (64, 980, None)):
            found = driving.decode(llm, batch, context, LLAMA_8B.vocab)
            _against_bf16(run, f"FP8 W8A8, batch {batch} decode", f"decode {batch}", found.median, least)
        seconds = driving.first_token_seconds(llm, PROMPT, LLAMA_8B.vocab)
        _against_bf16(run, "FP8 W8A8, one 8k prompt", "prompt", seconds, 1.3)


def _against_bf16(run: Run, case: str, figure: str, seconds: float, least: float | None) -> None:
    faster = run.ratio(f"bf16 {figure}", seconds)
    run.add(
        Row(
            case,
            f"{seconds * 1e3:.2f} ms",
            share="" if faster is None else f"{faster:.2f}x bf16",
            bar="" if least is None else f">= {least}x bf16",
            passed=None if faster is None or least is None else faster >= least,
            numbers={"seconds": seconds},
        )
    )


def small(run: Run) -> None:
    """A model whose steps are so short that the host decides."""
    with opened(QWEN3_0_6B, run.folder, max_model_len=4096) as llm:
        found = driving.decode(llm, 1, 512, QWEN3_0_6B.vocab, steps=200)
    run.add(
        Row(
            "Qwen3-0.6B, batch 1 decode, context 512",
            f"{found.median * 1e3:.2f} ms a step, {found.rate:,.0f} tokens/s",
            bar=">= 450 tokens/s",
            passed=found.rate >= 450,
            numbers={"median_s": found.median, "mean_s": found.mean},
        )
    )
    run.add(
        Row(
            "Qwen3-0.6B, the host's part of a step",
            f"{found.host * 1e3:.2f} ms not waiting for the device",
            bar="< 0.4 ms",
            passed=found.host < 0.4e-3,
            numbers={"host_s": found.host},
        )
    )


def experts(run: Run) -> None:
    shape = MIXTRAL_8_LAYERS
    with opened(shape, run.folder, max_model_len=4096) as llm:
        for batch in (1, 64):
            # Sequences that all say the same would all go to the same experts.
            found = driving.decode(llm, batch, 512, shape.vocab, temperature=1.0)
            _routed_row(run, shape, found)


def _routed_row(run: Run, shape: Shape, found: Decoded) -> None:
    moved = shape.routed_bytes(found.batch) + found.batch * found.context * shape.kv_bytes_per_token
    floor = moved / run.figures["bandwidth"] if "bandwidth" in run.figures else None
    share = None if floor is None else floor / found.median
    run.add(
        Row(
            f"Mixtral, {shape.layers} layers, batch {found.batch} decode",
            f"{found.median * 1e3:.2f} ms a step, {found.rate:,.0f} tokens/s",
            NOT_MEASURED
            if floor is None
            else f"{floor * 1e3:.2f} ms ({shape.experts_touched(found.batch):.1f} experts)",
            "" if share is None else f"{share:.0%}",
            ">= 60% of the routed bytes' floor",
            None if share is None else share >= 0.6,
            {"median_s": found.median, "bytes": moved},
        )
    )


FIRST_TOKEN = """
import sys
from tidemill import LLM, SamplingParams
llm = LLM(sys.argv[1], device="cuda", dtype="bfloat16", load_format="dummy")
llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=1, ignore_eos=True), use_tqdm=False)
print("first token", flush=True)
"""


def start(run: Run) -> None:
    """A new process with nothing of Triton compiled, as on a fresh machine."""
    folder = LLAMA_8B.write(run.folder)
    driving.release()
    log = run.folder / "start.log"
    with tempfile.TemporaryDirectory() as cache, log.open("w") as errors:
        environment = {**os.environ, "TRITON_CACHE_DIR": cache, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-c", FIRST_TOKEN, str(folder)]
        began = time.perf_counter()
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True) as process:
            hung = threading.Timer(START_LIMIT, process.kill)
            hung.start()
            # Ends at the line that was waited for, or when the process does.
            arrived = any("first token" in line for line in process.stdout or ())
            seconds = time.perf_counter() - began
            process.wait()
            hung.cancel()
    if not arrived:
        raise RuntimeError(f"the start failed: {log.read_text().strip()[-1500:]}")
    run.add(
        Row(
            "start: 8B dummy weights, nothing compiled",
            f"{seconds:.1f} s to the first token",
            bar="<= 25 s",
            passed=seconds <= 25,
            numbers={"seconds": seconds},
        )
    )


def logits(run: Run, layers: int = 4) -> None:
    """The 8B widths with few layers, bf16, from disk: as near to float32 as transformers' own bf16 is, up to a half."""
    (prompt,) = random_prompts(1, 300, LLAMA_8B.vocab, seed=30)
    folder = run.folder / "llama-few-layers"
    LLAMA_8B.write(run.folder / "tokenizer")
    theirs, exact = peer.write_and_score(LLAMA_8B, layers, prompt, folder)
    (run.folder / "tokenizer" / LLAMA_8B.name / "tokenizer.json").rename(folder / "tokenizer.json")
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    began = time.perf_counter()
    llm = LLM(str(folder), dtype="bfloat16", device="cuda", max_model_len=1024, max_num_seqs=8)
    run.say(f"{size / 1e9:.1f} GB loaded and ready in {time.perf_counter() - began:.1f} s")
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=5)
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    llm._core = None
    ours: list[float] = []
    reference: list[float] = []
    for position, scores in enumerate(output.prompt_logprobs[1:]):
        for token, score in scores.items():
            ours.append(abs(score.logprob - exact[position, token].item()))
            reference.append(abs(theirs[position, token].item() - exact[position, token].item()))
    error, other = sum(ours) / len(ours), sum(reference) / len(reference)
    run.add(
        Row(
            f"logits at 8B widths, {layers} layers, bf16 from disk, mean error against float32",
            f"{error:.2e} (largest {max(ours):.2e})",
            f"transformers bf16 {other:.2e} (largest {max(reference):.2e})",
            f"{error / other:.2f}x theirs",
            "<= 1.5x theirs",
            error <= 1.5 * other,
            {"error": error, "transformers": other, "largest": max(ours), "bytes": size},
        )
    )


CASES: dict[str, Callable[[Run], None]] = {
    "floors": floors_of_the_card,
    "bf16": bf16,
    "int4": int4,
    "fp8": fp8,
    "small": small,
    "experts": experts,
    "start": start,
    "peer": peer_batching,
    "uncached": uncached,
    "logits": logits,
}

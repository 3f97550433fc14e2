"""Serving speed over HTTP beside transformers.generate, measured in the same run.

    make bench                                      # concurrency 1, 4, 16, 32; 128 tokens in, 128 out
    make bench ARGS="--rounds 3 --concurrency 1,8"

Rounds alternate between the two, because a shared machine drifts within minutes; the medians over rounds are compared.
Every request has its own random prompt, so nothing comes from the prefix cache. Writes benchmarks/results/serving.json,
serving.md and serving.png.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx

RESULTS = Path(__file__).parent / "results"
VOCABULARY = range(1000, 40000)


@dataclass
class Measurement:
    """One closed-loop run: every client starts at once and waits for its answer."""

    engine: str
    concurrency: int
    output_tokens_per_s: float
    ttft_s: float
    """Mean time to the first token."""
    tpot_ms: float
    """Mean time per output token after the first."""


def prompts(count: int, length: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.choice(VOCABULARY) for _ in range(length)] for _ in range(count)]


class TidemillServer:
    def __init__(self, model: str, dtype: str, extra: list[str]) -> None:
        command = [sys.executable, "-m", "tidemill.cli.main", "serve", model, "--dtype", dtype, "--port", "0", *extra]
        self.log = tempfile.NamedTemporaryFile(prefix="tidemill-bench-", suffix=".log")  # noqa: SIM115
        began = time.perf_counter()
        self.process = subprocess.Popen(command, stdout=self.log, stderr=self.log)
        self.url = ""
        while not self.url:
            if self.process.poll() is not None or time.perf_counter() - began > 300:
                raise SystemExit(f"the server did not start:\n{Path(self.log.name).read_text()}")
            time.sleep(0.02)
            found = re.search(r"serving\s+(\S+)", Path(self.log.name).read_text())
            self.url = found[1] if found else ""
        self.start_s = time.perf_counter() - began

    def resident_mb(self) -> float:
        """Both processes together."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        total = 0
        for pid in (str(self.process.pid), *children):
            status = Path(f"/proc/{pid}/status").read_text()
            total += int(re.search(r"VmRSS:\s+(\d+)", status)[1])  # type: ignore[index]
        return total / 1024

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait()


async def run_clients(
    url: str, model: str, batch: list[list[int]], output_len: int
) -> tuple[list[float], list[float], float]:
    """Times to first token, times per further token, and the wall time of all."""
    limits = httpx.Limits(max_connections=len(batch))
    async with httpx.AsyncClient(base_url=url, timeout=3600, limits=limits) as client:

        async def one(prompt: list[int]) -> tuple[float, float]:
            body = {"model": model, "prompt": prompt, "max_tokens": output_len, "temperature": 0, "ignore_eos": True}
            body |= {"stream": True, "stream_options": {"include_usage": True}}
            began = time.perf_counter()
            first, usage = 0.0, None
            async with client.stream("POST", "/v1/completions", json=body) as response:
                response.raise_for_status()
                async for line in response.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    first = first or time.perf_counter()
                    if '"choices":[]' in line:
                        usage = json.loads(line[6:])["usage"]
            assert usage and usage["completion_tokens"] == output_len, usage
            return first - began, (time.perf_counter() - first) / (output_len - 1)

        began = time.perf_counter()
        pairs = await asyncio.gather(*(one(prompt) for prompt in batch))
        return [ttft for ttft, _ in pairs], [tpot for _, tpot in pairs], time.perf_counter() - began


def measure_tidemill(args: argparse.Namespace, round_number: int) -> tuple[list[Measurement], dict[str, float]]:
    server = TidemillServer(args.model, args.dtype, args.serve_args.split())
    found = []
    try:
        asyncio.run(run_clients(server.url, args.model, prompts(2, 16, 0), 4))
        for count in args.concurrency:
            batch = prompts(count, args.input_len, 1000 * round_number + count)
            ttft, tpot, wall = asyncio.run(run_clients(server.url, args.model, batch, args.output_len))
            rate = count * args.output_len / wall
            found.append(Measurement("tidemill", count, rate, statistics.mean(ttft), statistics.mean(tpot) * 1000))
            print(found[-1], flush=True)
        return found, {"start_s": server.start_s, "resident_mb": server.resident_mb()}
    finally:
        server.stop()


def measure_transformers(args: argparse.Namespace, round_number: int) -> list[Measurement]:
    """In a process of its own, so that its memory and threads are gone before the next round."""
    command = [sys.executable, __file__, "--transformers-worker", "--model", args.model, "--dtype", args.dtype]
    command += ["--concurrency", ",".join(map(str, args.concurrency)), "--round", str(round_number)]
    command += ["--input-len", str(args.input_len), "--output-len", str(args.output_len)]
    found = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as worker:
        for line in worker.stdout or ():
            if line.startswith("{"):
                found.append(Measurement(**json.loads(line)))
                print(found[-1], flush=True)
    if worker.returncode:
        raise SystemExit("transformers could not be measured")
    return found


def transformers_worker(args: argparse.Namespace) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from tidemill.weights.location import locate

    files = locate(args.model)
    folder, gguf = (files.path.parent, files.path.name) if files.kind == "gguf" else (files.path, None)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=gguf, dtype=getattr(torch, args.dtype)).eval()

    def generate(batch: list[list[int]], count: int) -> float:
        ids = torch.tensor(batch)
        began = time.perf_counter()
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
        )
        return time.perf_counter() - began

    generate(prompts(1, 16, 0), 4)
    for count in args.concurrency:
        batch = prompts(count, args.input_len, 1000 * args.round + count)
        ttft = generate(batch, 1)
        wall = generate(batch, args.output_len)
        tpot = (wall - ttft) / (args.output_len - 1) * 1000
        result = Measurement("transformers.generate", count, count * args.output_len / wall, ttft, tpot)
        print(json.dumps(asdict(result)), flush=True)


def medians(found: list[Measurement]) -> list[Measurement]:
    groups: dict[tuple[str, int], list[Measurement]] = {}
    for one in found:
        groups.setdefault((one.engine, one.concurrency), []).append(one)
    return [
        Measurement(
            engine,
            concurrency,
            statistics.median(one.output_tokens_per_s for one in group),
            statistics.median(one.ttft_s for one in group),
            statistics.median(one.tpot_ms for one in group),
        )
        for (engine, concurrency), group in sorted(groups.items())
    ]


def table(rows: list[Measurement], args: argparse.Namespace, start: dict[str, float]) -> str:
    lines = [
        f"{args.model}, {args.dtype}, {args.input_len} tokens in, {args.output_len} out, {args.rounds} rounds, "
        f"{cpu_name()}, medians; tidemill over HTTP started in {start['start_s']:.1f} s "
        f"and held {start['resident_mb']:.0f} MB after the run",
        "",
        "| engine | concurrency | output tokens/s | mean TTFT, s | TPOT, ms |",
        "|---|---|---|---|---|",
    ]
    for one in rows:
        numbers = f"{one.output_tokens_per_s:.1f} | {one.ttft_s:.2f} | {one.tpot_ms:.1f}"
        lines.append(f"| {one.engine} | {one.concurrency} | {numbers} |")
    return "\n".join(lines) + "\n"


def cpu_name() -> str:
    found = subprocess.run(["lscpu"], capture_output=True, text=True).stdout
    name = re.search(r"Model name:\s+(.+)", found)
    cores = re.search(r"^CPU\(s\):\s+(\d+)", found, re.M)
    return f"{cores[1] if cores else '?'} cores of {name[1] if name else platform.machine()}"


def plot(rows: list[Measurement], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4))
    for engine in sorted({one.engine for one in rows}):
        own = [one for one in rows if one.engine == engine]
        counts = [one.concurrency for one in own]
        axes[0].plot(counts, [one.output_tokens_per_s for one in own], marker="o", label=engine)
        axes[1].plot(counts, [one.ttft_s for one in own], marker="o", label=engine)
    for axis, title in zip(axes, ("output tokens/s (higher is better)", "mean TTFT, s (lower is better)"), strict=True):
        axis.set(title=title, xlabel="concurrent requests", ylim=(0, None))
        axis.grid(alpha=0.3)
        axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--concurrency", default="1,4,16,32", type=lambda text: [int(part) for part in text.split(",")])
    parser.add_argument("--input-len", default=128, type=int)
    parser.add_argument("--output-len", default=128, type=int)
    parser.add_argument("--rounds", default=3, type=int)
    parser.add_argument("--serve-args", default="", help="further flags for tidemill serve, in one string")
    parser.add_argument("--transformers-worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--round", default=0, type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.transformers_worker:
        transformers_worker(args)
        return
    found: list[Measurement] = []
    start: dict[str, float] = {}
    for number in range(args.rounds):
        mine, start = measure_tidemill(args, number)
        found += mine + measure_transformers(args, number)
    rows = medians(found)
    RESULTS.mkdir(exist_ok=True)
    text = table(rows, args, start)
    (RESULTS / "serving.json").write_text(json.dumps([asdict(one) for one in found], indent=1) + "\n")
    (RESULTS / "serving.md").write_text(text)
    plot(rows, RESULTS / "serving.png")
    print(f"\n{text}\nwritten to {RESULTS}/serving.json, .md and .png")


if __name__ == "__main__":
    main()

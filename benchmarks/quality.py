"""What quantising costs in quality: perplexity of SmolLM2 on WikiText-2, as a table and a plot.

    .venv/bin/python benchmarks/quality.py                         # everything
    .venv/bin/python benchmarks/quality.py --only dense,stored,int8 --kilobytes 32

The text is ../shared/data/wikitext2.test.txt: its first part is scored, its second half calibrates gptq and awq.
Without it nothing is measured. The source is the GGUF file as shipped, widened to float32. Writes results/quality.json,
.md and .png.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tidemill import LLM
from tidemill.quantise.perplexity import perplexity

RESULTS = Path(__file__).parent / "results"
TEXT = Path(__file__).resolve().parents[2] / "shared" / "data" / "wikitext2.test.txt"
MODEL, WINDOW = "smollm2", 512
LIMITS = {"int8": 0.5, "gptq g32": 6.0, "awq g32": 6.0, "fp8 cache": 0.5, "int8 cache": 0.5}
"""Most that perplexity may rise, in percent."""

SERVED: dict[str, dict[str, Any]] = {
    "dense": {"quantization": "none"},
    "stored": {},
    "int8": {"quantization": "int8"},
    "fp8": {"quantization": "fp8"},
    "int4 on load": {"quantization": "int4"},
    "bf16 cache": {"quantization": "none", "kv_cache_dtype": "bf16"},
    "fp8 cache": {"quantization": "none", "kv_cache_dtype": "fp8"},
    "int8 cache": {"quantization": "none", "kv_cache_dtype": "int8"},
}
"""Variants that need no file of their own."""
WRITTEN = {f"{method} g{size}": (method, size) for size in (32, 64) for method in ("rtn", "gptq", "awq")}
"""Variants that `tidemill quantize` writes, as w4a16. Groups of 128 do not divide SmolLM2's 576 inputs."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join([*SERVED, *WRITTEN]), help="variants, separated by commas")
    parser.add_argument("--kilobytes", type=int, default=64, help="of text that is scored")
    parser.add_argument("--samples", type=int, default=64, help="of calibration, 256 tokens each")
    args = parser.parse_args()
    if not TEXT.is_file():
        sys.exit(f"{TEXT.name} is not beside this checkout: nothing to measure")
    text = TEXT.read_text(encoding="utf-8")
    names = args.only.split(",")
    if unknown := sorted(set(names) - {*SERVED, *WRITTEN}):
        parser.error(f"no variant {', '.join(unknown)}; there are {', '.join([*SERVED, *WRITTEN])}")
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        calibration = Path(folder) / "calibration.txt"
        calibration.write_text(text[len(text) // 2 :], encoding="utf-8")
        for name, llm in opened(names, Path(folder), calibration, args.samples):
            began = time.perf_counter()
            ids = llm.tokenizer.encode(text.encode()[: 1024 * args.kilobytes].decode(errors="ignore"))
            found[name] = perplexity(llm, ids, WINDOW)
            print(f"{name:16} {found[name]:8.3f}  {len(ids)} tokens, {time.perf_counter() - began:.0f} s", flush=True)
    write(found)


def opened(names: list[str], folder: Path, calibration: Path, samples: int) -> Iterator[tuple[str, LLM]]:
    shared: dict[str, Any] = {"dtype": "float32", "max_model_len": 1024, "max_num_seqs": 4}
    for name in names:
        model, settings = MODEL, SERVED.get(name, {})
        if name in WRITTEN:
            model = str(quantised(folder / name.replace(" ", "-"), *WRITTEN[name], calibration, samples))
        llm = LLM(model, **shared, **settings)
        yield name, llm
        del llm
        gc.collect()


def quantised(out: Path, method: str, group_size: int, calibration: Path, samples: int) -> Path:
    command = [str(Path(sys.executable).with_name("tidemill")), "quantize", MODEL, str(out), "--scheme", "w4a16"]
    command += ["--group-size", str(group_size), "--method", method]
    command += ["--calibration", str(calibration), "--samples", str(samples), "--length", "256"]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    return out


def write(found: dict[str, float]) -> None:
    base = found.get("dense")
    lines = ["| weights or cache | perplexity | against float32 | limit |", "|---|---|---|---|"]
    for name, value in found.items():
        change = "" if base is None else f"{100 * (value / base - 1):+.2f}%"
        limit = f"{LIMITS[name]}%" if name in LIMITS else ""
        lines.append(f"| {name} | {value:.3f} | {change} | {limit} |")
    print("\n" + "\n".join(lines))
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "quality.json").write_text(json.dumps(found, indent=1) + "\n")
    (RESULTS / "quality.md").write_text("\n".join(lines) + "\n")
    if base is not None:
        plot(found, base)


def plot(found: dict[str, float], base: float) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = [name for name in found if name != "dense"]
    rises = [100 * (found[name] / base - 1) for name in names]
    figure, axes = pyplot.subplots(figsize=(8, 0.4 * len(names) + 1.5))
    bars = axes.barh(names, rises, color=["#2a6f97" if rise < 6 else "#c1666b" for rise in rises])
    axes.bar_label(bars, [f"{rise:+.2f}%" for rise in rises], padding=4)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set_xlabel(f"rise of perplexity against float32 ({base:.2f}), percent")
    axes.set_title("SmolLM2-135M on WikiText-2, what quantising costs")
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(RESULTS / "quality.png", dpi=130)


if __name__ == "__main__":
    main()

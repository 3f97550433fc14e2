"""Runs the tuning modules and merges what they found into the file of the card's launch parameters.

    PYTHONPATH=src python -m benchmarks.gpu_tune                            # all, into ops/triton/configs/<card>.json
    PYTHONPATH=src python -m benchmarks.gpu_tune --only gemm,moe --out tuned.json

Each module runs in a process of its own: a kernel that faults leaves a process without a working GPU, and the modules
after it are still wanted. What a file says already about keys that were not measured now stays. Knows nothing of
kernels: a module's `tune()` returns {kernel: {key: config}}.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

MODULES = ("attention", "elementwise", "gemm", "moe", "sampling")
ROOT = Path(__file__).resolve().parents[2]

Found = dict[str, dict[str, dict[str, Any]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(MODULES), help="modules, separated by commas")
    parser.add_argument("--out", type=Path, help="the file to merge into; without it, the card's own")
    parser.add_argument("--limit", type=float, default=180.0, help="seconds after which a module is stopped")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    names = args.only.split(",")
    if unknown := sorted(set(names) - set(MODULES)):
        parser.error(f"no module {', '.join(unknown)}; there are {', '.join(MODULES)}")
    if args.child is not None:
        run_here(names[0], args.child)
        return
    outcomes: list[tuple[str, str]] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            print(f"== {name}", flush=True)
            began = time.perf_counter()
            found, outcome = run_apart(name, Path(folder) / f"{name}.json", args.limit)
            outcomes.append((name, f"{outcome}, {time.perf_counter() - began:.0f} s"))
            if found:
                merge(args.out or card_file(), found)
    print("\n".join(["", *(f"{name:12} {outcome}" for name, outcome in outcomes)]))
    if any(outcome.startswith("found") for _, outcome in outcomes):
        print(f"written to {args.out or card_file()}")
    if any(not outcome.startswith("found") for _, outcome in outcomes):
        sys.exit(1)


def run_here(name: str, out: Path) -> None:
    found = importlib.import_module(f"benchmarks.gpu_tune.{name}").tune()
    out.write_text(json.dumps(found))


def run_apart(name: str, out: Path, limit: float) -> tuple[Found, str]:
    """What the module found, and what happened to it in a few words."""
    paths = [str(ROOT), str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "benchmarks.gpu_tune", "--only", name, "--child", str(out)]
    try:
        code = subprocess.run(command, cwd=ROOT, env=environment, timeout=limit, check=False).returncode
    except subprocess.TimeoutExpired:
        return {}, f"STOPPED after {limit:.0f} s"
    if code != 0 or not out.is_file():
        return {}, f"FAILED with exit status {code}"
    found: Found = json.loads(out.read_text())
    return found, f"found {sum(len(keys) for keys in found.values())} configurations of {len(found)} kernels"


def merge(path: Path, found: Found) -> None:
    """Keys found now replace the file's; written whole or not at all, as a start may read it meanwhile."""
    known: Found = json.loads(path.read_text()) if path.is_file() else {}
    for kernel, keys in found.items():
        known[kernel] = {**known.get(kernel, {}), **keys}
    ordered = {kernel: dict(sorted(known[kernel].items())) for kernel in sorted(known)}
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".part")
    draft.write_text(_compact(ordered))
    draft.replace(path)


def _compact(found: Found) -> str:
    """One configuration a line: a file people read and compare."""
    kernels = []
    for kernel, keys in found.items():
        lines = ",\n".join(f"    {json.dumps(key)}: {json.dumps(config)}" for key, config in keys.items())
        kernels.append(f"  {json.dumps(kernel)}: {{\n{lines}\n  }}")
    return "{\n" + ",\n".join(kernels) + "\n}\n"


def card_file() -> Path:
    from tidemill.ops.triton.tuning import CONFIGS, card

    return CONFIGS / f"{card()}.json"


if __name__ == "__main__":
    main()

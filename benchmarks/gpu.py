"""How close the engine comes to what a GPU allows, in one call of under 8 minutes on an H200.

    PYTHONPATH=src python benchmarks/gpu.py --out results            # everything
    PYTHONPATH=src python benchmarks/gpu.py --only floors,bf16 --out results

Random weights of published shapes; floors (copies, a large matmul, a decode step of matmuls alone) are measured in the
same run, and every speed stands beside its floor and its bar. A case that breaks says so and the others go on. Writes
gpu.json and gpu.md. `benchmarks/README.md` tells what each case is and records results.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import traceback
from pathlib import Path

import torch

from gpu_parts import cases, driving
from gpu_parts.report import Report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(cases.CASES), help="cases, separated by commas")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--peer-requests", type=int, default=256, help="of the 256, how many transformers gets")
    parser.add_argument("--limit", type=float, default=480.0, help="seconds after which no case is begun")
    args = parser.parse_args()
    names = args.only.split(",")
    if unknown := sorted(set(names) - set(cases.CASES)):
        parser.error(f"no case {', '.join(unknown)}; there are {', '.join(cases.CASES)}")
    if not torch.cuda.is_available():
        sys.exit("benchmarks/gpu.py measures a GPU, and torch sees none here")
    began = time.perf_counter()
    report = Report(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    with tempfile.TemporaryDirectory() as folder:
        run = cases.Run(report, Path(folder), peer_requests=args.peer_requests, began=began)
        for name in [name for name in cases.CASES if name in names]:
            if time.perf_counter() - began > args.limit:
                report.notes.append(f"{name} was not begun: {args.limit:.0f} s were over")
                continue
            run.say(f"== {name}")
            try:
                cases.CASES[name](run)
            except Exception as error:
                report.errors[name] = traceback.format_exc()
                run.say(f"{name} broke: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
                # Its frames hold models that the next case needs the room of.
                traceback.clear_frames(error.__traceback__)
            driving.release()
            report.seconds = time.perf_counter() - began
            report.write(args.out)
    print(f"\n{report.markdown()}\nwritten to {args.out}")
    if report.errors:
        print(next(iter(report.errors.values())))


if __name__ == "__main__":
    main()

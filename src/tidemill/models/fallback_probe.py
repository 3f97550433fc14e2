"""Asks transformers for the shape of a model, in a child process: who plans a start never imports torch.

`python -m tidemill.models.fallback_probe FOLDER trusted|plain` is the child. It answers with one JSON object: a shape,
or the problem that keeps the model from running. Everything else it or a checkpoint's own code prints goes to stderr.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tidemill.errors import StartupError, TidemillError
from tidemill.layers.spec import CacheShape
from tidemill.models.shape import ModelShape

TIME_LIMIT = 180.0
"""Seconds. Importing torch and transformers takes most of the few that a trace needs."""


def probe(path: Path, trust_remote_code: bool = False, *, time_limit: float = TIME_LIMIT) -> ModelShape:
    """The shape of a checkpoint's model; raises UnsupportedModel with the reason where it cannot run."""
    command = [sys.executable, "-P", "-m", "tidemill.models.fallback_probe", str(path)]
    command.append("trusted" if trust_remote_code else "plain")
    # It only reads shapes: no network, no accelerator, one thread.
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    try:
        child = subprocess.run(
            command, capture_output=True, stdin=subprocess.DEVNULL, timeout=time_limit, env=environment, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise StartupError(
            f"transformers did not say what model {path} holds within {time_limit:.0f} s",
            cause="building it without memory takes seconds; the machine is busy, or the checkpoint's own code hangs",
            fix="try again, or use a model with a native implementation: tidemill models",
        ) from error
    answer = _answer(child.stdout)
    if answer is None:
        last_words = child.stderr.decode(errors="replace").strip().splitlines()
        raise StartupError(
            f"transformers could not be asked what model {path} holds",
            cause=f"exit code {child.returncode}: {last_words[-1][:300] if last_words else 'it said nothing'}",
            fix=f"see all it says with: {' '.join(command)}",
        )
    if "problem" in answer:
        raise TidemillError.from_dict(answer["problem"])
    return _shape(answer["shape"])


def main() -> int:
    folder, trust = Path(sys.argv[1]), sys.argv[2] == "trusted"
    # Whoever prints, the answer stays readable.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    answer: dict[str, Any]
    try:
        from tidemill.models.fallback_shape import describe_transformers

        answer = {"shape": asdict(describe_transformers(folder, trust).shape)}
    except TidemillError as problem:
        answer = {"problem": problem.as_dict()}
    except Exception as error:
        answer = {"problem": _unexpected(folder, error).as_dict()}
    answers.write(json.dumps(answer))
    answers.flush()
    return 0


def _unexpected(folder: Path, error: Exception) -> TidemillError:
    lines = str(error).strip().splitlines() or [""]
    return StartupError(
        f"transformers cannot build the model in {folder}",
        cause=f"{type(error).__name__}: {lines[0][:300]}",
        fix="correct config.json or fetch it again, or use a model with a native implementation: tidemill models",
    )


def _answer(text: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _shape(data: dict[str, Any]) -> ModelShape:
    return ModelShape(**{**data, "caches": tuple(CacheShape(**cache) for cache in data["caches"])})


if __name__ == "__main__":
    # Not sys.exit: torch's threads can hang the interpreter's clean-up, and there is nothing left to clean up.
    code = main()
    sys.stderr.flush()
    os._exit(code)

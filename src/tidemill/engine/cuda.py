"""What an engine on a GPU needs of its process, and what CUDA's failures mean in words a user can act on.

Names no torch: its errors are known by their names and their texts, which also cross library versions.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Mapping

from tidemill.errors import OutOfMemory, StartupError

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
MEMORY_FIX = "a lower --gpu-memory-utilization, a smaller --max-num-seqs, --max-num-batched-tokens or --max-model-len"

STAGES = {
    "graphs.py": ("while capturing graphs", f"--enforce-eager, or {MEMORY_FIX}"),
    "kv_cache.py": ("while making room for the KV cache", MEMORY_FIX),
    "loader.py": ("while loading weights", "--quantization int4, --cpu-offload-gb, or a smaller model"),
    "offload.py": ("while making room for weights", "a larger --cpu-offload-gb, or --quantization int4"),
    "parameter.py": ("while making room for weights", "--quantization int4, --cpu-offload-gb, or a smaller model"),
    "decoder.py": ("while computing a step", MEMORY_FIX),
}
"""By the file that a failure passed through, the first that fits: what was being done, and what to do."""

FAILURES = {
    "found no nvidia driver": ("no NVIDIA driver answers", "install the NVIDIA driver, or --device cpu"),
    "no cuda gpus are available": (
        "CUDA sees no GPU",
        "unset CUDA_VISIBLE_DEVICES; in a container, start it with --gpus all; or --device cpu",
    ),
    "no cuda-capable device": (
        "CUDA sees no GPU",
        "unset CUDA_VISIBLE_DEVICES; in a container, start it with --gpus all; or --device cpu",
    ),
    "unsupported display driver / cuda driver combination": (
        "the driver's library and its kernel module differ in version (error 803)",
        "restart the machine after a driver update; in a container, remove the CUDA compatibility libraries",
    ),
    "forward compatibility was attempted": (
        "the CUDA compatibility libraries do not support this card (error 804)",
        "update the NVIDIA driver, or remove the compat folder from LD_LIBRARY_PATH",
    ),
    "driver version is insufficient": (
        "the driver is older than the CUDA that torch was built for",
        "update the NVIDIA driver, or install a torch built for an older CUDA",
    ),
    "driver on your system is too old": (
        "the driver is older than the CUDA that torch was built for",
        "update the NVIDIA driver, or install a torch built for an older CUDA",
    ),
    "system not yet initialized": (
        "the fabric of this machine is not up (error 802)",
        "systemctl start nvidia-fabricmanager, then try again",
    ),
    "ecc error": ("the card's memory is faulty", "nvidia-smi --gpu-reset, or --device cuda:1"),
    "devices are busy or unavailable": (
        "another process has the card to itself",
        "nvidia-smi shows who; nvidia-smi -c DEFAULT lets several share it",
    ),
    "device(s) is/are busy or unavailable": (
        "another process has the card to itself",
        "nvidia-smi shows who; nvidia-smi -c DEFAULT lets several share it",
    ),
    "no kernel image is available": (
        "the installed torch has no code for this card",
        "install a torch built for this card's compute capability, or --device cpu",
    ),
}


LOST = (
    "illegal memory access",
    "illegal instruction",
    "misaligned address",
    "unspecified launch failure",
    "device-side assert",
    "uncorrectable ecc error",
)
"""After these a process gets nothing more from CUDA; only a new one does."""


def missing_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that CUDA and torch read when they start, unless the user has set them."""
    found = {}
    if not any(environment.get(name) for name in ALLOCATOR_VARIABLES):
        # Memory that came in pieces can be joined again; otherwise a cache that was planned to fit may not.
        found[ALLOCATOR_VARIABLES[0]] = "expandable_segments:True"
    if not environment.get("CUDA_DEVICE_ORDER"):
        # As the driver lists them, which is how cards were chosen; CUDA's own order puts the fastest first.
        found["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    return found


def device_problem(error: BaseException) -> StartupError | None:
    """What a failure of a GPU means; None where it is none. What an error hides counts too: a capture that is broken
    off fails once more when it is ended."""
    hidden: BaseException | None = error
    while hidden is not None:
        if problem := _problem(hidden):
            return problem
        hidden = hidden.__cause__ or hidden.__context__
    return None


def _problem(error: BaseException) -> StartupError | None:
    text = str(error)
    if type(error).__name__ == "OutOfMemoryError" or "cuda error: out of memory" in text.lower():
        stage, fix = _stage(error)
        return OutOfMemory(f"the GPU ran out of memory {stage}".rstrip(), cause=_first_sentences(text), fix=fix)
    lowered = text.lower()
    if "find c compiler" in lowered:
        return StartupError(
            "the GPU's kernels cannot be built",
            cause=f"Triton compiles their launchers with a C compiler: {_first_sentences(text)}",
            fix="apt-get install gcc libc6-dev, or set CC to a compiler",
        )
    if not any(word in lowered for word in ("cuda", "nvidia", "nvml")):
        return None
    for words, (cause, fix) in FAILURES.items():
        if words in lowered:
            return StartupError("the GPU cannot be used", cause=f"{cause}: {_first_sentences(text)}", fix=fix)
    return None


def context_lost(error: BaseException) -> bool:
    text = str(error).lower()
    return "cuda" in text and any(words in text for words in LOST)


def _stage(error: BaseException) -> tuple[str, str]:
    files = {os.path.basename(frame.filename) for frame in traceback.extract_tb(error.__traceback__)}
    return next((found for name, found in STAGES.items() if name in files), ("", MEMORY_FIX))


def _first_sentences(text: str) -> str:
    """torch's advice on debugging begins on later lines, or after the sums."""
    line = (text.strip().splitlines() or [""])[0]
    return line.partition(" If reserved")[0].partition(" See documentation")[0][:400]

"""Which device runs a model: chosen from what the machine has, with the reason.

A device that was asked for and cannot work is refused with what stands in the way. Torch-free; knows no model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tidemill.errors import ConfigError
from tidemill.hardware import Hardware
from tidemill.nvidia import VISIBLE, Gpu

LEAST_CAPABILITY = (7, 5)
"""What the Triton kernels need: Turing, 2018."""

INSTALL = "install the NVIDIA driver (in a container: start it with --gpus all), or --device cpu"
RESTART = "restart the machine after a driver update; in a container, remove the CUDA compatibility libraries"
REPAIRS = {
    VISIBLE: f"unset {VISIBLE}, or --device cpu",
    "version mismatch": RESTART,
    "error 803": RESTART,
    "error 802": "systemctl start nvidia-fabricmanager, then try again",
    "error 804": "update the NVIDIA driver, or remove the compat folder from LD_LIBRARY_PATH",
    "permission": "run as a user who may open /dev/nvidia*, or --device cpu",
    "lost": "restart the machine (dmesg tells what happened to the card), or --device cpu",
}
"""By a word of what the driver says, the first that fits: what to do."""


@dataclass(frozen=True)
class Device:
    kind: Literal["cpu", "cuda"]
    why: str
    index: int = 0
    """As CUDA numbers the cards this process may see."""
    gpu: Gpu | None = None


@dataclass(frozen=True)
class _Obstacle:
    cause: str
    fix: str


def choose_device(asked: str, hardware: Hardware) -> Device:
    kind, _, number = asked.partition(":")
    if kind not in ("auto", "cpu", "cuda") or (number and (kind != "cuda" or not number.isdecimal())):
        raise ConfigError(f"device {asked!r} is unknown", param="device", fix="use --device auto, cuda, cuda:1 or cpu")
    if kind == "cpu":
        return Device("cpu", "asked for")
    index = int(number) if number else _first_usable(hardware)
    obstacle = _obstacle(hardware, index)
    if obstacle is None:
        gpu = hardware.gpus[index]
        major, minor = gpu.capability
        first = "the first GPU this process sees" if index == 0 else "the first GPU that can be used"
        reason = "asked for" if kind == "cuda" else first
        return Device("cuda", f"{reason}: {gpu.name}, compute capability {major}.{minor}", index, gpu)
    if kind == "cuda":
        raise ConfigError(f"device {asked} cannot be used", param="device", cause=obstacle.cause, fix=obstacle.fix)
    return Device("cpu", obstacle.cause)


def _first_usable(hardware: Hardware) -> int:
    """Cards come in the order of their slots, and the first may be an old one for the screen."""
    return next((index for index in range(len(hardware.gpus)) if _obstacle(hardware, index) is None), 0)


def _obstacle(hardware: Hardware, index: int) -> _Obstacle | None:
    """What keeps a card from being used; None where nothing does."""
    if not hardware.gpus:
        cause = hardware.gpu_problem or "there is no NVIDIA GPU"
        fixes = (fix for word, fix in REPAIRS.items() if word.lower() in cause.lower())
        return _Obstacle(cause, next(fixes, INSTALL))
    if index >= len(hardware.gpus):
        seen = len(hardware.gpus)
        cause = f"this process sees {seen} GPU{'s' if seen > 1 else ''}, counted from 0"
        if hardware.gpu_problem:
            cause += f"; {hardware.gpu_problem}"
        return _Obstacle(cause, f"--device cuda:{seen - 1}")
    if hardware.torch_cuda is None:
        return _Obstacle(
            f"there is a {hardware.gpus[index].name}, but the installed torch is built for CPUs only",
            "install torch built for CUDA: pip uninstall torch, then pip install torch from an index with CUDA builds",
        )
    driver = hardware.driver_cuda
    # Within a major version, newer builds run on older drivers.
    if driver is not None and int(hardware.torch_cuda.partition(".")[0]) > driver[0]:
        return _Obstacle(
            f"the driver runs CUDA up to {driver[0]}.{driver[1]}, and torch is built for CUDA {hardware.torch_cuda}",
            f"update the NVIDIA driver, or install a torch built for CUDA {driver[0]}",
        )
    gpu = hardware.gpus[index]
    if gpu.capability < LEAST_CAPABILITY:
        return _Obstacle(
            f"{gpu.name} has compute capability {dotted(gpu.capability)}, the kernels need {dotted(LEAST_CAPABILITY)}",
            "use a newer GPU, or --device cpu",
        )
    return None


def dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"

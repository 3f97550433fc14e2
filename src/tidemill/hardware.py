"""What this machine has, as this process may use it: cores, memory and CPU features seen through cgroups, and GPUs.

A container's limits count, not the host's numbers. Reads files and asks the driver; imports nothing heavy, so which
CUDA torch was built for is read from its files.
"""

from __future__ import annotations

import math
import os
import platform
import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from tidemill.nvidia import Driver, Gpu, look
from tidemill.ops.cpu import library

CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Hardware:
    cores: int
    cores_why: str
    memory_bytes: int
    """What this process and its children may hold at most."""
    available_bytes: int
    """What of that nobody holds now."""
    memory_why: str
    cpu_name: str
    cpu_features: frozenset[str]
    gpus: tuple[Gpu, ...] = ()
    """As CUDA numbers them for this process."""
    gpu_problem: str | None = None
    """Why there are none, or not all."""
    driver_cuda: tuple[int, int] | None = None
    """The newest CUDA the driver runs."""
    torch_cuda: str | None = None
    """The CUDA torch was built for; None: it runs on CPUs only."""
    no_cpu_kernels: str | None = None
    """Why the native kernels of this CPU cannot be used; None: they can."""

    @property
    def fast_bf16(self) -> bool:
        """Whether bfloat16 products run in hardware; where they do not, they are many times slower than float32."""
        return bool(self.cpu_features & {"avx512_bf16", "amx_bf16", "bf16", "svebf16"})


def detect(root: Path = CGROUP, proc: Path = Path("/proc"), driver: Driver | None = None) -> Hardware:
    """`driver`: what was seen of the GPUs, where somebody has looked already."""
    cores, cores_why = _cores(root, proc)
    total, available, memory_why = _memory(root, proc)
    name, features = _cpu(proc)
    driver = look(os.environ) if driver is None else driver
    return Hardware(
        cores,
        cores_why,
        total,
        available,
        memory_why,
        name,
        features,
        gpus=driver.gpus,
        gpu_problem=driver.problem,
        driver_cuda=driver.cuda,
        torch_cuda=torch_cuda(),
        no_cpu_kernels=library.available(),
    )


def torch_cuda() -> str | None:
    """Importing torch takes seconds, so its own note of how it was built is read as text."""
    found = find_spec("torch")
    if found is None or found.origin is None:
        return None
    text = _read(Path(found.origin).with_name("version.py")) or ""
    version = re.search(r"^cuda\b[^=\n]*=\s*['\"]([\d.]+)['\"]", text, re.MULTILINE)
    return version[1] if version else None


def _cores(root: Path, proc: Path) -> tuple[int, str]:
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    best, why = allowed, "cores this process may run on"
    for folder in _cgroup_folders(root, proc, "cpu"):
        quota = _cpu_quota(folder)
        if quota is not None and max(1, math.ceil(quota)) < best:
            best, why = max(1, math.ceil(quota)), f"cgroup CPU limit of {quota:g}"
    return best, why


def _cpu_quota(folder: Path) -> float | None:
    text = _read(folder / "cpu.max")
    if text is not None:
        quota, _, period = text.partition(" ")
        return None if quota == "max" else int(quota) / int(period or 100_000)
    quota_us, period_us = _read_int(folder / "cpu.cfs_quota_us"), _read_int(folder / "cpu.cfs_period_us")
    return quota_us / period_us if quota_us and period_us and quota_us > 0 else None


def _memory(root: Path, proc: Path) -> tuple[int, int, str]:
    machine, available = _machine_memory(proc)
    total, why = machine, "memory of this machine"
    for folder in _cgroup_folders(root, proc, "memory"):
        limit = _memory_limit(folder)
        if limit is None or limit >= machine:
            continue
        # Also a wider group counts: it may be full of others.
        available = min(available, max(0, limit - _memory_used(folder)))
        if limit < total:
            total, why = limit, f"cgroup memory limit of {limit / 2**30:.1f} GiB"
    return total, min(available, total), why


def _machine_memory(proc: Path) -> tuple[int, int]:
    info = dict(line.split(":", 1) for line in (_read(proc / "meminfo") or "").splitlines() if ":" in line)
    if "MemTotal" not in info:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return total, total
    total = int(info["MemTotal"].split()[0]) * 1024
    return total, int(info["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in info else total


def _memory_limit(folder: Path) -> int | None:
    # Beyond memory.high a process is not killed but slowed to a crawl, which is no better.
    names = ("memory.max", "memory.high", "memory.limit_in_bytes")
    return min((value for name in names if (value := _read_int(folder / name)) is not None), default=None)


def _memory_used(folder: Path) -> int:
    used = _read_int(folder / "memory.current") or _read_int(folder / "memory.usage_in_bytes") or 0
    # The page cache of files counts as used there but is given back when memory is asked for. Version 1 counts that of
    # groups below under names of its own.
    stat = _stats(folder / "memory.stat")
    cache = sum(stat.get(f"total_{key}", stat.get(key, 0)) for key in ("inactive_file", "active_file"))
    return max(0, used - cache)


def _cgroup_folders(root: Path, proc: Path, controller: str) -> list[Path]:
    """This process's cgroup and its parents, for version 2 and for one controller of version 1."""
    folders = []
    for line in (_read(proc / "self" / "cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        base = root / controller if controllers else root
        folder = base / path.lstrip("/")
        while folder != base and base in folder.parents:
            folders.append(folder)
            folder = folder.parent
        folders.append(base)
    return [folder for folder in folders if folder.is_dir()]


def _cpu(proc: Path) -> tuple[str, frozenset[str]]:
    name, features = platform.processor() or platform.machine(), frozenset[str]()
    for line in (_read(proc / "cpuinfo") or "").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            name = value.strip()
        elif key.strip() in ("flags", "Features"):
            features = frozenset(value.split())
            break
    return name, features


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _read_int(path: Path) -> int | None:
    text = _read(path)
    return int(text) if text and text.lstrip("-").isdigit() else None


def _stats(path: Path) -> dict[str, int]:
    pairs = (line.split() for line in (_read(path) or "").splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}

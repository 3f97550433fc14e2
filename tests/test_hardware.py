"""What a process may use of its machine, read from trees like those the kernel shows: bare, version 1, version 2."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tidemill.hardware import Hardware, detect

GIB = 2**30
MACHINE = 64 * GIB


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine of 16 cores and 64 GiB, 48 of them available."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)
    return Machine(tmp_path)


class Machine:
    def __init__(self, folder: Path) -> None:
        self.proc, self.cgroup = folder / "proc", folder / "cgroup"
        self.cgroup.mkdir()
        self.write(self.proc / "meminfo", f"MemTotal: {MACHINE // 1024} kB\nMemAvailable: {48 * GIB // 1024} kB\n")
        self.write(self.proc / "cpuinfo", "model name\t: Some CPU\nflags\t\t: fpu avx2 avx512f\n")

    def write(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def membership(self, text: str) -> None:
        self.write(self.proc / "self" / "cgroup", text)

    def group(self, path: str, **files: object) -> None:
        for name, value in files.items():
            self.write(self.cgroup / path / name.replace("__", "."), f"{value}\n")

    def detect(self) -> Hardware:
        return detect(self.cgroup, self.proc)


def test_a_machine_without_groups(machine):
    found = machine.detect()
    assert (found.cores, found.memory_bytes, found.available_bytes) == (16, MACHINE, 48 * GIB)
    assert "machine" in found.memory_why
    assert found.cpu_name == "Some CPU"


def test_version_2_limits(machine):
    machine.membership("0::/job\n")
    machine.group("job", cpu__max="250000 100000", memory__max=8 * GIB, memory__current=2 * GIB)
    found = machine.detect()
    assert (found.cores, found.memory_bytes, found.available_bytes) == (3, 8 * GIB, 6 * GIB)
    assert "2.5" in found.cores_why and "8.0 GiB" in found.memory_why


def test_version_2_without_limits(machine):
    machine.membership("0::/job\n")
    machine.group("job", cpu__max="max 100000", memory__max="max", memory__high="max", memory__current=2 * GIB)
    found = machine.detect()
    assert (found.cores, found.memory_bytes, found.available_bytes) == (16, MACHINE, 48 * GIB)


def test_version_1_limits(machine):
    machine.membership("4:memory:/job\n2:cpu,cpuacct:/job\n1:name=systemd:/else\n")
    machine.group("cpu/job", cpu__cfs_quota_us=400000, cpu__cfs_period_us=100000)
    machine.group("memory/job", memory__limit_in_bytes=4 * GIB, memory__usage_in_bytes=GIB)
    found = machine.detect()
    assert (found.cores, found.memory_bytes, found.available_bytes) == (4, 4 * GIB, 3 * GIB)


def test_version_1_without_limits(machine):
    machine.membership("4:memory:/\n2:cpu:/\n")
    machine.group("cpu", cpu__cfs_quota_us=-1, cpu__cfs_period_us=100000)
    machine.group("memory", memory__limit_in_bytes=9223372036854771712, memory__usage_in_bytes=GIB)
    found = machine.detect()
    assert (found.cores, found.memory_bytes, found.available_bytes) == (16, MACHINE, 48 * GIB)


def test_the_tightest_of_nested_groups_counts(machine):
    machine.membership("0::/slice/pod/container\n")
    machine.group("slice", memory__max=32 * GIB, memory__current=GIB, cpu__max="800000 100000")
    machine.group("slice/pod", memory__max=4 * GIB, memory__current=GIB, cpu__max="100000 100000")
    machine.group("slice/pod/container", memory__max=16 * GIB, memory__current=GIB, cpu__max="400000 100000")
    found = machine.detect()
    assert (found.cores, found.memory_bytes, found.available_bytes) == (1, 4 * GIB, 3 * GIB)


def test_a_wide_group_that_others_have_filled_leaves_little(machine):
    machine.membership("0::/pod/container\n")
    machine.group("pod", memory__max=8 * GIB, memory__current=7 * GIB)
    machine.group("pod/container", memory__max=6 * GIB, memory__current=0)
    found = machine.detect()
    assert (found.memory_bytes, found.available_bytes) == (6 * GIB, GIB)


def test_a_container_sees_only_its_own_group_at_the_root(machine):
    """The path in /proc is the host's; inside the container it does not exist."""
    machine.membership("0::/system.slice/docker-abc.scope\n")
    machine.group(".", memory__max=2 * GIB, memory__current=GIB, cpu__max="50000 100000")
    found = machine.detect()
    assert (found.cores, found.memory_bytes, found.available_bytes) == (1, 2 * GIB, GIB)


@pytest.mark.parametrize("keys", [("inactive_file", "active_file"), ("total_inactive_file", "total_active_file")])
def test_the_page_cache_is_not_counted_as_used(machine, keys):
    machine.membership("0::/job\n")
    stat = f"anon 5\n{keys[0]} {GIB}\n{keys[1]} {GIB}\nslab 7\n"
    machine.group("job", memory__max=8 * GIB, memory__current=3 * GIB, memory__stat=stat)
    assert machine.detect().available_bytes == 7 * GIB


def test_a_soft_limit_that_throttles_counts_as_a_limit(machine):
    machine.membership("0::/job\n")
    machine.group("job", memory__max="max", memory__high=8 * GIB, memory__current=GIB)
    assert machine.detect().memory_bytes == 8 * GIB


def test_a_group_used_beyond_its_limit_leaves_nothing(machine):
    machine.membership("0::/job\n")
    machine.group("job", memory__max=GIB, memory__current=2 * GIB)
    assert machine.detect().available_bytes == 0


def test_affinity_is_a_limit_too(machine, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5}, raising=False)
    assert machine.detect().cores == 2


@pytest.mark.parametrize(
    ("flags", "fast"),
    [
        ("avx2 fma", False),
        ("avx2 avx512f avx512_bf16", True),
        ("amx_tile amx_bf16", True),
        ("asimd bf16 svebf16", True),
    ],
)
def test_fast_bfloat16_is_read_from_the_flags(machine, flags, fast):
    key = "Features" if "asimd" in flags else "flags"
    machine.write(machine.proc / "cpuinfo", f"processor : 0\n{key}\t: {flags}\n")
    assert machine.detect().fast_bf16 is fast


def test_a_machine_without_proc_still_has_memory(tmp_path):
    found = detect(tmp_path / "nowhere", tmp_path / "nothing")
    assert found.cores >= 1
    assert found.memory_bytes > 0
    assert found.available_bytes > 0


def test_this_machine():
    found = detect()
    assert found.cores >= 1
    assert 0 < found.available_bytes <= found.memory_bytes

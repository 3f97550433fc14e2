"""What a process may use of its machine, read from trees like those the kernel shows (bare, version 1, version 2), and
from a driver's library that is not there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.helpers.nvml import Card, FakeCuda, FakeNvml
from tidemill.hardware import Hardware, detect, torch_cuda
from tidemill.nvidia import look, look_through_cuda

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


TWO = [Card(uuid="GPU-aaaa", name="first"), Card(uuid="GPU-abbb", name="second", used=3 * GIB, capability=(7, 5))]


def names(visible: str | None, cards: list[Card] | None = None) -> list[str]:
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    return [gpu.name for gpu in look(environment, FakeNvml(cards or TWO)).gpus]


def test_gpus_are_seen_with_what_they_hold_and_can():
    library = FakeNvml(TWO, cuda=12040)
    found = look({}, library)
    assert [gpu.name for gpu in found.gpus] == ["first", "second"]
    assert (found.gpus[1].used_bytes, found.gpus[1].free_bytes) == (3 * GIB, 137 * GIB)
    assert (found.gpus[1].capability, found.cuda, found.version) == ((7, 5), (12, 4), "580.82.07")
    assert found.problem is None
    assert not library.open


@pytest.mark.parametrize(
    ("visible", "seen"),
    [
        (None, ["first", "second"]),
        ("1,0", ["second", "first"]),
        ("1", ["second"]),
        (" 0 , 1 ", ["first", "second"]),
        ("GPU-ab", ["second"]),
        ("GPU-abbb,0", ["second", "first"]),
        ("GPU-a", []),
        ("0,7,1", ["first"]),
        ("0,0", []),
        ("-1", []),
        ("", []),
        ("all", []),
    ],
)
def test_what_cuda_would_show_of_them(visible, seen):
    assert names(visible) == seen
    if not seen:
        problem = look({"CUDA_VISIBLE_DEVICES": visible}, FakeNvml(TWO)).problem
        assert problem is not None and "CUDA_VISIBLE_DEVICES" in problem and "2 cards" in problem


def test_a_slice_of_a_card_has_its_own_memory_and_the_capability_of_the_whole():
    cards = [Card(), Card(uuid="MIG-1", name="H200 MIG 1g.18gb", total=16 * GIB, whole="GPU-aaaa")]
    (gpu,) = look({"CUDA_VISIBLE_DEVICES": "MIG-1"}, FakeNvml(cards)).gpus
    assert (gpu.total_bytes, gpu.capability) == (16 * GIB, (9, 0))
    assert names("MIG-2", cards) == []


def test_a_driver_that_does_not_answer_is_no_gpu_with_the_reason():
    found = look({}, FakeNvml(init=9))
    assert found.gpus == () and found.problem is not None and "Driver Not Loaded (9)" in found.problem
    assert "no card" in (look({}, FakeNvml([])).problem or "")

    class Ancient:
        def nvmlInit(self) -> int:
            return 0

    assert "too old" in (look({}, Ancient()).problem or "")


def test_a_lost_card_hides_those_behind_it():
    found = look({}, FakeNvml([Card(), Card(lost=True), Card()]))
    assert len(found.gpus) == 1
    assert found.problem is not None and "GPU is lost" in found.problem


def test_where_only_cuda_is_there_it_is_asked():
    found = look_through_cuda(FakeCuda())
    assert [(gpu.name, gpu.total_bytes, gpu.capability) for gpu in found.gpus] == [("Some GPU", 24 * GIB, (8, 9))]
    assert found.cuda == (12, 8)
    assert "error 803" in (look_through_cuda(FakeCuda(init=803)).problem or "")


def test_gpus_are_part_of_the_machine(machine):
    found = detect(machine.cgroup, machine.proc, look({}, FakeNvml(TWO)))
    assert [gpu.name for gpu in found.gpus] == ["first", "second"]
    assert found.driver_cuda == (13, 0)
    assert machine.detect().gpu_problem or machine.detect().gpus


def test_which_cuda_torch_was_built_for_is_known_without_importing_it():
    import torch

    assert torch_cuda() == torch.version.cuda

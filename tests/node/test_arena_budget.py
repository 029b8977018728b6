"""Headroom from files as kernels write them: cgroup v1, v2, containers, nothing at all (D1, P8)."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptd.arena.budget import UNLIMITED_BYTES, headroom

MIB = 1 << 20


class Machine:
    """A false /proc and /sys/fs/cgroup."""

    def __init__(self, top: Path, available_mib: int = 10_000) -> None:
        self.proc, self.groups = top / "proc", top / "cgroup"
        (self.proc / "self").mkdir(parents=True)
        (self.proc / "meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable:   {available_mib * 1024} kB\n")

    def mount(self, kind: str, path: str, root: str = "/") -> None:
        line, own = {
            "v2": (
                f"35 25 0:30 {root} {self.groups} rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate",
                f"0::{path}",
            ),
            "v1": (f"35 25 0:30 {root} {self.groups} rw - cgroup cgroup rw,memory", f"4:memory:{path}\n0::/"),
        }[kind]
        (self.proc / "self/mountinfo").write_text("1 1 8:1 / / rw - ext4 /dev/sda rw\n" + line + "\n")
        (self.proc / "self/cgroup").write_text("9:cpu,cpuacct:/x\n" + own + "\n")

    def group(self, path: str, **values: object) -> None:
        directory = self.groups / path
        directory.mkdir(parents=True, exist_ok=True)
        for name, value in values.items():
            (directory / name.replace("__", ".")).write_text(f"{value}\n")


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_without_cgroups_the_machine_decides(machine: Machine) -> None:
    assert headroom(machine.proc).nbytes == 10_000 * MIB


def test_v2_the_tightest_level_counts_and_cache_counts_as_free(machine: Machine) -> None:
    machine.mount("v2", "/system.slice/ckptd.service")
    stat = f"anon 5\ninactive_file {30 * MIB}\nactive_file 9"
    machine.group("", memory__stat="")
    machine.group("system.slice", memory__max=1000 * MIB, memory__current=900 * MIB, memory__stat=stat)
    machine.group("system.slice/ckptd.service", memory__max="max", memory__current=5, memory__high="max")
    found = headroom(machine.proc)
    assert found.nbytes == 130 * MIB
    assert found.limited_by == str(machine.groups / "system.slice/memory.max")
    assert not found.kills_group


def test_v2_a_soft_limit_counts_as_well_and_group_kill_is_seen(machine: Machine) -> None:
    machine.mount("v2", "/pod")
    machine.group(
        "pod", memory__max=900 * MIB, memory__high=500 * MIB, memory__current=200 * MIB, memory__oom__group=1
    )
    found = headroom(machine.proc)
    assert (found.nbytes, found.kills_group) == (300 * MIB, True)


def test_v1_with_a_limit_and_without(machine: Machine) -> None:
    machine.mount("v1", "/job/step")
    no_limit = 0x7FFFFFFFFFFFF000
    stat = f"inactive_file 1\ntotal_inactive_file {MIB}"
    machine.group("", memory__limit_in_bytes=no_limit, memory__usage_in_bytes=900 * MIB)
    machine.group("job", memory__limit_in_bytes=64 * MIB, memory__usage_in_bytes=60 * MIB, memory__stat=stat)
    machine.group("job/step", memory__limit_in_bytes=no_limit, memory__usage_in_bytes=50 * MIB)
    assert headroom(machine.proc).nbytes == 5 * MIB


def test_a_container_sees_its_own_cgroup_as_the_top(machine: Machine) -> None:
    machine.mount("v1", "/docker/abc", root="/docker/abc")
    machine.group("", memory__limit_in_bytes=64 * MIB, memory__usage_in_bytes=4 * MIB)
    assert headroom(machine.proc).nbytes == 60 * MIB


def test_a_limit_that_is_exceeded_leaves_nothing(machine: Machine) -> None:
    machine.mount("v2", "/a")
    machine.group("a", memory__max=MIB, memory__current=2 * MIB)
    assert headroom(machine.proc).nbytes == 0


def test_files_that_are_missing_limit_nothing(tmp_path: Path) -> None:
    assert headroom(tmp_path).nbytes == UNLIMITED_BYTES


def test_this_machine_has_some(tmp_path: Path) -> None:
    assert 0 < headroom().nbytes < UNLIMITED_BYTES

"""Memory that a process uses, and memory that the system or the container can still provide."""

from __future__ import annotations

import mmap
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from hybridengine import machine


@pytest.fixture
def container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of the control groups of a process, which has none yet, on a system with 8192000 bytes available."""
    system = SimpleNamespace(available=8_192_000, total=9_000_000)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: system)
    monkeypatch.setattr(machine, "OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(machine, "GROUPS", tmp_path / "groups")
    return tmp_path


def limit(
    group: Path, limit: str, used: int, names: tuple[str, str] = ("memory.max", "memory.current")
) -> None:
    group.mkdir(parents=True, exist_ok=True)
    for name, value in zip(names, (limit, used), strict=True):
        (group / name).write_text(f"{value}\n")


def figures() -> tuple[int, int]:
    return machine.available_bytes(), machine.total_bytes()


def test_the_smallest_of_system_and_groups_counts(container: Path):
    """In a job of a scheduler, the limit may be that of a group above the process's own."""
    assert figures() == (8_192_000, 9_000_000)
    (container / "own").write_text("0::/slurm/job_7/step_0\n")
    groups = container / "groups"
    limit(groups / "slurm/job_7/step_0", "max", 3_000_000)
    assert figures() == (8_192_000, 9_000_000)
    limit(groups / "slurm/job_7", "5000000", 3_000_000)
    assert figures() == (2_000_000, 5_000_000)
    limit(groups / "slurm", "4000000", 3_500_000)
    assert figures() == (500_000, 4_000_000)
    limit(groups, "2000000", 3_000_000)
    assert figures() == (0, 2_000_000)
    limit(container, "1", 1)  # of no group


def test_groups_of_version_1_have_a_folder_for_memory(container: Path):
    """The path may be the host's, which a container does not see."""
    (container / "own").write_text(
        "9:cpu,cpuacct:/docker/ab\n7:memory:/docker/ab\n1:name=systemd:/docker/ab\n"
    )
    names = "memory.limit_in_bytes", "memory.usage_in_bytes"
    limit(container / "groups/cpu,cpuacct/docker/ab", "1", 0, names)
    limit(container / "groups/memory", "6000000", 1_000_000, names)
    assert figures() == (5_000_000, 6_000_000)
    limit(container / "groups/memory/docker/ab", "5000000", 1_000_000, names)
    assert figures() == (4_000_000, 5_000_000)


def test_what_a_process_holds_is_what_the_system_says():
    before = machine.held_bytes()["resident_bytes"]
    with mmap.mmap(-1, 64 * 2**20) as more:  # not in the heap, which may have room from earlier tests
        for page in range(0, len(more), mmap.PAGESIZE):
            more[page] = 1
        grown = machine.held_bytes()["resident_bytes"] - before
        assert grown == pytest.approx(len(more), rel=0.1)
    status = Path("/proc/self/status").read_text()
    (resident,) = (int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmRSS:"))
    assert machine.held_bytes()["resident_bytes"] == pytest.approx(resident, rel=0.05)

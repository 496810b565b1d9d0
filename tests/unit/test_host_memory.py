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
    """Files that replace the container's, on a system with 8192000 bytes available."""
    system = SimpleNamespace(available=8_192_000, total=9_000_000)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: system)
    monkeypatch.setattr(machine, "GROUP", (tmp_path / "max", tmp_path / "current"))
    return tmp_path


def test_the_smaller_of_system_and_container_counts(container: Path):
    assert machine.available_bytes() == 8_192_000
    assert machine.total_bytes() == 9_000_000
    (container / "current").write_text("3000000\n")
    (container / "max").write_text("max\n")
    assert machine.available_bytes() == 8_192_000
    (container / "max").write_text("5000000\n")
    assert machine.available_bytes() == 2_000_000
    assert machine.total_bytes() == 5_000_000
    (container / "max").write_text("2000000\n")
    assert machine.available_bytes() == 0


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

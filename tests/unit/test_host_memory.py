"""When a rank's heap keeps what is freed: only where the system, or the container, has plenty."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hybridengine.runtime import host_memory
from hybridengine.runtime.storage import return_memory_to_system


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files that stand for the kernel's, with 8000 KiB available and no container."""
    (tmp_path / "meminfo").write_text("MemTotal: 16000 kB\nMemFree: 100 kB\nMemAvailable:    8000 kB\n")
    monkeypatch.setattr(host_memory, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(host_memory, "GROUPS", ((tmp_path / "max", tmp_path / "current"),))
    return tmp_path


def test_the_smaller_of_system_and_container_counts(system: Path):
    assert host_memory.available_bytes() == 8000 * 1024
    (system / "current").write_text("3000000\n")
    (system / "max").write_text("max\n")
    assert host_memory.available_bytes() == 8000 * 1024
    (system / "max").write_text("5000000\n")
    assert host_memory.available_bytes() == 2_000_000
    (system / "max").write_text("2000000\n")
    assert host_memory.available_bytes() == 0
    (system / "max").unlink()
    (system / "meminfo").unlink()
    assert host_memory.available_bytes() == 0


def test_the_heap_keeps_what_is_a_quarter_of_that(system: Path, monkeypatch: pytest.MonkeyPatch):
    for free, keeps in ((0, True), (2000 * 1024, True), (2000 * 1024 + 1, False), (None, False)):
        monkeypatch.setattr(host_memory, "_free_in_heap", lambda free=free: free)
        assert host_memory.heap_is_worth_keeping() == keeps


def test_what_is_short_goes_back(system: Path, monkeypatch: pytest.MonkeyPatch):
    trimmed = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # a GPU's allocator has its own rule
    monkeypatch.setattr("hybridengine.runtime.storage.trim_heap", lambda: trimmed.append(1))
    monkeypatch.setattr(host_memory, "_free_in_heap", lambda: 2000 * 1024)
    return_memory_to_system(if_short=True)
    assert not trimmed
    monkeypatch.setattr(host_memory, "_free_in_heap", lambda: 3000 * 1024)
    return_memory_to_system(if_short=True)
    return_memory_to_system()
    assert len(trimmed) == 2


def test_the_c_library_says_what_is_free():
    size, count = 64 * 1024, 400  # small enough for the heap
    blocks = [torch.zeros(size, dtype=torch.uint8) for _ in range(2 * count)]
    held = host_memory._free_in_heap()
    del blocks[::2]  # what lies between others cannot leave the heap
    freed = host_memory._free_in_heap()
    assert held is not None
    assert freed is not None
    assert freed - held >= 0.9 * size * count


def test_what_a_process_holds_is_what_the_system_says():
    kept = torch.ones(2**24)  # 64 MiB, touched
    before = host_memory.held_bytes()["resident_bytes"]
    more = torch.ones(2**24)
    grown = host_memory.held_bytes()["resident_bytes"] - before
    assert grown == pytest.approx(more.nbytes, rel=0.1)
    status = Path("/proc/self/status").read_text()
    (resident,) = (int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmRSS:"))
    assert host_memory.held_bytes()["resident_bytes"] == pytest.approx(resident, rel=0.05)
    assert resident > kept.nbytes


def test_a_system_that_does_not_say_leaves_it_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(host_memory, "STATM", tmp_path / "missing")
    assert "resident_bytes" not in host_memory.held_bytes()

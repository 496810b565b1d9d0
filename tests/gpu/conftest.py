"""Fixtures of the checks on one GPU, and their figures at the end of pytest's output."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.gpu.launcher import DeviceLauncher

_figures: list[str] = []


@pytest.fixture(scope="session")
def on_device() -> DeviceLauncher:
    """`on_device(world_size, function, *args)` returns each rank's `function(rank, *args)`, run on the GPU."""
    return DeviceLauncher()


@pytest.fixture
def note(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """`note(text)` adds a figure to those that pytest prints at its end."""
    return lambda text: _figures.append(f"{request.node.name}: {text}")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An empty folder for a model."""
    return tmp_path


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _figures:
        terminalreporter.section("figures of this GPU")
        for line in _figures:
            terminalreporter.write_line(line)

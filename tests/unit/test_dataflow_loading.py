"""Dataflows by name: those that are there, and one's own that are not what they should be."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridengine.config.algorithm_sections import ALGORITHM_ROLES, AlgorithmSection
from hybridengine.drivers.dataflow import load_step
from hybridengine.errors import ConfigError


@pytest.mark.parametrize("name", ALGORITHM_ROLES)
def test_every_known_dataflow_has_a_step(name: str) -> None:
    step = load_step(AlgorithmSection(name=name))
    assert step.__module__ == f"hybridengine.drivers.{name}"


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (None, "cannot be imported (ModuleNotFoundError: No module named 'my_flows_none')"),
        ("1 / 0", "cannot be imported (ZeroDivisionError: division by zero)"),
        ("import sys; sys.exit(7)", "calls sys.exit(7) while it is imported; put that beneath"),
        ("def stepp(): ...", "has no function step; write step(roles, sampling, settings, state)"),
        ("step = 3", "has no function step"),
        ("def step(roles): ...", "step(roles) must be callable as step(roles, sampling, settings, state)"),
        ("def step(a, b, c, d, e): ...", "missing a required argument: 'e'"),
    ],
)
def test_what_is_wrong_with_a_dataflow_is_said_before_anything_starts(
    code: str | None,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    number = request.node.callspec.indices["code"]
    package = f"my_flows_{'none' if code is None else number}"
    monkeypatch.syspath_prepend(tmp_path)
    if code is not None:
        (tmp_path / package).mkdir()
        (tmp_path / package / "flow.py").write_text(code)
    with pytest.raises(ConfigError) as error:
        load_step(AlgorithmSection(name=f"{package}.flow"))
    assert f"algorithm.name={package}.flow" in str(error.value)
    assert words in str(error.value)

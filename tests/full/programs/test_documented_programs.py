"""Run the programs of docs/tutorials/library.md word for word and in order, as a reader would."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hybridengine
from tests.warm_workers import warm_program

pytestmark = pytest.mark.timeout(1100)

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs/tutorials/library.md"
WITH_RAY, ON_RANKS = "## A driver with Ray", "## Ranks without Ray"


def program(heading: str) -> str:
    """Return the first Python block under a heading of the page."""
    section = PAGE.read_text().split(f"\n{heading}\n", 1)[1]
    return section.split("```python\n", 1)[1].split("```", 1)[0]


def run(command: list[str], folder: Path, variables: dict[str, str]) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | variables
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("heading", [WITH_RAY, ON_RANKS])
def test_the_examples_import_public_names_only(heading: str) -> None:
    for node in ast.walk(ast.parse(program(heading))):
        if isinstance(node, ast.ImportFrom):
            assert node.module == "hybridengine"
            assert {alias.name for alias in node.names} <= set(hybridengine.__all__)


def test_programs_print_what_the_documentation_says(tmp_path: Path, warm_ray: dict[str, str]) -> None:
    """The driver and the ranks are forks of a warm process; torchrun itself starts as a reader starts it."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    for name, heading in (("driver.py", WITH_RAY), ("ranks.py", ON_RANKS)):
        (tmp_path / name).write_text(program(heading))
    with_ray = run(warm_program("driver.py"), tmp_path, warm_ray)
    assert "'redundant_bytes': 0" in with_ray
    assert float(re.findall(r"log-prob difference (\S+)", with_ray)[0]) < 1e-3
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    on_ranks = run([*torchrun, "--no-python", *warm_program("ranks.py")], tmp_path, warm_ray)
    lines = re.findall(
        r"rank (\d) step (\d) loss (\S+) .*redundant_bytes=0.*(\[[\d, ]+\])$", on_ranks, re.MULTILINE
    )
    assert sorted(line[:2] for line in lines) == [(rank, step) for rank in "01" for step in "012"]
    steps = {step: (float(loss), ast.literal_eval(tokens)) for _, step, loss, tokens in lines}
    assert len({line[1:] for line in lines}) == 3 and all(len(tokens) == 8 for _, tokens in steps.values())
    assert steps["0"][0] > steps["1"][0] > steps["2"][0]

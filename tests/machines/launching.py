"""What tests of launches share: a tiny run over two hosts, and what it leaves."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from hybridengine.report.step_rows import read_rows
from tests.full.tiny_runs import SECTIONS
from tests.machines.hosts import ROOT, Host

ADDED = ROOT / "tests/machines/warm"
"""Folder in PYTHONPATH with which `ray start` takes its workers from the warm process."""


def write_run(folder: Path, name: str, steps: int, **sections: Any) -> Path:
    """Write the configuration of a run with two ranks on each of two nodes, which saves each step; return its file."""
    changes = {
        "run": SECTIONS["run"] | {"steps": steps, "eval_every": 0, "folder": str(folder / "runs")},
        "cluster": {"ranks_per_node": [2, 2], "device": "cpu"},
        "checkpoint": {"every": 1},
    }
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(SECTIONS | changes | sections))
    return file


def launch_environment(warm_ray: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with which the nodes of a launch run this repository, with warm workers."""
    paths = filter(None, (str(ROOT), str(ADDED), os.environ.get("PYTHONPATH")))
    return {**warm_ray, "PYTHONPATH": os.pathsep.join(paths)}


def trained_steps(folder: Path, name: str) -> list[int]:
    """Return the steps in a run's metrics, in the order in which they were written."""
    return [int(row["step"] or 0) for row in read_rows(folder / "runs" / name)]


def last_checkpoint(folder: Path, name: str) -> int:
    """Return the step of a run's newest whole checkpoint; 0 if it has none."""
    found = (folder / "runs" / name / "checkpoints").glob("step-????????")
    return max((int(one.name.removeprefix("step-")) for one in found), default=0)


def processes_of_ray(host: Host) -> list[str]:
    """Return the command lines of Ray's processes and of nodes of launches on a host."""
    lines = host.run("ps", "-eo", "args", "--width", "200").stdout.splitlines()
    return [line for line in lines if "ray" in line.split()[0] or "launch node" in line or "raylet" in line]

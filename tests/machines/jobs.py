"""Jobs, that of `make train` by default, cut short, on hosts and on this machine alone; both give the same numbers."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hybridengine.report.step_rows import Row, read_rows
from hybridengine.report.timeline import TIMELINE_FILE, Span, read_timeline
from tests.full.tiny_runs import computed
from tests.machines.hosts import ROOT
from tests.machines.ray_nodes import COMMAND, RayCluster
from tests.warm_workers import warm_program

SHORT = (
    "run.steps=1",
    "run.eval_every=1",
    "warmup.steps=5",
    "warmup.batch_size=32",
    "data.batch_size=32",
    "data.task.train_rows=256",
    "data.task.eval_rows=16",
    "actor.mini_batches=2",
    "critic.mini_batches=2",
)
LIMIT_S = 600


@dataclass(frozen=True)
class Job:
    """What a run has left."""

    folder: Path
    console: str
    rows: list[Row]
    """Metrics of the steps that do not depend on the machine."""
    weights: bytes
    spans: Sequence[Span]

    def nodes(self, role: str) -> set[str]:
        """Return the addresses of the nodes on which a role has worked."""
        return {span.node for span in self.spans if span.role == role}


def train(folder: Path, *changes: str, cluster: RayCluster, name: str = "arithmetic") -> Job:
    """Run the configuration of this name in a cluster over hosts, from its first host; `folder` is shared."""
    where = f"cluster.address={cluster.address}"
    done = cluster.run(*_command(folder, name), where, *changes, limit_s=LIMIT_S)
    return read_job(folder / name, done.stdout)


def train_here(folder: Path, *changes: str, warm_ray: Mapping[str, str], name: str = "arithmetic") -> Job:
    """Run the configuration of this name on this machine, with a Ray of its own."""
    done = subprocess.run(
        warm_program(*_command(folder, name), *changes),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
        cwd=ROOT,
        env={**os.environ, **warm_ray},
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return read_job(folder / name, done.stdout)


def _command(folder: Path, name: str) -> list[str]:
    return [COMMAND, "train", f"configs/{name}.yaml", *SHORT, f"run.folder={folder}"]


def read_job(run: Path, console: str) -> Job:
    """Return what the run in this folder has left."""
    weights = (run / "final" / "model.safetensors").read_bytes()
    return Job(run, console, computed(read_rows(run)), weights, read_timeline(run / TIMELINE_FILE).spans)

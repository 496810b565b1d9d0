"""PPO's dataflow with real faults: ranks that die or hang, an engine that raises, gradients that are not finite, a full
disk, signals.

`algorithm.faults` is a folder with a file for each fault, named STEP-FAULT; the injecting rank removes the file first, so
that it happens once. `algorithm.checkpoints` is the folder of the run's checkpoints.
"""

from __future__ import annotations

import os
import resource
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict, TensorDictBase

from hybridengine.algorithms.across import Across
from hybridengine.controller import cluster
from hybridengine.drivers.advantages import ppo
from hybridengine.drivers.ppo import Ppo
from hybridengine.drivers.roles import Roles, Sampling, State
from hybridengine.rows.protocols import ROW_NUMBERS

VICTIM = 1
"""Rank that the fault hits, if there are several."""
FILE_BYTES = 100_000
"""Largest file on a full disk: less than a part of a checkpoint, more than the file that probes the disk."""
POISONED_ROW = 8
HANG_S, SAVED_S = 600.0, 20.0
ROLES = ("actor", "critic")
DECODED_TOKENS = 3
"""Tokens decoded before the engine raises."""


class EngineBrokenError(RuntimeError):
    """An error that stands for any that an engine may raise."""


class Faulty(Ppo):
    """PPO with faults at given steps."""

    faults: str
    checkpoints: str
    poisoned: int | None = None
    """Step whose advantages are not finite."""

    def step(self, roles: Roles, sampling: Sampling, state: State) -> dict[str, float]:
        """Run PPO's iteration with the faults of its step."""
        for file in sorted(Path(self.faults).glob(f"{sampling.step}-*")):
            name = file.name.partition("-")[2]
            file.unlink()
            if name in SIGNALS:
                for number in SIGNALS[name]:
                    os.kill(os.getpid(), number)
            elif name == "a-cluster-shrinks":
                cluster.node_offers = list  # as Ray answers for a cluster without nodes
            else:
                rows = roles.prompts.training_prompts(sampling.prompts, sampling.step)
                lengths = rows.select("prompt_lengths")
                roles.compute.measure(lengths, f"{__name__}.inject", name, self.checkpoints).get()
        if sampling.step != self.poisoned:
            return super().step(roles, sampling, state)
        poisoned = self.model_copy(update={"advantages": f"{__name__}:poisoned_advantages"})
        return Ppo.step(poisoned, roles, sampling, state)


SIGNALS = {
    "terminate": [signal.SIGTERM],
    "interrupt-twice": [signal.SIGINT, signal.SIGINT],
}


def inject(rows: TensorDictBase, across: Across, name: str, checkpoints: str) -> dict[str, float]:
    """Prepare or carry out the fault on the victim; called on every rank."""
    if dist.get_rank() == min(VICTIM, dist.get_world_size() - 1):
        if name == "kill-rank-when-saved":
            _wait_until_saved(Path(checkpoints))
        FAULTS[name]()
    return {}


def _wait_until_saved(checkpoints: Path) -> None:
    """Wait in the middle of a step, as a long generation does, until all ranks have written the newest checkpoint."""
    (partial,), deadline = checkpoints.glob(".*"), time.monotonic() + SAVED_S
    while not all((partial / role / "files.json").exists() for role in ROLES):
        assert time.monotonic() < deadline, "the checkpoint is not written while the ranks work"
        time.sleep(0.01)


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _kill_node() -> None:
    """Kill the raylet of this rank's node; all other processes of the node end after it."""
    os.kill(int(os.environ["RAY_RAYLET_PID"]), signal.SIGKILL)
    time.sleep(HANG_S)


def _hang() -> None:
    time.sleep(HANG_S)


def _break_engine() -> None:
    """Make the engine's model raise in the middle of the next responses."""
    from hybridengine.backends.vllm.engine import VllmEngine

    add, passes = VllmEngine.add, iter(range(1000))

    def raise_later(*_: Any) -> None:
        if next(passes) >= DECODED_TOKENS:
            raise EngineBrokenError("an illegal memory access was encountered")

    def add_and_raise(engine: VllmEngine, requests: Any) -> None:
        engine._runner.model.register_forward_pre_hook(raise_later)
        add(engine, requests)

    VllmEngine.add = add_and_raise  # type: ignore[method-assign]


def _fill_disk() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, resource.RLIM_INFINITY))


def _damage_switch() -> None:
    """Make every later switch leave the engine's weights slightly wrong."""
    from hybridengine.weights.hybrid_engine import HybridEngine

    switch = HybridEngine.to_generate

    def damaging(hybrid: HybridEngine) -> Any:
        report = switch(hybrid)
        weights = hybrid._generation.weights
        for name in weights.names:
            weights[name].mul_(1.7)
        return report

    HybridEngine.to_generate = damaging  # type: ignore[method-assign]


FAULTS = {
    "kill-rank": _kill,
    "kill-rank-when-saved": _kill,
    "kill-node": _kill_node,
    "hang": _hang,
    "engine": _break_engine,
    "full-disk": _fill_disk,
    "damaged-switch": _damage_switch,
}


def poisoned_advantages(rows: TensorDictBase, across: Across, algorithm: Ppo, samples: int) -> TensorDict:
    """Return PPO's advantages, with those of one row not finite, whichever rank has it."""
    found = ppo(rows, across, algorithm, samples)
    found["advantages"][rows[ROW_NUMBERS] == POISONED_ROW] = torch.nan
    return found

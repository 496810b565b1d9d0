"""PPO's dataflow with real faults: ranks that die or hang, an engine that raises, gradients that are no numbers, a full
disk, signals.

`algorithm.faults` is a folder with a file for each fault, named STEP-FAULT; who carries it out removes the file first, so
that it happens once. `algorithm.checkpoints` is where the run has its own.
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
"""Rank that the fault meets, where there are several."""
FILE_BYTES = 100_000
"""Largest file on a disk that is full: less than a part of a checkpoint, more than what says that it can be written."""
POISONED_ROW = 8
HANG_S, SAVED_S = 600.0, 20.0
ROLES = ("actor", "critic")
DECODED_TOKENS = 3
"""Until the engine raises."""


class EngineBrokenError(RuntimeError):
    """Stands for whatever an engine may raise."""


class Faulty(Ppo):
    """PPO, with the faults of each step."""

    faults: str
    checkpoints: str
    poisoned: int | None = None
    """Step whose advantages are no numbers."""

    def step(self, roles: Roles, sampling: Sampling, state: State) -> dict[str, float]:
        """PPO's iteration, with the faults of its number."""
        for file in sorted(Path(self.faults).glob(f"{sampling.step}-*")):
            name = file.name.partition("-")[2]
            file.unlink()
            if name in SIGNALS:
                for number in SIGNALS[name]:
                    os.kill(os.getpid(), number)
            elif name == "a-cluster-shrinks":
                cluster.node_offers = list  # what Ray says of a cluster without nodes
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
    """On every rank: the victim prepares or meets the fault."""
    if dist.get_rank() == min(VICTIM, dist.get_world_size() - 1):
        if name == "kill-rank-when-saved":
            _wait_until_saved(Path(checkpoints))
        FAULTS[name]()
    return {}


def _wait_until_saved(checkpoints: Path) -> None:
    """In the middle of a step, as in a long generation: until all ranks have written the newest checkpoint."""
    (partial,), deadline = checkpoints.glob(".*"), time.monotonic() + SAVED_S
    while not all((partial / role / "files.json").exists() for role in ROLES):
        assert time.monotonic() < deadline, "the checkpoint is not written while the ranks work"
        time.sleep(0.01)


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _kill_node() -> None:
    """The raylet of this rank's node; all other processes of the node end after it."""
    os.kill(int(os.environ["RAY_RAYLET_PID"]), signal.SIGKILL)
    time.sleep(HANG_S)


def _hang() -> None:
    time.sleep(HANG_S)


def _break_engine() -> None:
    """The model of the engine raises in the middle of the next responses."""
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
    """From now on, a switch leaves the engine's weights a little wrong."""
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
    """As in PPO; one row's are no numbers, whichever rank has it."""
    found = ppo(rows, across, algorithm, samples)
    found["advantages"][rows[ROW_NUMBERS] == POISONED_ROW] = torch.nan
    return found

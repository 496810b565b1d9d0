"""Asynchronous GRPO with an engine that dies, or hangs, in the middle of a run, or that writes down what it trains."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import ray
import torch

from hybridengine.controller.rows import Rows
from hybridengine.drivers.async_grpo import AsyncGrpo
from hybridengine.drivers.roles import Roles, Sampling, Scorers, State

HANG_S = 600.0


class LosesEngine(AsyncGrpo):
    """Kills the first engine that is left at the begin of a step, while it draws, or when it receives weights."""

    dies_in: str = "2"
    """Steps in which an engine dies."""
    in_push: bool = False
    """True for one that dies at the end of the step, in the push of new weights."""

    def step(self, roles: Roles, sampling: Sampling, state: State) -> dict[str, float]:
        if str(sampling.step) in self.dies_in.split():
            process = roles.generation._engines[0].group.pool._processes[0]
            if self.in_push:
                ray.get(process.__ray_call__.remote(_make_die_in_push))
            else:
                ray.kill(process)
        return super().step(roles, sampling, state)


def _make_die_in_push(process: Any) -> None:
    """Replace the first thing that an engine does for new weights in this process."""
    from hybridengine.backends.vllm.engine import VllmEngine

    VllmEngine.settle = _die  # type: ignore[method-assign]


def _die(engine: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class HangsEngine(AsyncGrpo):
    """Makes the first engine hang from its next call on at the begin of a step; its process stays alive."""

    hangs_in: int = 2
    """Step in which the engine hangs."""

    def step(self, roles: Roles, sampling: Sampling, state: State) -> dict[str, float]:
        if sampling.step == self.hangs_in:
            ray.get(roles.generation._engines[0].group.pool._processes[0].__ray_call__.remote(_make_hang))
        return super().step(roles, sampling, state)


def _make_hang(process: Any) -> None:
    """Replace the engine's steps in this process."""
    from hybridengine.backends.vllm.engine import VllmEngine

    VllmEngine.advance = _hang  # type: ignore[method-assign]


def _hang(engine: Any, num_steps: int) -> None:
    time.sleep(HANG_S)


class WritesBatches(AsyncGrpo):
    """Writes columns of each batch to a folder."""

    folder: str
    written: ClassVar[tuple[str, ...]] = ("tokens", "prompt_lengths", "response_lengths", "scores")

    def step(self, roles: Roles, sampling: Sampling, state: State) -> dict[str, float]:
        take = roles.generation.take

        def taken(version: int, scorers: Scorers) -> tuple[Rows, Rows]:
            batch, scores = take(version, scorers)
            torch.save(
                dict(batch.union(scores).get(*self.written)), Path(self.folder) / f"{sampling.step}.pt"
            )
            return batch, scores

        with patch.object(roles.generation, "take", taken):
            return super().step(roles, sampling, state)


def parity(responses: Sequence[str], answers: Sequence[str]) -> list[float]:
    """Return 1 for responses of an odd number of characters: half of all pairs have the same score."""
    return [float(len(response) % 2) for response in responses]

"""Workers that take the time of a GPU for a run's real work (scripts/emulated_time.py), or have a core for themselves."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from emulated_time import Pace, engine_cost, lengths_of, response_tokens, token_seconds
from tensordict import TensorDict, TensorDictBase

from hybridengine.backends.engine import Request, Response
from hybridengine.backends.vllm.engine import VllmEngine
from hybridengine.config import RunConfig
from workers.actor import ActorWorker
from workers.generation import GenerationWorker
from workers.reference import ReferenceWorker
from workers.rollouts import EngineRollouts

ENGINE_CORE = 1
"""Core of a pinned engine; trainers have the core of their rank's number."""


class LengthsEngine:
    """An engine whose responses have the lengths of their seeds."""

    def __init__(self, engine: VllmEngine, run: RunConfig) -> None:
        self._engine, self._lengths = engine, lengths_of(run)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def add(self, requests: Sequence[Request]) -> None:
        self._engine.add([self._cut(request) for request in requests])

    def _cut(self, request: Request) -> Request:
        """Return the request with its length; a greedy one, of an evaluation, has one token."""
        drawn, greedy = request.first_position, not request.sampling.temperature
        num_tokens = 1 if greedy else response_tokens(self._lengths, request.seed) - drawn
        sampling = replace(request.sampling, max_tokens=num_tokens, stop_token_ids=())
        return replace(request, sampling=sampling)


class PacedEngine(LengthsEngine):
    """An engine whose steps take the predicted time, and whose responses have the lengths of their seeds."""

    def __init__(self, engine: VllmEngine, run: RunConfig) -> None:
        super().__init__(engine, run)
        self._cost, self._most_rows = engine_cost(run), run.rollout.max_num_seqs
        self._pace, self._prefill_tokens = Pace(), 0

    def add(self, requests: Sequence[Request]) -> None:
        super().add(requests)
        self._prefill_tokens += sum(len(request.prompt_token_ids) for request in requests)

    def advance(self, num_steps: int = 1) -> list[Response]:
        ended = list[Response]()
        for _ in range(num_steps):
            if num_rows := min(self._engine.num_unfinished, self._most_rows):
                seconds = self._cost.step_s(num_rows, 0) + self._cost.prefill_s(self._prefill_tokens)
                self._prefill_tokens = 0
                with self._pace.takes(seconds):
                    ended += self._engine.advance()
        return ended


class PacedGeneration(GenerationWorker):
    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._engine: Any = PacedEngine(self._engine, self._run)
        self._rollouts = EngineRollouts(self._run, self._engine, ())  # lengths end responses


class PacedReference(ReferenceWorker):
    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._token_s = token_seconds(self.run)
        self._pace = Pace()

    def forward_rows(self, *arguments: Any) -> TensorDict | None:
        with self._pace.takes(self._token_s["reference.compute_log_probs"] * num_tokens(arguments[0])):
            return super().forward_rows(*arguments)


class PacedActor(ActorWorker):
    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._engine: Any = PacedEngine(self._engine, self.run)
        self._token_s = token_seconds(self.run)
        self._pace = Pace()

    def forward_rows(self, *arguments: Any) -> TensorDict | None:
        with self._pace.takes(self._token_s["actor.compute_log_probs"] * num_tokens(arguments[0])):
            return super().forward_rows(*arguments)

    def update_rows(self, *arguments: Any, **settings: Any) -> dict[str, float]:
        with self._pace.takes(self._token_s["actor.update"] * num_tokens(arguments[0])):
            return super().update_rows(*arguments, **settings)


class PinnedGeneration(GenerationWorker):
    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._engine: Any = LengthsEngine(self._engine, self._run)
        self._rollouts = EngineRollouts(self._run, self._engine, ())  # lengths end responses
        pin(ENGINE_CORE)


class PinnedActor(ActorWorker):
    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._engine: Any = LengthsEngine(self._engine, self.run)
        pin(self.context.rank)


def pin(core: int) -> None:
    """Let this process, and the threads that it starts, run on one core alone."""
    for thread in Path("/proc/self/task").iterdir():
        os.sched_setaffinity(int(thread.name), {core})


def num_tokens(batch: TensorDictBase) -> int:
    """Return the tokens of the whole batch, of which every rank is taken to have the same share. Collective."""
    tokens = (batch["prompt_lengths"] + batch["response_lengths"]).sum()
    dist.all_reduce(tokens)
    return int(tokens)

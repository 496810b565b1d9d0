"""Engines of a server on ranks of their own, which sample while the actor trains."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any

from hybridengine.controller.calls import Future
from hybridengine.controller.failures import is_passing
from hybridengine.errors import WorkerError
from hybridengine.rollouts.engine import PoolEngine
from hybridengine.serving.draws import draw_batch, draw_rows, drawn_samples
from hybridengine.serving.rank_groups import RankGroups
from hybridengine.serving.rank_losses import tells_of_loss
from hybridengine.serving.ranks import Prompt, Sampled, Weights


class PoolEngines:
    """Engines whose worker is `workers.client_engine.ClientEngine` (`Engines`); all hold the same weights.

    `holding` has the actor hold weights while a context is open.
    """

    def __init__(
        self, groups: RankGroups, holding: Callable[[Weights], AbstractContextManager[None]]
    ) -> None:
        self._groups, self._holding = groups, holding
        self._engines: Sequence[PoolEngine] = ()
        """Those that hold weights: not those of `groups` once these have been started again."""
        self._name = ""
        self._numbers = itertools.count()

    @property
    def held(self) -> str | None:
        """Name of the weights of the last `push`; None before, and on new ranks."""
        return self._name if self._engines is self._groups.engines else None

    @tells_of_loss
    def push(self, weights: Weights, name: str) -> None:
        """Push weights of the actor to all engines."""
        self._engines = ()
        pushes, engines = self._groups.pushes, self._groups.engines
        with self._holding(weights):
            if not pushes.push(next(self._numbers), engines):
                next(engine for engine in engines if engine.has_died).raise_death()
        self._engines, self._name = engines, name

    @tells_of_loss
    def sample(self, prompts: Sequence[Prompt]) -> Sequence[Sampled]:
        """Return the continuations of each prompt; the engines draw about as many each."""
        rows = draw_rows(prompts, self._groups.end_tokens)
        size = math.ceil(len(rows) / len(self._engines))
        parts = [rows[begin : begin + size] for begin in range(0, len(rows), size)]
        calls = [
            engine.group.sample(*draw_batch(part)) for engine, part in zip(self._engines, parts, strict=False)
        ]
        answers = itertools.chain.from_iterable(_results(calls))
        return [Sampled(samples) for samples in drawn_samples(prompts, rows, answers)]


def _results(calls: Sequence[Future]) -> list[Any]:
    """Return the results of calls on several engines.

    After an error that is not the loss of a rank, all calls have ended, so that none fails later ones.
    """
    try:
        return [call.get() for call in calls]
    except WorkerError as error:
        if not is_passing(error):
            for call in calls:
                with suppress(WorkerError):
                    call.wait()
        raise

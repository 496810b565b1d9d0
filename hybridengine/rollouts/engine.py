"""One engine of an asynchronous run as the controller sees it: its ranks, its requests and its call in flight."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import torch
from tensordict import TensorDict

from hybridengine.config import RunConfig
from hybridengine.controller.calls import Future
from hybridengine.controller.failures import RankFailedError
from hybridengine.controller.rows import Rows
from hybridengine.controller.worker_group import WorkerGroup
from hybridengine.rollouts.drawn import Drawn
from hybridengine.rollouts.queue import Rollout, first_seed


class PoolEngine:
    """An engine with a pool of its own, of the number `number` in the run."""

    unit = 1
    """Responses are begun in multiples of this number."""
    is_leaving = False
    """True if it gets no more responses and calls."""

    def __init__(self, config: RunConfig, group: WorkerGroup, number: int) -> None:
        self.number, self.group = number, group
        self.rollouts: dict[int, Rollout] = {}
        """Unfinished responses that it draws."""
        self.call: Future | None = None
        """Call of `advance` whose tokens have not been taken."""
        self.receiving: Future | None = None
        """Its part in the last push of weights, or in the link for it."""
        self._config = config
        self._died: RankFailedError | None = None

    @property
    def has_died(self) -> bool:
        """True if a process of the engine is known to have ended."""
        calls = [call for call in (self.call, self.receiving) if call is not None]
        return self._died is not None or any(failure.died for call in calls for failure in call.failures)

    def look(self) -> None:
        """Notice failures of calls whose results nobody fetches; raise RankFailedError unless a process has ended."""
        with self._notices_death():
            self.group.pool.raise_failures()

    @contextlib.contextmanager
    def _notices_death(self) -> Iterator[None]:
        try:
            yield
        except RankFailedError as error:
            if not error.failure.died:
                raise
            self._died = error

    @property
    def has_news(self) -> bool:
        """True if its call has ended."""
        return self.call is not None and self.call.done()

    def begin(self, rollouts: Sequence[Rollout]) -> None:
        """Queue responses; those that already have tokens are continued."""
        if not rollouts:
            return
        config, rows_per_step = self._config, self._config.rows_per_step
        numbers = [rollout.number for rollout in rollouts]
        seeds = [
            first_seed(config.run.seed, number // rows_per_step + 1, rows_per_step) + number % rows_per_step
            for number in numbers
        ]
        lengths = [len(rollout.tokens) for rollout in rollouts]
        columns = {
            "numbers": torch.tensor(numbers),
            "prompt_numbers": torch.tensor(numbers) // config.rollout.samples_per_prompt,
            "seeds": torch.tensor(seeds) % 2**31,
            "drawn_lengths": torch.tensor(lengths),
            "drawn_routes": torch.tensor([rollout.num_routed for rollout in rollouts]),
            "drawn_tokens": padded([rollout.tokens for rollout in rollouts], max(lengths), 0, torch.int32),
        }
        if config.rollout.episode is not None:
            for name, dtype in (
                ("log_probs", torch.float32),
                ("versions", torch.int32),
                ("marks", torch.uint8),
            ):
                known = [getattr(rollout, name) for rollout in rollouts]
                columns[f"drawn_{name}"] = padded(known, max(lengths), 0, dtype)
        rows = Rows.of(TensorDict(columns, batch_size=[len(rollouts)]))  # pyright: ignore[reportArgumentType]
        self.rollouts |= {rollout.number: rollout for rollout in rollouts}
        with self._notices_death():
            self.group.begin(rows)

    def advance(self) -> None:
        """Begin a call that draws further tokens of the unfinished responses."""
        with self._notices_death():
            self.call = self.group.advance(self._config.generation.steps_per_call)

    def take_drawn(self) -> Sequence[Drawn]:
        """Return what the call has drawn, of each replica; wait for its end; raise WorkerError as `Future.get` does."""
        assert self.call is not None, "an engine is given a call before it ends"
        drawn: Sequence[Drawn] = self.call.get()
        self.call = None
        for number, has_ended, _ in (part for one in drawn for part in one.parts()):
            if has_ended:
                del self.rollouts[number]
        return drawn

    def withdraw(self, count: int) -> list[Rollout]:
        """Drop the last `count` responses that were begun; return them."""
        numbers = [*self.rollouts][len(self.rollouts) - count :]
        with self._notices_death():
            self.group.withdraw(numbers)
        return [self.rollouts.pop(number) for number in numbers]

    def raise_death(self) -> NoReturn:
        """Raise the error of the process that has ended."""
        for call in (self.call, self.receiving):
            if call is not None and call.failures:
                call.wait()
        assert self._died is not None, "the engine has died"
        raise self._died

    def end(self) -> list[Rollout]:
        """End the processes that are left of a dead engine; return the responses that others go on with."""
        self.group.pool.close()
        return list(self.rollouts.values())


class ActorEngine(PoolEngine):
    """The actor's own engine, which draws while the actor would wait for a batch."""

    def __init__(self, config: RunConfig, actor: WorkerGroup, number: int) -> None:
        super().__init__(config, actor, number)
        self.unit = config.generation_grid.num_replicas
        self.group.join_engines()

    @contextlib.contextmanager
    def _notices_death(self) -> Iterator[None]:
        """Let errors pass: the trainer dies with this engine."""
        yield

    @property
    def has_died(self) -> bool:
        return False

    def end(self) -> list[Rollout]:
        """Give the ranks back to the trainer; return the responses that others go on with."""
        self.group.leave_engines()
        return list(self.rollouts.values())


def padded(rows: Sequence[Sequence[Any]], width: int, padding: float, dtype: torch.dtype) -> torch.Tensor:
    """Return rows as a tensor [rows, width], padded at the end."""
    filled = [[*row, *[padding] * (width - len(row))] for row in rows]
    return torch.tensor(filled, dtype=dtype).reshape(len(rows), width)

"""Engines of an asynchronous run, which the controller keeps at work while it waits for the trainer or for responses."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import torch
from tensordict import NonTensorStack, TensorDict

from hybridengine.algorithms.group_advantages import has_equal_scores
from hybridengine.algorithms.masking import response_mask
from hybridengine.algorithms.staleness import fresh_tokens
from hybridengine.config import RunConfig
from hybridengine.controller.calls import Future, wait_any
from hybridengine.controller.rows import Rows
from hybridengine.controller.worker_group import WorkerGroup
from hybridengine.report import keys
from hybridengine.rollouts.engine import ActorEngine, PoolEngine, padded
from hybridengine.rollouts.episodes import episode_columns
from hybridengine.rollouts.order import CallOrder, Wait
from hybridengine.rollouts.pushes import Pushes
from hybridengine.rollouts.queue import QUEUE_FILE, Rollout, RolloutQueue, read_queue, save_queue
from hybridengine.rows.micro_batches import ROUTES, padded_routes
from hybridengine.rows.supports import SUPPORTS, support_row


class Scorers(Protocol):
    """Groups that score responses (`drivers.roles.Scorers`)."""

    @property
    def num_ranks(self) -> int:
        """Number of ranks in the largest group."""
        ...

    def compute_scores(self, rollout: Rows) -> Rows:
        """Return `scores` and `dropped`, and the terms' own columns if there are several."""
        ...


class Engines:
    """The role `generation`: engines on ranks of their own, with the queue of their responses.

    Engines take one call of `advance` after another. Between two, requests come and go; new weights are received in the
    order of the calls, so that each token's version is known. An engine whose process ends leaves its requests to the
    others, which go on after the tokens that the controller has.
    """

    def __init__(
        self,
        config: RunConfig,
        groups: Sequence[WorkerGroup],
        actor: WorkerGroup,
        prompts: WorkerGroup,
        say: Callable[[str], None],
    ) -> None:
        self._config, self._actor, self._prompts, self._say = config, actor, prompts, say
        self._engines = [PoolEngine(config, group, number) for number, group in enumerate(groups)]
        self._own: ActorEngine | None = None
        """The actor's engine while it is at work."""
        self._drawn_tokens = [0, 0]
        """Tokens that the engines, and that the actor has drawn since the last metrics."""
        self._moving: list[Rollout] = []
        """Responses that an engine has left to the actor's, which has not begun them yet."""
        self.max_versions = config.staleness.max_versions
        self.queue = RolloutQueue.of(config)
        replay = config.generation.replay
        self._order = CallOrder(config.calls_file, Path(replay) if replay else None)
        self._pushes = Pushes(config, actor)
        self._orphans: list[Rollout] = []
        """Responses of engines that have died, which no other has begun yet."""
        self._waited_s = 0.0
        self._num_dropped = 0
        """Prompts that dynamic sampling has dropped since the last metrics."""

    def go_on(self, version: int, saved: Path | None) -> None:
        """Give the engines the actor's weights, which are `version`; go on with the queue saved in a folder, if any."""
        if saved is not None and (saved / QUEUE_FILE).exists():
            self.queue, _ = read_queue(self._config, saved / QUEUE_FILE)
        else:  # a new run, or one that was synchronous so far
            self.queue.begin_at(version)
        self._order.go_on_after(version)
        self.update_weights(version)
        self._spread(self.queue.unfinished())

    def save(self, folder: Path) -> None:
        """Save the queue with every token drawn so far.

        Engines then go on from these tokens, as those of a resumed run do, so that both draw the same ones.
        """
        self._work_while(
            self.queue.version, lambda: any(one.call is not None for one in self._engines), begins=False
        )
        for engine in self._engines:
            engine.withdraw(len(engine.rollouts))
        self._orphans = []
        (digest, *_) = self._prompts.digest(self.queue.prompts).get()
        save_queue(self.queue, digest, folder / QUEUE_FILE)
        self._spread(self.queue.unfinished())

    # ---- what dataflows call ----

    def take(self, version: int, scorers: Scorers) -> tuple[Rows, Rows]:
        """Return the next batch, which trains the weights of `version`, once it is complete, and its scores.

        With `generation.max_tries` above 1, prompts whose responses all have the same score are dropped before, and
        others take their places (dynamic sampling).

        Columns: those of the prompts, `tokens` [B, P + R], `response_lengths` [B], [B, R] each `rollout_log_probs`,
        `versions` (int32, -1 after the response), and `fresh`, which is False at tokens too old to be trained. The scores
        have the columns of `scorers`.
        """
        assert version == self.queue.num_taken, f"batch {self.queue.num_taken} cannot train version {version}"
        begun_s = time.monotonic()
        self._fill(version + 1)
        scores = self._drop_equal(version, scorers)
        self._waited_s += time.monotonic() - begun_s
        batch = self.queue.take()
        rows = self._rows(version, batch.rollouts)
        if not scores:
            return rows, scorers.compute_scores(rows)
        prompts = [rollout.number // self.queue.samples for rollout in batch.rollouts[:: self.queue.samples]]
        joined = torch.cat([scores[prompt] for prompt in prompts])  # pyright: ignore[reportCallIssue, reportArgumentType]
        return rows, Rows.of(cast(TensorDict, joined))

    def _fill(self, step: int) -> None:
        """Keep the engines at work until the next batch is ready, the actor's among them if the settings say so."""
        if self._config.generation.actor and not self.queue.is_ready:
            self._own = ActorEngine(self._config, self._actor, len(self._config.engines))
        self._work_while(step, lambda: not self.queue.is_ready)
        if (own := self._own) is not None:
            own.is_leaving = True
            self._work_while(step, lambda: own.call is not None)
            self._own = None
            self._spread([*own.end(), *self._moving])
            self._moving = []

    def _drop_equal(self, version: int, scorers: Scorers) -> dict[int, TensorDict]:
        """Drop prompts of equal scores, as often as the settings allow it; return the others' scores by prompt.

        Without dynamic sampling, nothing is scored.
        """
        scores = dict[int, TensorDict]()
        if self._config.generation.max_tries == 1:
            return scores
        left = (self._config.generation.max_tries - 1) * self.queue.prompts_per_batch
        while new := [prompt for prompt in self.queue.next_prompts if prompt not in scores]:
            scores |= self._score(version, new, scorers)
            equal = [
                prompt
                for prompt in new
                if has_equal_scores(scores[prompt]["scores"], scores[prompt]["dropped"])
            ][:left]
            self.queue.drop(equal)
            self._num_dropped += len(equal)
            left -= len(equal)
            self._fill(version + 1)
        return scores

    def _score(self, version: int, prompts: Sequence[int], scorers: Scorers) -> dict[int, TensorDict]:
        """Return the columns of `scorers` for complete prompts, while the engines stay at work."""
        rows = self._rows(version, self.queue.responses(prompts))
        scored = scorers.compute_scores(rows.pad_to_multiple(scorers.num_ranks))
        self._work_while(version + 1, lambda: not all(call.done() for call in scored.calls), scored.calls)
        parts = scored[: len(rows)].get().split(self.queue.samples)
        return dict(zip(prompts, parts, strict=True))

    def work_until(self, *calls: Future) -> None:
        """Keep the engines at work until calls of other groups have ended."""
        self._work_while(self.queue.num_taken, lambda: not all(call.done() for call in calls), calls)

    def update_weights(self, version: int) -> None:
        """Push the actor's weights, as they are after the calls made so far, to all engines, where they are `version`.

        Waits until the engines have them: what they draw with others has been drawn by then.
        """
        while True:
            for engine in self._engines:
                engine.look()
            self._go_on_without_the_dead()
            if self._pushes.push(version, self._engines):
                break
        self.queue.version = version

    def take_metrics(self) -> dict[str, float]:
        """Return the metrics since the last call."""
        waited_s, self._waited_s = self._waited_s, 0.0
        num_dropped, self._num_dropped = self._num_dropped, 0
        (others, own), self._drawn_tokens = self._drawn_tokens, [0, 0]
        return {
            "queue/actor_share": own / max(1, others + own),
            "queue/dropped": float(num_dropped),
            keys.QUEUE_COMPLETE: float(self.queue.num_complete),
            keys.QUEUE_UNFINISHED: float(self.queue.num_unfinished),
            "queue/wait_s": waited_s,
            **self._pushes.costs,
        }

    # ---- responses ----

    @property
    def _working(self) -> Sequence[PoolEngine]:
        """All engines that draw now."""
        return self._engines if self._own is None else [*self._engines, self._own]

    def _work_while(
        self, step: int, condition: Callable[[], bool], others: Sequence[Future] = (), *, begins: bool = True
    ) -> None:
        """Keep the engines at work while a condition holds, which changes with their calls or with `others`.

        `step` is the iteration, from 1. Without `begins`, engines get neither requests nor calls.
        """
        ended = list[list[int]]()
        repeated = self._order.next_wait(step)
        while condition() if repeated is None else len(ended) < len(repeated):
            if begins:
                self._begin()
            places = self._next_ended(others) if repeated is None else repeated[len(ended)]
            calling = {engine.number for engine in self._working if engine.call is not None}
            if strange := {*places} - calling:
                raise self._order.mismatch(f"the end of a call of engine {min(strange)}", step)
            for engine in self._working:
                if engine.number in places:
                    for drawn in engine.take_drawn():
                        self.queue.record(drawn)
                        self._drawn_tokens[engine is self._own] += drawn.num_tokens
            ended.append(places)
        self._order.record(Wait(step, ended))

    def _next_ended(self, others: Sequence[Future]) -> list[int]:
        """Wait for the end of a call; return the numbers of engines whose calls have ended, without those that died."""
        calls = [engine.call for engine in self._working if engine.call is not None]
        calls += [call for call in others if not call.poll()]
        if calls:
            wait_any(calls)
        else:  # engines may have died before they got a call
            died = any(engine.has_died for engine in self._engines)
            assert died or others, "no engine draws, and the batch is not complete"
        self._go_on_without_the_dead()
        return [engine.number for engine in self._working if engine.has_news]

    def _begin(self) -> None:
        """Give requests and a call to every engine that has none in flight; the actor's gets some of the others'."""
        if self._orphans:
            self._spread(self._orphans)
            self._orphans = []
        unfinished = sum(len(engine.rollouts) for engine in self._working) + len(self._moving)
        share = math.ceil((unfinished + self.queue.num_admissible) / len(self._working))
        share = min(share, self._config.rollout.max_num_seqs)
        for engine in self._working:
            if engine.call is not None or engine.is_leaving:
                continue
            if self._own not in (None, engine):
                self._leave_to_own(engine, share)
            engine.begin(self._next_of(engine, share - len(engine.rollouts)))
            if engine.rollouts:
                engine.advance()

    def _leave_to_own(self, engine: PoolEngine, share: int) -> None:
        """Let the actor's engine have what an engine has beyond its share, in its unit, as far as it lacks them."""
        assert self._own is not None, "only called while the actor's engine is at work"
        lacks = 0 if self._own.is_leaving else share - len(self._own.rollouts) - len(self._moving)
        count = min(lacks, len(engine.rollouts) - share) // self._own.unit * self._own.unit
        if count > 0:
            self._moving += engine.withdraw(count)

    def _next_of(self, engine: PoolEngine, most: int) -> list[Rollout]:
        """Return up to `most` responses that an engine begins now, in its unit; the actor's takes all that are moving."""
        moved: list[Rollout] = []
        if engine is self._own:
            moved, self._moving = self._moving, moved
        count = max(0, min(most - len(moved), self.queue.num_admissible)) // engine.unit * engine.unit
        return [*moved, *self.queue.admit(count)]

    def _spread(self, rollouts: Sequence[Rollout]) -> None:
        """Send responses to the engines in turn."""
        for place, engine in enumerate(self._engines):
            engine.begin(rollouts[place :: len(self._engines)])

    def _rows(self, version: int, rollouts: Sequence[Rollout]) -> Rows:
        """Return ended responses with their prompts as rows; they train the weights of `version`."""
        return self._prompts.sequences(Rows.of(self._columns(version, rollouts)))

    def _columns(self, version: int, rollouts: Sequence[Rollout]) -> TensorDict:
        """Return the columns that the engines have drawn."""
        width = self._config.rollout.max_response_tokens
        lengths = torch.tensor([len(rollout.tokens) for rollout in rollouts])
        versions = padded([rollout.versions for rollout in rollouts], width, -1, torch.int32)
        columns: dict[str, Any] = {
            "prompt_numbers": torch.tensor([rollout.number // self.queue.samples for rollout in rollouts]),
            "response_lengths": lengths,
            "response_tokens": padded([rollout.tokens for rollout in rollouts], width, 0, torch.int32),
            "rollout_log_probs": padded([rollout.log_probs for rollout in rollouts], width, 0, torch.float32),
            "versions": versions,
            "fresh": fresh_tokens(versions, response_mask(lengths, width), version, self.max_versions),
        }
        columns |= episode_columns(rollouts, self._config.rollout)
        parts = [part for rollout in rollouts for part in rollout.routes]
        if (
            self._config.rollout.routing_replay and parts
        ):  # those drawn before the run had this setting have none
            routes = [np.concatenate([parts[0][:0], *rollout.routes]) for rollout in rollouts]
            columns[ROUTES] = padded_routes(routes, self._config.max_tokens)
        if any(len(one) for rollout in rollouts for one in rollout.supports):
            columns[SUPPORTS] = NonTensorStack(*(support_row(rollout.supports) for rollout in rollouts))
        return TensorDict(columns, batch_size=[len(rollouts)])  # pyright: ignore[reportArgumentType]

    # ---- faults ----

    def _go_on_without_the_dead(self) -> None:
        """Keep the requests of engines that have died for the others.

        Raises RankFailedError if no engine is left.
        """
        dead = [engine for engine in self._engines if engine.has_died]
        if not dead:
            return
        if len(dead) == len(self._engines):
            dead[0].raise_death()
        self._engines = [engine for engine in self._engines if not engine.has_died]
        for engine in dead:
            self._say(
                f"warning: engine {engine.number} (pool {engine.group.pool.name}) has ended; the other"
                f" {len(self._engines)} go on with its {len(engine.rollouts)} responses"
            )
        self._orphans += [rollout for engine in dead for rollout in engine.end()]

"""Engines of an asynchronous run, which the controller keeps at work while it waits for the trainer or for responses."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.numpy import load_file, save_file
from tensordict import TensorDict

from hybridengine.algorithms.masking import response_mask
from hybridengine.algorithms.staleness import fresh_tokens
from hybridengine.config import RunConfig
from hybridengine.controller.calls import Future, wait_any
from hybridengine.controller.rows import Rows
from hybridengine.controller.worker_group import WorkerGroup
from hybridengine.report import keys
from hybridengine.rollouts.order import CallOrder, Wait
from hybridengine.rollouts.queue import Batch, Rollout, RolloutQueue, first_seed
from hybridengine.topology.links import NodeMap
from hybridengine.weights.executor import Verify
from hybridengine.weights.link import Link

ORDER_FILE, QUEUE_FILE = "calls.jsonl", "rollouts.safetensors"
RESPONSE_COLUMNS = ("response_lengths", "rollout_log_probs", "versions", "fresh")


@dataclass
class _Engine:
    """One engine, with the responses that it draws and its call in flight."""

    group: WorkerGroup
    rollouts: dict[int, Rollout]
    call: Future | None = None
    """Call of `advance` whose result has not been recorded."""
    begun_s: float = 0.0

    @property
    def num_unfinished(self) -> int:
        return len(self.rollouts)


class Engines:
    """The role `generation`: engines on ranks of their own, with the queue of their responses.

    Engines take one call of `advance` after another. Between two, requests come and go; new weights are received in the
    order of the calls, so that each token's version is known.
    """

    def __init__(
        self, config: RunConfig, groups: Sequence[WorkerGroup], actor: WorkerGroup, prompts: WorkerGroup
    ) -> None:
        self._config, self._actor, self._prompts = config, actor, prompts
        self._engines = [_Engine(group, {}) for group in groups]
        self.queue = RolloutQueue(
            config.rollout.samples_per_prompt, config.data.batch_size, config.run.steps, config.staleness
        )
        self._order = CallOrder(
            config.run_folder / ORDER_FILE,
            Path(config.generation.replay) if config.generation.replay else None,
        )
        self.max_versions = config.staleness.max_versions
        self._num_links = 0
        self._reports: list[Future] = []
        self._waited_s = 0.0

    # ---- weights ----

    def connect(self, version: int) -> None:
        """Link the engines to the actor, and push its weights, which are those of `version`."""
        config, actor = self._config, self._actor
        address, port, names = actor.link_facts().get()[0]
        groups = [engine.group for engine in self._engines]
        # Engines on the same node follow one another, so that weights cross the network to it once.
        groups.sort(key=lambda group: group.pool.nodes)
        nodes = [*actor.pool.nodes, *(node for group in groups for node in group.pool.nodes)]
        link = Link(
            name=f"link {self._num_links}",
            address=address,
            port=port,
            train=actor.topology.grid,
            names=names,
            engine=config.generation.parallel,
            num_engines=len(groups),
            nodes=NodeMap(tuple(_run_lengths(nodes))),
            bucket_elements=config.bucket_elements,
            verify=Verify(config.actor.verify),
        )
        self._num_links += 1
        calls = [group.join_link(link, number) for number, group in enumerate(groups)]
        for call in [*calls, actor.join_link(link)]:
            call.get()
        self.update_weights(version)

    def update_weights(self, version: int) -> None:
        """Push the actor's weights, as they are after the calls made so far, to all engines, where they are `version`."""
        received = [engine.group.receive_weights(version) for engine in self._engines]
        pushed = self._actor.push_weights(version)
        pushed.inputs += received  # so that waits for the actor see an engine's failure
        self._reports = [pushed, *received]
        self.queue.version = version

    # ---- responses ----

    def go_on(self, version: int, saved: Path | None) -> None:
        """Connect the engines with weights of `version`, and go on with the queue that was saved in a folder, if any."""
        if saved is not None and (saved / QUEUE_FILE).exists():
            self.queue.load_state(load_file(saved / QUEUE_FILE))
        else:  # a new run, or one that was synchronous so far
            self.queue.begin_at(version)
        self._order.go_on_after(version)
        self.connect(version)
        self._spread(self.queue.unfinished())

    def save(self, folder: Path) -> None:
        """Save the queue with every token drawn so far.

        Engines then go on from these tokens, as a resumed run does, so that both draw the same ones.
        """
        self._work_while(
            self.queue.version, lambda: any(one.call is not None for one in self._engines), begins=False
        )
        for engine in self._engines:
            engine.group.withdraw()
            engine.rollouts.clear()
        save_file(self.queue.state(), folder / QUEUE_FILE)
        self._spread(self.queue.unfinished())

    def _spread(self, rollouts: Sequence[Rollout]) -> None:
        """Send responses to the engines in turn."""
        for place, engine in enumerate(self._engines):
            if own := rollouts[place :: len(self._engines)]:
                self._send(engine, own)

    def take(self, version: int) -> Rows:
        """Return the rows of the next batch, which trains the weights of `version`, once it is complete.

        Columns: those of the prompts, `tokens` [B, P + R], `response_lengths` [B], and [B, R] each `rollout_log_probs`,
        `versions` (int32, -1 after the response), and `fresh`, which is False at tokens too old to be trained.
        """
        assert version == self.queue.num_taken, f"batch {self.queue.num_taken} cannot train version {version}"
        begun_s = time.monotonic()
        self._work_while(version + 1, lambda: not self.queue.is_ready)
        self._waited_s += time.monotonic() - begun_s
        batch = self.queue.take()
        rows = Rows.of(self._columns(batch))
        return self._prompts.sequences(rows).union(rows.select(*RESPONSE_COLUMNS))

    def work_until(self, *calls: Future) -> None:
        """Keep the engines at work until calls of other groups have ended."""
        self._work_while(self.queue.num_taken, lambda: not all(call.done() for call in calls), calls)

    def _work_while(
        self, step: int, condition: Callable[[], bool], others: Sequence[Future] = (), *, begins: bool = True
    ) -> None:
        """Keep the engines at work while a condition holds, which changes with their calls or with `others`.

        `step` is the iteration, from 1. Without `begins`, engines get neither requests nor calls.
        """
        ended = list[list[int]]()
        repeated = self._order.next_wait(step)
        while len(ended) < len(repeated) if repeated is not None else condition():
            if begins:
                self._begin()
            if repeated is not None:
                ended.append(self._record(repeated[len(ended)]))
                continue
            calls = [engine.call for engine in self._engines if engine.call is not None]
            wait_any([*calls, *(call for call in [*others, *self._reports] if not call.poll())])
            for call in self._reports:
                if call.failures:
                    call.wait()
            ended.append(
                self._record(
                    [
                        place
                        for place, engine in enumerate(self._engines)
                        if engine.call is not None and engine.call.done()
                    ]
                )
            )
        self._order.record(Wait(step, ended))

    def _begin(self) -> None:
        """Give requests and a call to every engine that has none in flight."""
        slots, unfinished = (
            self._config.rollout.max_num_seqs,
            sum(one.num_unfinished for one in self._engines),
        )
        share = math.ceil((unfinished + self.queue.num_admissible) / len(self._engines))
        for engine in self._engines:
            if engine.call is not None:
                continue
            new = self.queue.admit(min(share, slots) - engine.num_unfinished)
            if new:
                self._send(engine, new)
            if engine.rollouts:
                engine.call = engine.group.advance(self._config.generation.steps_per_call)
                engine.begun_s = time.monotonic()

    def _send(self, engine: _Engine, rollouts: Sequence[Rollout]) -> None:
        """Queue responses in an engine, which goes on after their tokens so far."""
        config, queue = self._config, self.queue
        numbers = torch.tensor([rollout.number for rollout in rollouts])
        rows_per_step = config.rows_per_step
        seeds = [
            first_seed(config.run.seed, number // rows_per_step + 1, rows_per_step) + number % rows_per_step
            for number in numbers.tolist()
        ]
        lengths = torch.tensor([len(rollout.tokens) for rollout in rollouts])
        requests = Rows.of(
            TensorDict(
                {
                    "numbers": numbers,
                    "prompt_numbers": numbers // queue.samples,
                    "seeds": torch.tensor(seeds) % 2**31,
                    "drawn_tokens": _padded(
                        [rollout.tokens for rollout in rollouts], int(lengths.max()), 0, torch.int32
                    ),
                    "drawn_lengths": lengths,
                },
                batch_size=[len(rollouts)],
            )
        )
        engine.group.begin(requests)
        engine.rollouts |= {rollout.number: rollout for rollout in rollouts}

    def _record(self, places: list[int]) -> list[int]:
        """Record the calls of some engines, which have ended or are waited for; return `places`."""
        for engine in (self._engines[place] for place in places):
            assert engine.call is not None, "an engine is given a call before it ends"
            (drawn,) = engine.call.get()
            engine.call = None
            self.queue.record(drawn)
            engine.rollouts = {
                number: rollout for number, rollout in engine.rollouts.items() if not rollout.has_ended
            }
        return places

    def _columns(self, batch: Batch) -> TensorDict:
        """Return the columns of a batch that the engines have drawn."""
        width, rollouts = self._config.rollout.max_response_tokens, batch.rollouts
        numbers = torch.tensor([rollout.number for rollout in rollouts])
        lengths = torch.tensor([len(rollout.tokens) for rollout in rollouts])
        versions = _padded([rollout.versions for rollout in rollouts], width, -1, torch.int32)
        fresh = fresh_tokens(versions, response_mask(lengths, width), batch.version, self.max_versions)
        return TensorDict(
            {
                "prompt_numbers": numbers // self.queue.samples,
                "response_lengths": lengths,
                "response_tokens": _padded([rollout.tokens for rollout in rollouts], width, 0, torch.int32),
                "rollout_log_probs": _padded(
                    [rollout.log_probs for rollout in rollouts], width, 0, torch.float32
                ),
                "versions": versions,
                "fresh": fresh,
            },
            batch_size=[len(rollouts)],
        )

    # ---- metrics ----

    def take_metrics(self) -> dict[str, float]:
        """Return the metrics since the last call."""
        reports = [report for call in self._reports for report in call.get()]
        waited_s, self._waited_s = self._waited_s, 0.0
        return {
            keys.RECEIVED_BYTES: max(report["received_bytes"] for report in reports),
            "push/seconds": max(report["seconds"] for report in reports),
            "queue/complete": float(self.queue.num_complete),
            "queue/unfinished": float(self.queue.num_unfinished),
            "queue/wait_s": waited_s,
        }


def _padded(rows: Sequence[Sequence[Any]], width: int, padding: float, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor([[*row, *[padding] * (width - len(row))] for row in rows], dtype=dtype).reshape(
        len(rows), width
    )


def _run_lengths(values: Sequence[str]) -> list[int]:
    """Return how often each value follows itself."""
    lengths: list[int] = []
    for place, value in enumerate(values):
        if place and value == values[place - 1]:
            lengths[-1] += 1
        else:
            lengths.append(1)
    return lengths

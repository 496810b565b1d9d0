"""The queue of asynchronous runs under random schedules, against a replay that counts ages by hand."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridengine.config import load_config
from hybridengine.config.sections import StalenessSection
from hybridengine.errors import CheckpointError, WorkerError
from hybridengine.rollouts.drawn import Drawn, DrawnSupports
from hybridengine.rollouts.queue import Rollout, RolloutQueue, first_seed, read_queue, save_queue

ROOT = Path(__file__).parents[2]


def drawn(*news: tuple[int, int, bool], version: int = 0) -> Drawn:
    """Return `count` tokens each of the responses (number, count, has ended)."""
    numbers, counts, ended = zip(*news, strict=True) if news else ((), (), ())
    total = sum(counts)
    return Drawn(
        np.array(numbers, np.int64),
        np.array(counts, np.int64),
        np.array(ended, bool),
        np.arange(total, dtype=np.int32),
        np.full(total, -0.5, np.float32),
        np.full(total, version, np.int32),
    )


class Run:
    """A run at random speeds: engines draw, sooner or later get new weights, and batches are trained."""

    def __init__(
        self, queue: RolloutQueue, seed: int, num_engines: int, slots: int, drop_share: float = 0.0
    ) -> None:
        self.queue, self.random, self.slots, self.drop_share = queue, random.Random(seed), slots, drop_share
        self.speeds = [self.random.choice([1, 1, 2, 5, 20]) for _ in range(num_engines)]
        self.engines: list[dict[int, int]] = [{} for _ in self.speeds]
        """Response -> number of tokens to draw, by engine."""
        self.ages: list[list[int]] = []
        """Ages of all tokens of each batch."""
        self.trained: list[list[int]] = []
        """Numbers of the responses of each batch."""
        self.dropped: list[int] = []
        """Prompts that were dropped."""

    def turn(self) -> None:
        """Let a random party act."""
        place = self.random.randrange(len(self.engines) + 1)
        if place < len(self.engines):
            self.draw(place)
        elif self.queue.is_ready and self.random.random() < 0.5:
            self.train()

    def draw(self, place: int) -> None:
        engine = self.engines[place]
        for rollout in self.queue.admit(self.slots - len(engine)):
            engine[rollout.number] = round(self.random.lognormvariate(1.5, 1.0)) + 1
        steps = self.random.randrange(1, 1 + self.speeds[place])
        news = [(number, min(steps, left), steps >= left) for number, left in engine.items()]
        self.engines[place] = {number: left - steps for number, left in engine.items() if left > steps}
        self.queue.record(drawn(*news, version=self.queue.version))

    def train(self) -> None:
        unwanted = [prompt for prompt in self.queue.next_prompts if self.random.random() < self.drop_share]
        self.dropped += unwanted
        self.queue.drop(unwanted)
        if not self.queue.is_ready:
            return
        batch = self.queue.take()
        assert batch.version == len(self.trained)
        self.trained.append([rollout.number for rollout in batch.rollouts])
        self.ages.append(
            [batch.version - version for rollout in batch.rollouts for version in rollout.versions]
        )
        self.queue.version += 1


def carry_out(run: Run, num_batches: int) -> None:
    for _ in range(100_000):
        if len(run.trained) == num_batches:
            return
        run.turn()
    raise AssertionError("the run does not end")


SCHEDULES = {
    "seed": st.integers(0, 2**32),
    "samples": st.integers(1, 4),
    "prompts": st.integers(1, 5),
    "eta": st.integers(0, 4),
    "num_engines": st.integers(1, 4),
    "slots": st.integers(1, 12),
}


@settings(max_examples=200, deadline=None)
@given(**SCHEDULES)
def test_no_token_is_older_than_the_bound_of_responses(
    seed: int, samples: int, prompts: int, eta: int, num_engines: int, slots: int
) -> None:
    num_batches = 6
    queue = RolloutQueue(samples, prompts, num_batches, StalenessSection(max_versions=eta, bound="response"))
    run = Run(queue, seed, num_engines, slots)
    carry_out(run, num_batches)
    assert max(max(ages) for ages in run.ages) <= eta
    assert min(min(ages) for ages in run.ages) >= 0
    rows = prompts * samples
    assert run.trained == [[*range(rows * batch, rows * (batch + 1))] for batch in range(num_batches)]
    assert not queue.unfinished()


@settings(max_examples=200, deadline=None)
@given(**SCHEDULES)
def test_each_response_is_trained_once_whatever_their_order(
    seed: int, samples: int, prompts: int, eta: int, num_engines: int, slots: int
) -> None:
    num_batches = 6
    queue = RolloutQueue(samples, prompts, num_batches, StalenessSection(max_versions=eta, bound="token"))
    run = Run(queue, seed, num_engines, slots)
    carry_out(run, num_batches)
    rows = prompts * samples
    assert sorted(number for batch in run.trained for number in batch) == [*range(rows * num_batches)]
    for batch in run.trained:
        groups = Counter(number // samples for number in batch)
        assert set(groups.values()) == {samples}
        assert batch == [
            number for prompt in groups for number in range(prompt * samples, (prompt + 1) * samples)
        ]
    if eta == 0:
        assert max(max(ages) for ages in run.ages) == 0


@settings(max_examples=200, deadline=None)
@given(bound=st.sampled_from(["token", "response"]), **SCHEDULES)
def test_prompts_that_are_dropped_are_replaced_within_the_bound(
    bound: str, seed: int, samples: int, prompts: int, eta: int, num_engines: int, slots: int
) -> None:
    num_batches = 6
    staleness = StalenessSection(max_versions=eta, bound=bound)  # pyright: ignore[reportArgumentType]
    queue = RolloutQueue(samples, prompts, num_batches, staleness)
    run = Run(queue, seed, num_engines, slots, drop_share=0.3)
    carry_out(run, num_batches)
    trained = [prompt for batch in run.trained for prompt in dict.fromkeys(row // samples for row in batch)]
    assert sorted([*trained, *run.dropped]) == [*range(num_batches * prompts + len(run.dropped))]
    assert [len(batch) for batch in run.trained] == [prompts * samples] * num_batches
    if bound == "response":
        assert trained == sorted(trained)
        assert max(max(ages) for ages in run.ages) <= eta
    if eta == 0:
        assert max(max(ages) for ages in run.ages) == 0
    assert not queue.unfinished()


@settings(max_examples=100, deadline=None)
@given(stop=st.integers(0, 150), bound=st.sampled_from(["token", "response"]), **SCHEDULES)
def test_a_queue_goes_on_from_its_state(
    stop: int, bound: str, seed: int, samples: int, prompts: int, eta: int, num_engines: int, slots: int
) -> None:
    """A copy made at any moment behaves as the original does."""
    num_batches = 4
    staleness = StalenessSection(max_versions=eta, bound=bound)  # pyright: ignore[reportArgumentType]
    queue = RolloutQueue(samples, prompts, num_batches, staleness)
    run = Run(queue, seed, num_engines, slots, drop_share=0.2)
    for _ in range(stop):
        if len(run.trained) < num_batches:
            run.turn()
    copy = RolloutQueue(samples, prompts, num_batches, staleness)
    copy.load_state(queue.state())
    twin = Run(copy, seed, num_engines, slots, drop_share=0.2)
    twin.engines, twin.speeds = [dict(engine) for engine in run.engines], run.speeds
    twin.trained, twin.ages, twin.dropped = [*run.trained], [*run.ages], [*run.dropped]
    run.random, twin.random = random.Random(stop), random.Random(stop)
    for one in (run, twin):
        carry_out(one, num_batches)
    assert twin.trained == run.trained
    assert (twin.ages, twin.dropped) == (run.ages, run.dropped)


@pytest.mark.parametrize(
    ("samples", "prompts", "eta", "message"),
    [
        (
            3,
            3,
            1,
            "rollout.samples_per_prompt=3 was 2 .* may not change in an asynchronous run; resume with 2",
        ),
        (2, 4, 1, "data.batch_size=4 was 3 when the responses in flight were begun"),
        (2, 3, 0, "staleness.max_versions=0 was 1 .* may only rise"),
    ],
)
def test_a_state_of_other_settings_is_refused(samples: int, prompts: int, eta: int, message: str) -> None:
    before = RolloutQueue(2, 3, 4, StalenessSection(max_versions=1))
    with pytest.raises(CheckpointError, match=message):
        RolloutQueue(samples, prompts, 4, StalenessSection(max_versions=eta)).load_state(before.state())
    RolloutQueue(2, 3, 9, StalenessSection(max_versions=5)).load_state(before.state())


def test_experts_of_responses_in_flight_are_saved_with_them(tmp_path: Path) -> None:
    """The first response has a prompt of 3 tokens, 2 of them drawn in one call and 1 in the next; the second waits."""
    run, file = load_config(ROOT / "configs/async-grpo.yaml"), tmp_path / "rollouts.safetensors"
    queue = RolloutQueue.of(run)
    first, _ = queue.admit(2)
    routes = np.arange(5 * 2 * 3, dtype=np.int8).reshape(5, 2, 3)
    queue.record(replace(drawn((first.number, 2, False)), routes=(routes[:4],)))
    queue.record(replace(drawn((first.number, 1, False)), routes=(routes[4:],)))
    save_queue(queue, "ab" * 32, file)
    resumed, waiting = read_queue(run, file)[0].unfinished()
    assert (resumed.num_routed, waiting.num_routed) == (5, 0)
    np.testing.assert_array_equal(np.concatenate(resumed.routes), routes)
    assert resumed.routes[0].dtype == np.int8


def test_supports_of_responses_in_flight_are_saved_with_them(tmp_path: Path) -> None:
    """Of the tokens of two responses, in two calls, the second of which has drawn from the whole vocabulary."""
    run, file = load_config(ROOT / "configs/async-grpo.yaml"), tmp_path / "rollouts.safetensors"
    queue = RolloutQueue.of(run)
    first, second, _ = queue.admit(3)
    words = [np.array(ids, dtype=np.int32) for ids in ([3, 4], [], [5])]
    both = drawn((first.number, 2, False), (second.number, 1, False))
    queue.record(replace(both, supports=DrawnSupports.of(words)))
    queue.record(drawn((first.number, 1, False)))
    save_queue(queue, "ab" * 32, file)
    found = [[*map(list, one.supports)] for one in read_queue(run, file)[0].unfinished()]
    assert found == [[[3, 4], [], []], [[5]], []]


def test_responses_in_flight_are_saved_with_their_prompts(tmp_path: Path) -> None:
    run, file = load_config(ROOT / "configs/async-grpo.yaml"), tmp_path / "rollouts.safetensors"
    queue = RolloutQueue.of(run)
    first, second = queue.admit(2)
    queue.record(drawn((first.number, 5, False), (second.number, 1, False)))
    save_queue(queue, "ab" * 32, file)
    found, digest = read_queue(run, file)
    assert digest == "ab" * 32
    assert [rollout.tokens for rollout in found.unfinished()] == [first.tokens, second.tokens]
    assert found.prompts == queue.prompts
    shorter = load_config(ROOT / "configs/async-grpo.yaml", ["rollout.max_response_tokens=4"])
    with pytest.raises(
        CheckpointError,
        match="max_response_tokens=4 is less than the 5 tokens of a response in flight; resume with at",
    ):
        read_queue(shorter, file)
    other = load_config(ROOT / "configs/async-grpo.yaml", ["data.batch_size=16"])
    with pytest.raises(CheckpointError, match=r"data.batch_size=16 was 32"):
        read_queue(other, file)


def test_what_may_be_begun() -> None:
    queue = RolloutQueue(2, 3, 4, StalenessSection(max_versions=1))
    assert queue.num_admissible == 12
    assert [rollout.number for rollout in queue.admit(5)] == [0, 1, 2, 3, 4]
    assert len(queue.admit(100)) == 7
    assert queue.admit(100) == []
    queue.version = 3
    assert len(queue.admit(100)) == 24 - 12  # the run has four batches


def test_prompts_are_taken_in_the_order_in_which_they_are_complete() -> None:
    queue = RolloutQueue(2, 1, 3, StalenessSection(max_versions=2))
    queue.admit(6)
    queue.record(drawn((4, 3, False), (0, 1, True)))
    queue.record(drawn((5, 1, True)))
    assert not queue.is_ready
    queue.record(drawn((4, 1, True), version=1))
    assert (queue.num_complete, queue.num_unfinished) == (2, 3)
    assert queue.take().rollouts == (
        Rollout(4, [0, 1, 2, 0], [-0.5] * 4, [0, 0, 0, 1], has_ended=True),
        Rollout(5, [0], [-0.5], [0], has_ended=True),
    )
    assert not queue.is_ready


def test_tokens_of_a_response_that_has_ended_are_refused() -> None:
    queue = RolloutQueue(1, 1, 1, StalenessSection())
    queue.admit(1)
    queue.record(drawn((0, 1, True)))
    for number in (0, 7):
        with pytest.raises(
            WorkerError, match=f"tokens of response {number}, which is not begun or has ended"
        ):
            queue.record(drawn((number, 1, False)))


def test_seeds_are_unique_within_a_run() -> None:
    rows = 3
    seeds = {first_seed(5, step, rows) + row for step in range(1, 100) for row in range(rows)}
    assert len(seeds) == 99 * rows

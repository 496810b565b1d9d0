"""The queue of an asynchronous run: which prompts are begun, which responses are trained next, how old their tokens are.

Prompts are numbered in the order in which they are begun, and each has `samples` responses with consecutive numbers.
With B prompts per batch, prompt q is begun only while floor(q / B) <= v + eta, v the version of the engines' weights.
Batch i is trained on weights of version i, and a token that weights of version v have drawn is then i - v versions old:

    response    batch i has the prompts iB to (i + 1)B - 1: they were begun at i - eta or later, so no token is older than
                eta; the trainer waits for the slowest of them
    token       a batch has the B prompts whose responses were complete first; tokens older than eta are not trained on

The gate alone is AReaL's (arXiv 2505.24298, section 5.1); with batches by completion, it bounds no token's age.

A prompt that is dropped (dynamic sampling) has no place in any batch: those begun after it move up, and one more is
begun. The bounds hold as before, since a prompt only moves to an earlier batch than the one for which it was begun.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from hybridengine.config import RunConfig
from hybridengine.config.sections import StalenessSection
from hybridengine.episodes.wire import Ended
from hybridengine.errors import CheckpointError, WorkerError
from hybridengine.rollouts.drawn import ADDED, CUT, STOPPED, Drawn, DrawnSupports

QUEUE_FILE = "rollouts.safetensors"
"""File of a checkpoint with the responses in flight."""
SEED_STRIDES = (1_000_003, 65_537)
"""Factors a, b of a response's seed = (run seed · a + step) · b + row; b is at least the rows per step, so seeds are
unique within a run."""


def first_seed(run_seed: int, step: int, rows_per_step: int) -> int:
    """Return the seed of the first response of a step, counted from 1; the others have the integers that follow."""
    return (run_seed * SEED_STRIDES[0] + step) * max(SEED_STRIDES[1], rows_per_step)


@dataclass
class Rollout:
    """A response that was begun, with its tokens so far."""

    number: int
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    supports: list[np.ndarray] = field(default_factory=list, compare=False)
    """Support of each token's draw (`rows/supports.py`)."""
    routes: list[np.ndarray] = field(default_factory=list)
    """Experts of consecutive tokens of prompt and response, [n, L, K] each; none unless engines keep them."""
    marks: list[int] = field(default_factory=list)
    """Marks of the tokens of an episode (`rollouts.drawn`); empty for other responses."""
    outcome: Ended | None = None
    """Outcome of an episode that has ended."""
    has_ended: bool = False

    def record(
        self, drawn: Drawn, index: int, place: slice, supports: Sequence[np.ndarray], *, has_ended: bool
    ) -> None:
        """Add the response's new tokens, which have the place `place`; it is the one of number `index` in `drawn`.

        `supports` are those of all new tokens.
        """
        if drawn.kept is not None:
            for tokens in (self.tokens, self.log_probs, self.versions, self.supports, self.marks):
                del tokens[int(drawn.kept[index]) :]
        if drawn.kept_routes is not None and self.num_routed > drawn.kept_routes[index]:
            self.routes = [np.concatenate(self.routes)[: drawn.kept_routes[index]]]
        self.tokens += drawn.tokens[place].tolist()
        self.log_probs += drawn.log_probs[place].tolist()
        self.versions += drawn.versions[place].tolist()
        self.supports += supports[place]
        self.routes += drawn.routes[index : index + 1]
        if drawn.marks is not None:
            self.marks += drawn.marks[place].tolist()
        self.outcome = drawn.outcomes.get(self.number)
        self.has_ended = has_ended

    @property
    def trained(self) -> list[bool]:
        """True for each token of an episode that is trained: the model drew it, in a turn that is not excluded."""
        turns = self.outcome.trained if self.outcome is not None else []
        others = self.outcome is None or bool(self.outcome.kind)  # a failed episode names no turns
        found, turn = [], 0
        for mark in self.marks:
            found.append(mark != ADDED and (turns[turn] if turn < len(turns) else others))
            turn += mark in (CUT, STOPPED)
        return found

    @property
    def num_routed(self) -> int:
        """Number of tokens whose experts are known."""
        return sum(map(len, self.routes))


@dataclass(frozen=True)
class Batch:
    """Responses that are trained together."""

    version: int
    """Version of the weights that they train."""
    rollouts: tuple[Rollout, ...]
    """The responses of each prompt in succession."""


class RolloutQueue:
    """Begun responses that no batch has yet.

    Args:
        samples: responses per prompt.
        prompts_per_batch: prompts whose responses make a batch.
        num_batches: batches of the run; prompts that no batch would have are not begun.
    """

    def __init__(
        self, samples: int, prompts_per_batch: int, num_batches: int, staleness: StalenessSection
    ) -> None:
        self.samples, self.prompts_per_batch, self.num_batches = samples, prompts_per_batch, num_batches
        self._staleness = staleness
        self.version = 0
        """Version of the engines' weights."""
        self.num_taken = 0
        """Number of batches taken so far, which is the version that the next one trains."""
        self._next = 0
        self._num_dropped = 0
        self._rollouts: dict[int, Rollout] = {}  # by ascending number
        self._complete: list[int] = []
        """Prompts whose responses have all ended, in the order in which they did."""

    @classmethod
    def of(cls, config: RunConfig) -> RolloutQueue:
        """Return the empty queue of a run."""
        return cls(
            config.rollout.samples_per_prompt, config.data.batch_size, config.run.steps, config.staleness
        )

    @property
    def prompts(self) -> list[int]:
        """Prompts with a response in the queue."""
        return [*dict.fromkeys(number // self.samples for number in self._rollouts)]

    @property
    def num_unfinished(self) -> int:
        """Number of begun responses that have not ended."""
        return sum(not rollout.has_ended for rollout in self._rollouts.values())

    @property
    def num_complete(self) -> int:
        """Number of responses that wait for the trainer with all others of their prompt."""
        return len(self._complete) * self.samples

    @property
    def num_admissible(self) -> int:
        """Number of responses that may be begun now."""
        ahead = min(self.version + self._staleness.max_versions + 1, self.num_batches)
        return (ahead * self.prompts_per_batch + self._num_dropped) * self.samples - self._next

    def admit(self, most: int) -> list[Rollout]:
        """Begin up to `most` responses, as far as the bound allows; return them."""
        numbers = range(self._next, self._next + max(0, min(most, self.num_admissible)))
        new = [Rollout(number) for number in numbers]
        self._rollouts |= {rollout.number: rollout for rollout in new}
        self._next += len(new)
        return new

    def record(self, drawn: Drawn) -> None:
        """Add new tokens to their responses; WorkerError for a response that is not there or has ended."""
        supports = drawn.supports.each(drawn.num_tokens)
        for index, (number, has_ended, place) in enumerate(drawn.parts()):
            rollout = self._rollouts.get(number)
            if rollout is None or rollout.has_ended:
                raise WorkerError(
                    f"an engine has drawn tokens of response {number}, which is not begun or has ended; this is a defect"
                )
            rollout.record(drawn, index, place, supports, has_ended=has_ended)
            prompt = number // self.samples
            if has_ended and all(one.has_ended for one in self._of(prompt)):
                self._complete.append(prompt)

    def _of(self, prompt: int) -> list[Rollout]:
        """Return the responses to a prompt; those that are not begun are missing numbers, which have not ended."""
        numbers = range(prompt * self.samples, (prompt + 1) * self.samples)
        return [self._rollouts.get(number) or Rollout(number) for number in numbers]

    @property
    def next_prompts(self) -> Sequence[int]:
        """Prompts of the next batch, as far as their responses have ended."""
        if self._staleness.bound == "token":
            return self._complete[: self.prompts_per_batch]
        complete = {*self._complete}
        return [prompt for prompt in self.prompts[: self.prompts_per_batch] if prompt in complete]

    @property
    def is_ready(self) -> bool:
        """True if the next batch is complete."""
        return len(self.next_prompts) == self.prompts_per_batch

    def responses(self, prompts: Sequence[int]) -> tuple[Rollout, ...]:
        """Return the responses to prompts that are complete, each prompt's in succession."""
        return tuple(rollout for prompt in prompts for rollout in self._of(prompt))

    def drop(self, prompts: Sequence[int]) -> None:
        """Take prompts of the next batch out of the queue for good, so that others take their places."""
        self._remove(prompts)
        self._num_dropped += len(prompts)

    def take(self) -> Batch:
        """Take the next batch out of the queue; call it if the queue is ready."""
        prompts = self.next_prompts
        assert len(prompts) == self.prompts_per_batch, "the queue is not ready"
        rollouts = self.responses(prompts)
        self._remove(prompts)
        self.num_taken += 1
        return Batch(self.num_taken - 1, rollouts)

    def _remove(self, prompts: Sequence[int]) -> None:
        self._complete = [prompt for prompt in self._complete if prompt not in prompts]
        for rollout in self.responses(prompts):
            del self._rollouts[rollout.number]

    def unfinished(self) -> list[Rollout]:
        """Return the begun responses that have not ended, in the order of their numbers."""
        return [rollout for rollout in self._rollouts.values() if not rollout.has_ended]

    @property
    def _settings(self) -> dict[str, int]:
        """Settings with which responses are numbered and bounded."""
        return {
            "rollout.samples_per_prompt": self.samples,
            "data.batch_size": self.prompts_per_batch,
            "staleness.max_versions": self._staleness.max_versions,
        }

    def state(self) -> dict[str, np.ndarray]:
        """Return everything in the queue as arrays, for a checkpoint."""
        rollouts = [*self._rollouts.values()]
        routes = [part for rollout in rollouts for part in rollout.routes]
        supports = DrawnSupports.of([one for rollout in rollouts for one in rollout.supports])
        return {
            "settings": np.array([*self._settings.values()], dtype=np.int64),
            "counters": np.array(
                [self.version, self.num_taken, self._next, self._num_dropped], dtype=np.int64
            ),
            "complete": np.array(self._complete, dtype=np.int64),
            "numbers": np.array([rollout.number for rollout in rollouts], dtype=np.int64),
            "lengths": np.array([len(rollout.tokens) for rollout in rollouts], dtype=np.int64),
            "has_ended": np.array([rollout.has_ended for rollout in rollouts], dtype=bool),
            "tokens": np.array([one for rollout in rollouts for one in rollout.tokens], dtype=np.int32),
            "log_probs": np.array(
                [one for rollout in rollouts for one in rollout.log_probs], dtype=np.float32
            ),
            "versions": np.array([one for rollout in rollouts for one in rollout.versions], dtype=np.int32),
            **(
                {"support_sizes": supports.sizes, "support_words": supports.words}
                if len(supports.words)
                else {}
            ),
            "route_lengths": np.array([rollout.num_routed for rollout in rollouts], dtype=np.int64),
            **({"routes": np.concatenate(routes)} if routes else {}),
            **(self._episodes() if any(rollout.marks for rollout in rollouts) else {}),
        }

    def _episodes(self) -> dict[str, np.ndarray]:
        """Return marks, and outcomes as JSON, of responses that are episodes."""
        rollouts = [*self._rollouts.values()]
        outcomes = [rollout.outcome and asdict(rollout.outcome) for rollout in rollouts]
        return {
            "marks": np.array([mark for rollout in rollouts for mark in rollout.marks], dtype=np.uint8),
            "outcomes": np.frombuffer(json.dumps(outcomes).encode(), np.uint8),
        }

    def begin_at(self, version: int) -> None:
        """Begin with the prompts that follow those of `version` batches."""
        self.version = self.num_taken = version
        self._next = version * self.prompts_per_batch * self.samples

    def load_state(self, state: dict[str, np.ndarray]) -> None:
        """Go on with what `state` has returned; CheckpointError if other settings number or bound the responses."""
        for (name, value), before in zip(self._settings.items(), state["settings"].tolist(), strict=True):
            may_rise = name == "staleness.max_versions"
            if value < before or (value != before and not may_rise):
                raise CheckpointError(
                    f"{name}={value} was {before} when the responses in flight were begun, and may"
                    f" {'only rise' if may_rise else 'not change'} in an asynchronous run; resume with {before}"
                )
        self.version, self.num_taken, self._next, self._num_dropped = state["counters"].tolist()
        self._complete = state["complete"].tolist()
        self._rollouts = {number: Rollout(number) for number in state["numbers"].tolist()}
        ends = np.cumsum(state["lengths"]).tolist()
        places = zip(state["lengths"].tolist(), ends, state["has_ended"].tolist(), strict=True)
        saved = DrawnSupports.of(())
        if "support_words" in state:
            saved = DrawnSupports(state["support_sizes"], state["support_words"])
        supports = saved.each(len(state["tokens"]))
        for rollout, (length, end, has_ended) in zip(self._rollouts.values(), places, strict=True):
            for name in ("tokens", "log_probs", "versions"):
                setattr(rollout, name, state[name][end - length : end].tolist())
            rollout.supports = supports[end - length : end]
            rollout.has_ended = has_ended
            if "marks" in state:
                rollout.marks = state["marks"][end - length : end].tolist()
        if "outcomes" in state:
            outcomes = json.loads(state["outcomes"].tobytes())
            for rollout, outcome in zip(self._rollouts.values(), outcomes, strict=True):
                rollout.outcome = outcome and Ended(**outcome)
        if "routes" in state:
            parts = np.split(state["routes"], np.cumsum(state["route_lengths"])[:-1])
            for rollout, part in zip(self._rollouts.values(), parts, strict=True):
                rollout.routes = [part]


def read_queue(config: RunConfig, file: Path) -> tuple[RolloutQueue, str]:
    """Return the responses in flight of a checkpoint, and the digest of their prompts (`save_queue`).

    Raises CheckpointError if a run with this configuration cannot go on with them.
    """
    state, width = load_file(file), config.rollout.max_response_tokens
    queue = RolloutQueue.of(config)
    queue.load_state(state)
    if (longest := int(state["lengths"].max(initial=0))) > width:
        raise CheckpointError(
            f"rollout.max_response_tokens={width} is less than the {longest} tokens of a response in flight; resume with"
            f" at least {longest}"
        )
    if longest and ("marks" in state) != (config.rollout.episode is not None):
        found = "episodes" if "marks" in state else "no episodes"
        raise CheckpointError(
            f"the responses in flight are {found}, and rollout.episode says otherwise; resume with it as it was"
        )
    return queue, state["prompts_digest"].tobytes().hex()


def save_queue(queue: RolloutQueue, digest: str, file: Path) -> None:
    """Write the responses in flight, with the digest of the prompts to which they belong (`prompts_digest`)."""
    save_file(queue.state() | {"prompts_digest": np.frombuffer(bytes.fromhex(digest), np.uint8)}, file)

"""Arguments of a dataflow: worker groups by role, and the prompts, seeds and state of an iteration."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hybridengine.errors import UnknownNameError
from hybridengine.report import keys

if TYPE_CHECKING:  # algorithms import this file, and load neither torch nor Ray
    from hybridengine.controller.rows import Rows
    from hybridengine.controller.worker_group import WorkerGroup
    from hybridengine.rollouts.engines import Engines

State = dict[str, float]
"""Numbers that a dataflow carries over between iterations, such as a Lagrange multiplier; initially empty."""


@dataclass(frozen=True)
class Scorers:
    """Groups that score responses: one for all functions and services, and one for each model."""

    groups: Sequence[WorkerGroup]
    compute: WorkerGroup
    weights: Mapping[str, float]
    """Weight of each term's column, if a term is a model; otherwise empty, as the ranks that call functions sum them."""
    term_columns: Sequence[str] = ()
    """Columns of the terms' scores, such as `cost/length`; empty for a single scorer."""
    own_columns: Sequence[str] = ()
    """Columns of scores that are the rewards of episodes."""
    episodes: bool = False
    """True if responses are episodes, of which some fail."""
    has_full_score: bool = False
    """True if 1 is the maximum score, as for a single function, but not for other scorers or a weighted sum."""

    @property
    def num_ranks(self) -> int:
        """Number of ranks in the largest group."""
        return max(group.num_ranks for group in (*self.groups, self.compute))

    def compute_scores(self, rollout: Rows) -> Rows:
        """Return `scores` and `dropped`, and the terms' own columns if there are several."""
        own = dict.fromkeys(self.own_columns, keys.EPISODE_REWARD)
        parts = [rollout.select_as(**own), *(group.compute_scores(rollout) for group in self.groups)]
        rows = parts[0].union(*parts[1:])
        if not self.weights and not self.episodes:
            return rows
        scores = ["scores", *(["dropped"] if self.groups else [])]
        terms = rows.select(*(self.weights or scores))
        function = "hybridengine.data.rewards.combine_scores"
        if self.episodes:
            terms = terms.union(rollout.select(keys.EPISODE_FAILURE))
            function = "hybridengine.data.rewards.episode_scores"
        return rows.union(self.compute.map(terms, function, dict(self.weights)))


@dataclass(frozen=True)
class BaseOfActor:
    """The reference of an actor with adapters: the actor's own ranks, which compute without them."""

    actor: WorkerGroup

    def compute_log_probs(self, rollout: Rows) -> Rows:
        """Return `ref_log_probs`."""
        return self.actor.compute_base_log_probs(rollout)


class Roles:
    """Worker groups of a run as attributes: the dataflow's roles, `prompts` (which reads the data files), and `compute`
    (which runs plain functions over rows on the ranks that hold them).

    Access to a role that the run does not have raises an UnknownNameError; use `hasattr` to check for a role.
    """

    actor: WorkerGroup
    generation: Engines
    critic: WorkerGroup
    cost_critic: WorkerGroup
    reference: WorkerGroup | BaseOfActor
    teacher: WorkerGroup
    reward: Scorers
    cost: Scorers
    prompts: WorkerGroup
    compute: WorkerGroup

    def __init__(
        self,
        *,
        episode_columns: Sequence[str] = (),
        **groups: WorkerGroup | Scorers | Engines | BaseOfActor,
    ) -> None:
        self.__dict__.update(groups)
        self.episode_columns = tuple(episode_columns)
        """Columns of responses that are episodes (`rollouts.episodes`), for metrics; empty for other responses."""

    @property
    def term_columns(self) -> tuple[str, ...]:
        """Term columns of rewards and costs (`Scorers.term_columns`)."""
        return tuple(column for one in self._scorers for column in one.term_columns)

    def take_scorer_metrics(self) -> dict[str, float]:
        """Return the counters of reward and cost functions since the last call, over all ranks: `reward/retries`, ..."""
        total = Counter[str]()
        for group in (group for scorers in self._scorers for group in scorers.groups):
            if hasattr(group, "take_metrics"):
                for counts in group.take_metrics().get():
                    total.update(counts)
        return dict(total)

    @property
    def _scorers(self) -> list[Scorers]:
        return [group for group in self.__dict__.values() if isinstance(group, Scorers)]

    def __getattr__(self, name: str) -> WorkerGroup:
        groups = [name for name, value in self.__dict__.items() if not isinstance(value, tuple)]
        near = difflib.get_close_matches(name, groups, n=1)
        remedy = f"did you mean {near[0]}?" if near else "add it to the algorithm's roles"
        raise UnknownNameError(
            f"the dataflow uses the role {name!r}, and the run has {', '.join(groups)}; {remedy}"
        )


@dataclass(frozen=True)
class Sampling:
    """The prompts and responses of one iteration."""

    step: int
    """Number of the iteration, from 1."""
    num_prompts: int
    samples_per_prompt: int
    first_seed: int
    """Seed of the first response; the next responses use the following integers."""

    @property
    def prompts(self) -> Rows:
        """Row references of the prompts, without columns yet."""
        from hybridengine.controller.rows import Rows

        return Rows.numbered(self.num_prompts)

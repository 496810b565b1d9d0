"""The group calls of an iteration of each dataflow: what is called in which order, and whose rows each call takes.

What `hybridengine.drivers` does, as data; a test traces the drivers and compares.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from hybridengine.errors import ConfigError

HELPERS = ("prompts", "compute")
"""Groups without a model on the actor's ranks."""

PHASES: Mapping[str, str] = {
    "prompts.training_prompts": "prompts",
    "actor.switch_to_generate": "switch_to_generate",
    "actor.generate_sequences": "generate",
    "actor.switch_to_train": "switch_to_train",
    "actor.compute_log_probs": "log_probs",
    "reference.compute_log_probs": "ref_log_probs",
    "critic.compute_values": "values",
    "cost_critic.compute_values": "cost_values",
    "reward.compute_scores": "scores",
    "cost.compute_scores": "costs",
    "compute.map": "advantages",
    "critic.update": "update_critic",
    "cost_critic.update": "update_cost_critic",
    "actor.update": "update_actor",
    "actor.update_preferences": "update_actor",
    "compute.measure": "statistics",
}
"""Call -> phase of an iteration; the time of other calls has their own name."""


def phase_of_call(role: str, method: str) -> str:
    """Phase of an iteration that a call belongs to; `reward_NAME` and `cost_NAME` are models among several terms."""
    call = f"{role}.{method}"
    if method == "compute_scores":
        call = f"{role.partition('_')[0]}.{method}"
    return PHASES.get(call, call)


class Work(Enum):
    """What a call does."""

    HOST = "host"
    """Reads data or computes on columns: no model."""
    SWITCH = "switch"
    GENERATE = "generate"
    INFER = "infer"
    """A forward pass."""
    UPDATE = "update"


class Count(Enum):
    """How many rows a call has."""

    ROWS = "rows"
    """Prompts times responses per prompt."""
    PROMPTS = "prompts"
    PAIRS = "pairs"
    """Two for each prompt."""


WORK: Mapping[str, Work] = {
    "training_prompts": Work.HOST,
    "map": Work.HOST,
    "measure": Work.HOST,
    "switch_to_generate": Work.SWITCH,
    "switch_to_train": Work.SWITCH,
    "generate_sequences": Work.GENERATE,
    "compute_log_probs": Work.INFER,
    "compute_values": Work.INFER,
    "compute_scores": Work.INFER,
    "update": Work.UPDATE,
    "update_preferences": Work.UPDATE,
}
"""Of each method."""


@dataclass(frozen=True)
class RowColumns:
    """What a call fetches of each row: columns of a token for every place, and of a number for every place."""

    tokens: int = 0
    """Columns as wide as prompt and response, 8 bytes a token."""
    prompts: int = 0
    """Columns as wide as the prompt, 8 bytes a token."""
    numbers: int = 0
    """Columns as wide as the response, 4 bytes a token."""

    def num_bytes(self, prompt_width: int, response_width: int) -> int:
        """Of a row whose columns are so wide."""
        tokens = self.tokens * (prompt_width + response_width) + self.prompts * prompt_width
        return 8 * tokens + 4 * self.numbers * response_width


COLUMNS: Mapping[str, RowColumns] = {
    "generate_sequences": RowColumns(prompts=1),
    "compute_log_probs": RowColumns(tokens=1),
    "compute_values": RowColumns(tokens=1),
    "compute_scores": RowColumns(tokens=1),
    "map": RowColumns(numbers=3),
    "measure": RowColumns(numbers=4),
    "update": RowColumns(tokens=1, numbers=2),
    "update_preferences": RowColumns(tokens=1, numbers=1),
}
"""Of each method; a column of one number a row is left out."""


@dataclass(frozen=True)
class Call:
    """One group call."""

    role: str
    """A role of the dataflow, or one of `HELPERS`."""
    method: str
    reads: tuple[int, ...] = ()
    """Earlier calls whose rows it takes, by their places in the iteration."""
    count: Count = Count.ROWS

    @property
    def work(self) -> Work:
        return WORK[self.method]

    @property
    def phase(self) -> str:
        return phase_of_call(self.role, self.method)

    @property
    def columns(self) -> RowColumns:
        return COLUMNS.get(self.method, RowColumns())

    def __str__(self) -> str:
        return f"{self.role}.{self.method}"


LOG_PROBS, REFERENCE = ("actor", "compute_log_probs"), ("reference", "compute_log_probs")
VALUES, COST_VALUES = ("critic", "compute_values"), ("cost_critic", "compute_values")
SCORES, COSTS = ("reward", "compute_scores"), ("cost", "compute_scores")


def _iteration(
    *looks: tuple[str, str], updates: tuple[str, ...] = ("actor",), greedy: bool = False, costs: bool = False
) -> tuple[Call, ...]:
    """An iteration: prompts, generation between two switches, `looks` at the rollout, advantages, updates, statistics.

    Args:
        greedy: a greedy response to each prompt is generated and scored as well.
        costs: the mean cost must be known before the advantages.
    """
    calls = [
        Call("prompts", "training_prompts", count=Count.PROMPTS),
        Call("actor", "switch_to_generate"),
        Call("actor", "generate_sequences", (0,)),
    ]
    if greedy:
        calls.append(Call("actor", "generate_sequences", (0,), Count.PROMPTS))
    calls.append(Call("actor", "switch_to_train"))
    first = len(calls)
    calls += [Call(role, method, (0, 2)) for role, method in looks]
    seen = (0, 2, *range(first, len(calls)))
    if greedy:
        calls.append(Call(*SCORES, (0, 3), Count.PROMPTS))
        seen = (*seen, len(calls) - 1)
    if costs:
        calls.append(Call("compute", "measure", seen))
    calls.append(Call("compute", "map", (*seen, len(calls) - 1) if costs else seen))
    complete = (*seen, len(calls) - 1)
    calls += [Call(role, "update", complete) for role in updates]
    return (*calls, Call("compute", "measure", complete))


def _preferences() -> tuple[Call, ...]:
    """Online DPO: the controller picks pairs, and there are no advantages."""
    *calls, _, _, _ = _iteration(LOG_PROBS, REFERENCE, SCORES)
    seen = (0, 2, *range(4, len(calls)))
    update = Call("actor", "update_preferences", seen, Count.PAIRS)
    return (*calls, update, Call("compute", "measure", seen))


_CRITIC_FREE = _iteration(LOG_PROBS, REFERENCE, SCORES)

DATAFLOWS: Mapping[str, tuple[Call, ...]] = {
    "ppo": _iteration(LOG_PROBS, REFERENCE, VALUES, SCORES, updates=("critic", "actor")),
    "grpo": _CRITIC_FREE,
    "grpo_from_engine": _iteration(REFERENCE, SCORES),
    "rloo": _CRITIC_FREE,
    "remax": _iteration(LOG_PROBS, REFERENCE, SCORES, greedy=True),
    "reinforce_plus_plus": _CRITIC_FREE,
    "safe_rlhf": _iteration(
        COSTS,
        LOG_PROBS,
        REFERENCE,
        VALUES,
        COST_VALUES,
        SCORES,
        updates=("critic", "cost_critic", "actor"),
        costs=True,
    ),
    "online_dpo": _preferences(),
}
"""Name of a dataflow -> the calls of its iteration, in the order in which the controller makes them."""


def calls_of(algorithm: str) -> tuple[Call, ...]:
    """The calls of an iteration.

    Raises:
        ConfigError: nobody has described that dataflow.
    """
    if algorithm not in DATAFLOWS:
        raise ConfigError(
            f"algorithm.name={algorithm} is a dataflow of your own, whose calls the planner does not know; plan with one"
            f" that makes the same calls: {', '.join(DATAFLOWS)}"
        )
    return DATAFLOWS[algorithm]

"""Group calls of an iteration, in order, with the earlier calls that each one waits for.

They are obtained by tracing the algorithm's step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from hybridengine.config.algorithm import Algorithm
from hybridengine.errors import ConfigError, UnknownNameError

HELPERS = ("prompts", "compute")
"""Groups without a model, on the actor's ranks."""

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
"""Phase of each call of an iteration; the phase of any other call is the call's name."""


def phase_of_call(role: str, method: str) -> str:
    """Return the phase of a call; roles `reward_NAME` and `cost_NAME` belong to the phase of reward and cost."""
    call = f"{role}.{method}"
    if method == "compute_scores":
        call = f"{role.partition('_')[0]}.{method}"
    return PHASES.get(call, call)


class Work(Enum):
    """Kinds of calls."""

    HOST = "host"
    """Reading data or computing on columns, without a model."""
    SWITCH = "switch"
    GENERATE = "generate"
    INFER = "infer"
    """Forward pass."""
    UPDATE = "update"


@dataclass(frozen=True)
class RowColumns:
    """Number of columns of each row that a call fetches, by width."""

    tokens: int = 0
    """Columns as wide as prompt and response, 8 bytes per token."""
    prompts: int = 0
    """Columns as wide as the prompt, 8 bytes per token."""
    numbers: int = 0
    """Columns as wide as the response, 4 bytes per token."""

    def num_bytes(self, prompt_width: int, response_width: int) -> int:
        """Return the bytes of a row with columns of these widths, in tokens."""
        tokens = self.tokens * (prompt_width + response_width) + self.prompts * prompt_width
        return 8 * tokens + 4 * self.numbers * response_width


@dataclass(frozen=True)
class Method:
    """Method of a group: kind of work, kind of result, and fetched columns."""

    work: Work
    returns_rows: bool = False
    columns: RowColumns = RowColumns()
    """Fetched columns, without those of one number per row."""


METHODS: Mapping[str, Method] = {
    "training_prompts": Method(Work.HOST, True),
    "switch_to_generate": Method(Work.SWITCH),
    "generate_sequences": Method(Work.GENERATE, True, RowColumns(prompts=1)),
    "switch_to_train": Method(Work.SWITCH),
    "compute_log_probs": Method(Work.INFER, True, RowColumns(tokens=1)),
    "compute_values": Method(Work.INFER, True, RowColumns(tokens=1)),
    "compute_scores": Method(Work.INFER, True, RowColumns(tokens=1)),
    "map": Method(Work.HOST, True, RowColumns(numbers=3)),
    "measure": Method(Work.HOST, False, RowColumns(numbers=4)),
    "update": Method(Work.UPDATE, False, RowColumns(tokens=1, numbers=2)),
    "update_preferences": Method(Work.UPDATE, False, RowColumns(tokens=1, numbers=1)),
}


@dataclass(frozen=True)
class Call:
    """One group call."""

    role: str
    """Role of the dataflow, or one of `HELPERS`."""
    method: str
    reads: tuple[int, ...] = ()
    """Indices of earlier calls whose rows it reads, or that the controller waits for before it."""
    num_rows: int = 0
    """Number of rows: prompts times responses per prompt, or fewer."""

    @property
    def work(self) -> Work:
        return METHODS[self.method].work

    @property
    def phase(self) -> str:
        return phase_of_call(self.role, self.method)

    @property
    def columns(self) -> RowColumns:
        return METHODS[self.method].columns

    def __str__(self) -> str:
        return f"{self.role}.{self.method}"


@dataclass(frozen=True)
class _Rows:
    """Stand-in for rows, with their number and the calls that produced their columns."""

    trace: _Trace
    num_rows: int
    calls: frozenset[int] = frozenset()

    def __len__(self) -> int:
        return self.num_rows

    def union(self, *others: _Rows) -> _Rows:
        return replace(self, calls=self.calls.union(*(other.calls for other in others)))

    def repeat(self, times: int) -> _Rows:
        return replace(self, num_rows=times * self.num_rows)

    def select(self, *names: str) -> _Rows:
        return self

    def select_as(self, **names: str) -> _Rows:
        return self

    def __getitem__(self, index: Any) -> _Rows:
        return replace(self, num_rows=len(np.arange(self.num_rows)[index]))

    def wait(self) -> _Rows:
        self.trace.waited |= self.calls
        return self

    def get(self, *names: str) -> dict[str, np.ndarray]:
        self.wait()
        kinds = {name: bool if name.endswith("dropped") else float for name in names}
        return {name: np.zeros(self.num_rows, kind) for name, kind in kinds.items()}


class _Metrics(dict[str, float]):
    """Metrics of a call, all 0."""

    def __missing__(self, name: str) -> float:
        return 0.0


@dataclass(frozen=True)
class _Future:
    """Stand-in for the result of a call that returns no rows."""

    trace: _Trace
    call: int

    def get(self) -> list[_Metrics]:
        self.trace.waited.add(self.call)
        return [_Metrics()]


@dataclass
class _Trace:
    """Record of the calls that a step makes."""

    num_rows: int
    """Number of rows of a call without row arguments."""
    calls: list[Call] = field(default_factory=list)
    waited: set[int] = field(default_factory=set)
    """Calls that the controller has waited for; later calls begin after them."""

    def record(self, role: str, method: str, *arguments: Any, **more: Any) -> Any:
        if method not in METHODS:
            raise UnknownNameError(f"{role}.{method} is not one of {', '.join(METHODS)}")
        rows = [value for value in (*arguments, *more.values()) if isinstance(value, _Rows)]
        reads = self.waited.union(*(one.calls for one in rows))
        num_rows = len(rows[0]) if rows else self.num_rows
        place = len(self.calls)
        self.calls.append(Call(role, method, tuple(sorted(reads)), num_rows))
        if METHODS[method].returns_rows:
            return _Rows(self, num_rows, frozenset({place}))
        return _Future(self, place)


@dataclass(frozen=True)
class _Group:
    """Stand-in for the group of a role, with all methods."""

    trace: _Trace
    role: str
    term_columns: tuple[str, ...] = ()

    def __getattr__(self, method: str) -> Any:
        if method.startswith("_"):
            raise AttributeError(method)
        return partial(self.trace.record, self.role, method)


def calls_of(algorithm: Algorithm, num_prompts: int, samples_per_prompt: int) -> tuple[Call, ...]:
    """Return the calls of an iteration, in the order in which the algorithm's step makes them.

    The step runs with stand-ins: groups that compute nothing, and columns and metrics of zeros.

    Raises:
        ConfigError: the step fails with stand-ins, or makes a call that the planner does not know.
    """
    trace = _Trace(num_prompts * samples_per_prompt)
    groups = {role: _Group(trace, role) for role in (*algorithm.roles, *HELPERS)}
    roles = SimpleNamespace(**groups, term_columns=())
    sampling = SimpleNamespace(
        step=1,
        num_prompts=num_prompts,
        samples_per_prompt=samples_per_prompt,
        first_seed=0,
        prompts=_Rows(trace, num_prompts),
    )
    try:
        algorithm.step(roles, sampling, {})
    except Exception as error:  # the step may be the user's code
        raise ConfigError(
            f"algorithm.name={algorithm.name}: the planner cannot trace its step ({type(error).__name__}: {error});"
            " plan with an algorithm that makes the same calls"
        ) from error
    return tuple(trace.calls)

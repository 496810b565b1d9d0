"""Group calls of an iteration, in order, with the earlier calls that each one waits for.

They are found by running the algorithm's step with stand-ins: groups that compute nothing, columns and metrics of zeros.
"""

from __future__ import annotations

from collections import defaultdict
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
    "generation.take": "generate",
    "generation.advance": "generate",
    "actor.switch_to_generate": "switch_to_generate",
    "actor.generate_sequences": "generate",
    "actor.switch_to_train": "switch_to_train",
    "actor.compute_log_probs": "log_probs",
    "reference.compute_log_probs": "ref_log_probs",
    "actor.compute_base_log_probs": "ref_log_probs",
    "teacher.compute_log_probs": "teacher_log_probs",
    "critic.compute_values": "values",
    "cost_critic.compute_values": "cost_values",
    "reward.compute_scores": "scores",
    "cost.compute_scores": "costs",
    "compute.map": "advantages",
    "critic.update": "update_critic",
    "cost_critic.update": "update_cost_critic",
    "actor.update": "update_actor",
    "actor.update_preferences": "update_actor",
    "actor.update_supervised": "update_actor",
    "compute.measure": "statistics",
    "generation.update_weights": "update_weights",
    "actor.push_weights": "update_weights",
    "generation.receive_weights": "receive_weights",
    "generation.begin": "begin_responses",
    "generation.withdraw": "withdraw_responses",
    "actor.join_engines": "switch_to_generate",
    "actor.begin": "begin_responses",
    "actor.advance": "generate",
    "actor.leave_engines": "switch_to_train",
    "prompts.sequences": "prompts",
}
"""Phase of each call of an iteration; the phase of any other call is the call's name."""


def phase_of_call(role: str, method: str) -> str:
    """Return the phase of a call; roles `reward_NAME` and `cost_NAME` belong to the phase of reward and cost."""
    call = f"{role}.{method}"
    if method == "compute_scores":
        call = f"{role.partition('_')[0]}.{method}"
    return PHASES.get(call, call)


class Work(Enum):
    HOST = "host"
    """Reading data or computing on columns, without a model."""
    SWITCH = "switch"
    GENERATE = "generate"
    INFER = "infer"
    """Forward pass."""
    UPDATE = "update"


@dataclass(frozen=True)
class Method:
    """Method of a group: kind of work, and fetched columns except those of one number per row."""

    work: Work
    tokens: int = 0
    """Number of fetched columns as wide as prompt and response, 8 bytes per token."""
    prompts: int = 0
    """Number of columns as wide as the prompt, 8 bytes per token."""
    numbers: int = 0
    """Number of columns as wide as the response, 4 bytes per token."""


METHODS: Mapping[str, Method] = {
    "training_prompts": Method(Work.HOST),
    "switch_to_generate": Method(Work.SWITCH),
    "generate_sequences": Method(Work.GENERATE, prompts=1),
    "switch_to_train": Method(Work.SWITCH),
    "take": Method(Work.GENERATE, prompts=1),
    "update_weights": Method(Work.SWITCH),
    "compute_log_probs": Method(Work.INFER, tokens=1),
    "compute_base_log_probs": Method(Work.INFER, tokens=1),
    "compute_values": Method(Work.INFER, tokens=1),
    "compute_scores": Method(Work.INFER, tokens=1),
    "map": Method(Work.HOST, numbers=3),
    "measure": Method(Work.HOST, numbers=4),
    "update": Method(Work.UPDATE, tokens=1, numbers=2),
    "update_preferences": Method(Work.UPDATE, tokens=1, numbers=1),
    "update_supervised": Method(Work.UPDATE, tokens=1),
}


@dataclass(frozen=True)
class Call:
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

    def __str__(self) -> str:
        return f"{self.role}.{self.method}"


@dataclass(frozen=True)
class _Result:
    """Stand-in for the rows or the metrics of calls: zeros, with the calls that produced them."""

    trace: _Trace
    num_rows: int
    calls: frozenset[int] = frozenset()

    def __len__(self) -> int:
        return self.num_rows

    def union(self, *others: _Result) -> _Result:
        return replace(self, calls=self.calls.union(*(other.calls for other in others)))

    def repeat(self, times: int) -> _Result:
        return replace(self, num_rows=times * self.num_rows)

    def select(self, *names: str, **renamed: str) -> _Result:
        return self

    select_as = select

    def __getitem__(self, index: Any) -> _Result:
        return replace(self, num_rows=len(np.arange(self.num_rows)[index]))

    def wait(self) -> _Result:
        self.trace.waited |= self.calls
        return self

    def get(self, *names: str) -> Any:
        """Return the columns `names`; without names, the metrics of one rank."""
        self.wait()
        kinds = {name: bool if name.endswith("dropped") else float for name in names}
        columns = {name: np.zeros(self.num_rows, kind) for name, kind in kinds.items()}
        return columns or [defaultdict[str, float](float)]


@dataclass
class _Trace:
    """Record of the calls that a step makes."""

    num_rows: int
    """Number of rows of a call without row arguments."""
    calls: list[Call] = field(default_factory=list)
    waited: set[int] = field(default_factory=set)
    """Calls that the controller has waited for; later calls begin after them."""

    def record(self, role: str, method: str, *arguments: Any, **more: Any) -> _Result:
        if method not in METHODS:
            raise UnknownNameError(f"{role}.{method} is not one of {', '.join(METHODS)}")
        rows = [value for value in (*arguments, *more.values()) if isinstance(value, _Result)]
        reads = self.waited.union(*(one.calls for one in rows))
        num_rows = len(rows[0]) if rows else self.num_rows
        self.calls.append(Call(role, method, tuple(sorted(reads)), num_rows))
        return _Result(self, num_rows, frozenset({len(self.calls) - 1}))


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


@dataclass(frozen=True)
class _Engines(_Group):
    """Stand-in for engines on ranks of their own, which generate all the time, so that only two methods are calls."""

    def take(self, version: int, scorers: _Group) -> tuple[_Result, _Result]:
        """Return a batch and its scores."""
        rows = self.trace.record(self.role, "take", version)
        return rows, scorers.compute_scores(rows)

    def work_until(self, *results: _Result) -> None:
        """Wait for the results of other groups."""
        for result in results:
            result.wait()

    def take_metrics(self) -> dict[str, float]:
        return {}


def calls_of(
    algorithm: Algorithm, num_prompts: int, samples_per_prompt: int, *, has_adapters: bool = False
) -> tuple[Call, ...]:
    """Return the calls of an iteration, in order; ConfigError if the step fails with stand-ins or a call is unknown.

    With `has_adapters`, the actor answers the calls of the reference.
    """
    trace = _Trace(num_prompts * samples_per_prompt)
    kinds = {role: _Engines if role == "generation" else _Group for role in (*algorithm.roles, *HELPERS)}
    groups = {role: kind(trace, role) for role, kind in kinds.items()}
    roles = SimpleNamespace(**groups, term_columns=(), episode_columns=())
    sampling = SimpleNamespace(
        step=1,
        num_prompts=num_prompts,
        samples_per_prompt=samples_per_prompt,
        first_seed=0,
        prompts=_Result(trace, num_prompts),
    )
    try:
        algorithm.traced().step(roles, sampling, {})
    except Exception as error:  # the step may be the user's code
        raise ConfigError(
            f"algorithm.name={algorithm.name}: the planner cannot trace its step ({type(error).__name__}: {error});"
            " plan with an algorithm that makes the same calls"
        ) from error
    if not has_adapters:
        return tuple(trace.calls)
    base = {"role": "actor", "method": "compute_base_log_probs"}
    return tuple(replace(call, **base) if call.role == "reference" else call for call in trace.calls)  # type: ignore[arg-type]

"""The calls that a driver makes, recorded: groups that compute nothing, rows that know who has produced them."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from tensordict import TensorDict

from hybridengine.config.algorithm_sections import ALGORITHM_ROLES, AlgorithmSection
from hybridengine.drivers.dataflow import load_step
from hybridengine.drivers.roles import Sampling

PROMPTS, SAMPLES = 4, 2


@dataclass
class Traced:
    """One recorded call."""

    name: str
    reads: tuple[int, ...]
    num_rows: int | None


@dataclass(frozen=True)
class FakeRows:
    """A reference to rows: how many, and the calls that have produced some of their columns."""

    num_rows: int
    calls: frozenset[int] = frozenset()

    def union(self, *others: FakeRows) -> FakeRows:
        assert all(len(other) == len(self) for other in others)
        return FakeRows(len(self), self.calls.union(*(other.calls for other in others)))

    def repeat(self, times: int) -> FakeRows:
        return FakeRows(times * len(self), self.calls)

    def select(self, *names: str) -> FakeRows:
        return self

    def select_as(self, **names: str) -> FakeRows:
        return self

    def __getitem__(self, rows: torch.Tensor) -> FakeRows:
        return FakeRows(len(rows), self.calls)

    def __len__(self) -> int:
        return self.num_rows

    def get(self, *names: str) -> TensorDict:
        columns = {
            name: torch.zeros(len(self), dtype=torch.bool if "dropped" in name else torch.float)
            for name in names
        }
        return TensorDict(columns, batch_size=[len(self)])  # pyright: ignore[reportArgumentType]


RETURNS_ROWS = (
    "training_prompts",
    "generate_sequences",
    "compute_log_probs",
    "compute_values",
    "compute_scores",
    "map",
)
REPORT = dict.fromkeys(("received_bytes", "peak_weight_bytes", "redundant_bytes"), 0) | {"cost/mean": 0.0}


@dataclass
class FakeGroup:
    """All methods of one role."""

    role: str
    trace: list[Traced] = field(default_factory=list)
    term_columns: tuple[str, ...] = ()

    def __getattr__(self, method: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            rows = [value for value in (*args, *kwargs.values()) if isinstance(value, FakeRows)]
            reads = frozenset[int]().union(*(one.calls for one in rows))
            self.trace.append(
                Traced(f"{self.role}.{method}", tuple(sorted(reads)), len(rows[0]) if rows else None)
            )
            if method in RETURNS_ROWS:
                return FakeRows(len(rows[0]), frozenset({len(self.trace) - 1}))
            return SimpleNamespace(get=lambda: [REPORT])

        return call


def trace(name: str, **settings: Any) -> list[Traced]:
    """The calls of an iteration of a dataflow, in the order in which its driver makes them."""
    calls: list[Traced] = []
    roles = (*ALGORITHM_ROLES[name], "prompts", "compute")
    groups: Any = SimpleNamespace(**{role: FakeGroup(role, calls) for role in roles}, term_columns=())
    sampling: Any = SimpleNamespace(
        step=1, num_prompts=PROMPTS, samples_per_prompt=SAMPLES, first_seed=0, prompts=FakeRows(PROMPTS)
    )
    assert set(vars(sampling)) == {*Sampling.__dataclass_fields__, "prompts"}
    algorithm = AlgorithmSection(name=name, **settings)
    load_step(algorithm)(groups, sampling, algorithm, {})
    return calls

"""Updates of the actor and of the critic train the tokens of `trained`, and no rows that are too old.

The workers are the project's own, with a trainer that records the micro-batches; no ranks are started.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from hybridengine.config import RunConfig
from hybridengine.config.role_sections import ActorSection, CriticSection
from hybridengine.config.sections import StalenessSection
from hybridengine.drivers.grpo import Grpo
from hybridengine.errors import StalenessError
from hybridengine.rows.protocols import registered
from workers.actor import ActorWorker
from workers.critic import CriticWorker
from workers.model_worker import TrainedWorker

VERSIONS = [[5, 5, 4, 3], [3, 3, 4, 9], [2, 2, 2, 2]]
LENGTHS = [4, 3, 2]
VERSION, MAX_VERSIONS = 5, 1
TRAINED = [[version in (4, 5) for version in row] for row in VERSIONS]
WIDTH, PROMPT = 4, 2


class Trainer:
    """Records the micro-batches of each optimizer step, with the loss's sum and count."""

    is_last_stage = False

    def __init__(self) -> None:
        self.steps: list[list[tuple[dict[str, torch.Tensor], float, int]]] = []

    def leave_training(self) -> None:
        pass

    drop_routing = leave_training

    def take_routing(self) -> dict[str, float]:
        return {}

    def train_step(self, batches: list[dict[str, torch.Tensor]], loss: Any) -> Any:
        self.steps.append([])
        for columns in batches:
            output = torch.zeros(len(columns["tokens"]), requires_grad=True)
            total, count, _ = loss(output, columns)
            self.steps[-1].append((columns, float(total.detach()), int(count)))
        return SimpleNamespace(collected=[], skipped=False)


def worker(kind: type[TrainedWorker], role: str) -> Any:
    """Return a worker without a model, whose log-probs are -1 at every token."""
    run = RunConfig(
        algorithm=Grpo(),
        staleness=StalenessSection(max_versions=MAX_VERSIONS),
        actor=ActorSection(entropy_coef=0.0),
        critic=CriticSection(value_clip=0.0),
    )
    found: Any = object.__new__(kind)
    found.context = SimpleNamespace(role=role)
    found.run, found.section, found.max_tokens, found._divisor = run, getattr(run, role), 100, float(WIDTH)
    found._updates = found._skipped_in_a_row = 0
    found.trainer = found.model = Trainer()
    found.log_probs_of = lambda output, columns: (
        output[:, None] - torch.ones(columns["mask"].shape),
        torch.zeros(columns["mask"].shape),
    )
    return found


def batch(**columns: Any) -> TensorDict:
    num_rows = len(LENGTHS)
    generator = torch.Generator().manual_seed(5)
    values = {
        name: torch.randn(num_rows, WIDTH, generator=generator)
        for name in ("advantages", "values", "returns")
    }
    rows = {
        "tokens": torch.zeros(num_rows, PROMPT + WIDTH, dtype=torch.int64),
        "prompt_lengths": torch.full((num_rows,), PROMPT),
        "response_lengths": torch.tensor(LENGTHS),
        "log_probs": torch.full((num_rows, WIDTH), -1.1),
        "keep": torch.ones(num_rows, dtype=torch.bool),
        "versions": torch.tensor(VERSIONS, dtype=torch.int32),
        "trained": torch.tensor(TRAINED),
        **values,
    }
    return TensorDict(rows | columns, batch_size=[num_rows])


PLACES = [(row, j) for row, length in enumerate(LENGTHS) for j in range(length) if TRAINED[row][j]]


def test_the_actor_trains_fresh_tokens_and_counts_no_others() -> None:
    actor, rows = worker(ActorWorker, "actor"), batch()
    actor.update(rows, Grpo(), VERSION)
    ((_, total, count),) = actor.trainer.steps[0]
    ratio = math.exp(0.1)
    assert count == len(PLACES) == 4
    assert total == pytest.approx(-sum(ratio * float(rows["advantages"][place]) for place in PLACES))


def test_the_critic_trains_fresh_tokens_and_counts_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.critic.response_values", lambda output: output[:, None].expand(-1, WIDTH))
    critic, rows = worker(CriticWorker, "critic"), batch()
    critic.update(rows, VERSION)
    ((_, total, count),) = critic.trainer.steps[0]
    assert count == len(PLACES)
    assert total == pytest.approx(sum(0.5 * float(rows["returns"][place]) ** 2 for place in PLACES))


def call(role: str, rows: TensorDict, version: int | None) -> Trainer:
    """Update a role with the columns that it declares; return its trainer."""
    kind: Any = {"actor": ActorWorker, "critic": CriticWorker}[role]
    _, registration = registered(kind)["update"]
    declared = [*(registration.columns or ()), *(set(registration.optional) & set(rows.keys()))]
    one = worker(kind, role)
    try:
        one.update(rows.select(*declared), *([Grpo()] if role == "actor" else []), version)
    except StalenessError:
        assert not one.trainer.steps, "nothing has been trained"
        raise
    return one.trainer


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_an_update_refuses_tokens_that_are_not_masked(role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.critic.response_values", lambda output: output[:, None].expand(-1, WIDTH))
    assert call(role, batch(), VERSION).steps
    assert call(role, batch().exclude("versions"), None).steps
    with pytest.raises(
        StalenessError, match=r"token 3 of row 0 was drawn by version 3.*its age of 2 exceeds"
    ):
        call(role, batch().exclude("trained"), VERSION)
    with pytest.raises(
        StalenessError, match=r"token 2 of row 0 was drawn by version 4.*its age of 2 exceeds"
    ):
        call(role, batch(), VERSION + 1)
    with pytest.raises(StalenessError, match=r"token 0 of row 0 was drawn by version 5.*its age of -1 must"):
        call(role, batch(), VERSION - 1)
    with pytest.raises(StalenessError, match="version None was called with rows with the column 'versions'"):
        call(role, batch(), None)

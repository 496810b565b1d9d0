"""Advantages and metrics of asynchronous batches: statistics leave stale tokens out, rewards and returns do not."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from hybridengine.algorithms.across import ONE_PROCESS
from hybridengine.algorithms.masking import response_mask
from hybridengine.algorithms.staleness import fresh_tokens, staleness_metrics
from hybridengine.config.algorithm import CorrectionSection
from hybridengine.drivers import advantages
from hybridengine.drivers.advantages import rollout_metrics
from hybridengine.drivers.dataflow import measure_rollout, with_advantages
from hybridengine.drivers.grpo import Grpo
from hybridengine.drivers.reinforce_plus_plus import ReinforcePlusPlus
from hybridengine.drivers.safe_rlhf import SafeRlhf
from hybridengine.importing import import_object
from tests.unit.test_dataflow_functions import (
    COST_DROPPED,
    KEPT,
    LENGTHS,
    NUM_ROWS,
    ROWS,
    SAMPLES,
    SETTINGS,
    WIDTH,
    assert_rows,
    estimates_of,
    returns_of,
    rewards_of,
    safe_advantages_of,
)

VERSION, MAX_VERSIONS = 7, 1
VERSIONS = torch.tensor([[(5 * row + place) % 4 + 4 for place in range(WIDTH)] for row in range(NUM_ROWS)])
VERSIONS[3] = 4  # all of this row is stale
FRESH = {
    row: [place for place in range(LENGTHS[row]) if VERSION - int(VERSIONS[row, place]) <= MAX_VERSIONS]
    for row in range(NUM_ROWS)
}


def batch() -> TensorDict:
    rows = ROWS.clone().update({"versions": VERSIONS.int()})
    mask = response_mask(rows["response_lengths"], WIDTH)
    return rows.update({"fresh": fresh_tokens(VERSIONS, mask, VERSION, MAX_VERSIONS)})


def whitened_where_fresh(by_row: dict[int, list[float]]) -> dict[int, list[float]]:
    """Return the values whitened over the fresh tokens of these rows, and 0 at stale ones."""
    values = [found[place] for row, found in by_row.items() for place in FRESH[row]]
    mean = sum(values) / len(values)
    scale = 1 / math.sqrt(sum((value - mean) ** 2 for value in values) / len(values) + 1e-8)
    return {
        row: [(value - mean) * scale if place in FRESH[row] else 0.0 for place, value in enumerate(found)]
        for row, found in by_row.items()
    }


def assert_trained(found: TensorDict, rows: list[int]) -> None:
    """Assert that updates train the fresh tokens of these rows and no others."""
    expected = [[row in rows and place in FRESH[row] for place in range(WIDTH)] for row in range(NUM_ROWS)]
    assert found["trained"].tolist() == expected


def test_the_rows_have_stale_and_fresh_tokens_everywhere() -> None:
    assert not FRESH[3]
    assert 0 < sum(map(len, FRESH.values())) < sum(LENGTHS)
    assert batch()["fresh"].tolist() == [
        [place in FRESH[row] for place in range(WIDTH)] for row in range(NUM_ROWS)
    ]


def test_advantages_of_ppo() -> None:
    """GAE runs over whole responses: a fresh token's advantage depends on the stale ones after it."""
    found = advantages.ppo(batch(), ONE_PROCESS, SETTINGS, SAMPLES)
    estimates = estimates_of(KEPT)
    assert_rows(found["advantages"], whitened_where_fresh(estimates))
    returns = {
        row: [one + two for one, two in zip(estimates[row], ROWS["values"][row].tolist(), strict=False)]
        for row in KEPT
    }
    assert_rows(found["returns"], returns)
    assert_trained(found, KEPT)


def test_advantages_of_safe_rlhf() -> None:
    judged = [row for row in KEPT if not COST_DROPPED[row]]
    found = advantages.safe_rlhf(
        batch(), ONE_PROCESS, SafeRlhf(kl_coef=0.1, gamma=0.9, lam=0.8), SAMPLES, 2.0
    )
    expected = safe_advantages_of(judged, whitened_where_fresh)
    assert_rows(found["advantages"], expected)
    assert_trained(found, judged)


def test_advantages_of_reinforce_plus_plus() -> None:
    algorithm = ReinforcePlusPlus(kl_coef=0.1, gamma=0.9)
    found = advantages.reinforce_plus_plus(batch(), ONE_PROCESS, algorithm, SAMPLES)
    assert_rows(
        found["advantages"], whitened_where_fresh({row: returns_of(rewards_of(row), 0.9) for row in KEPT})
    )
    assert_trained(found, KEPT)


def test_groups_of_grpo_include_stale_responses() -> None:
    """The score of a response that is not trained still tells how good the others are."""
    plain = advantages.grpo(ROWS.clone(), ONE_PROCESS, Grpo(), SAMPLES)
    found = advantages.grpo(batch(), ONE_PROCESS, Grpo(), SAMPLES)
    assert torch.equal(found["advantages"], plain["advantages"])
    assert_trained(found, KEPT)
    assert "trained" not in plain


def test_baselines_of_tokens_leave_stale_tokens_out() -> None:
    """A fresh token is compared with the fresh tokens of the same place, weighed by their energies so far."""
    squares = torch.rand(NUM_ROWS, WIDTH, generator=torch.Generator().manual_seed(9)).double()
    algorithm = Grpo(baseline="token", normalize_std=False)
    found = advantages.grpo(batch().update({"squared_probs": squares}), ONE_PROCESS, algorithm, SAMPLES)
    weights: dict[int, list[float]] = {}
    for row in KEPT:
        energies = [
            1 - 2 * math.exp(float(ROWS["log_probs"][row, place])) + float(squares[row, place])
            for place in FRESH[row]
        ]
        weights[row] = [*itertools.accumulate(energies)]
    expected = {row: [0.0] * LENGTHS[row] for row in KEPT}
    for row in KEPT:
        group = [other for other in KEPT if other // SAMPLES == row // SAMPLES]
        for count, place in enumerate(FRESH[row]):
            known = {other: weights[other][count] for other in group if len(weights[other]) > count}
            mean = sum(float(ROWS["scores"][other]) * w for other, w in known.items()) / sum(known.values())
            expected[row][place] = float(ROWS["scores"][row]) - (mean if len(known) > 1 else 0.0)
    assert_rows(found["advantages"], expected)
    assert_trained(found, KEPT)


def test_corrections_and_their_metrics_cover_fresh_tokens() -> None:
    settings = Grpo(correction=CorrectionSection(name="sequence_mis", high=1.5))
    found = advantages.grpo(batch(), ONE_PROCESS, settings, SAMPLES)
    products = {
        row: math.prod(
            math.exp(float(ROWS["log_probs"][row, place] - ROWS["rollout_log_probs"][row, place]))
            for place in FRESH[row]
        )
        for row in KEPT
    }
    kept = [row for row in KEPT if products[row] <= 1.5]
    assert len(kept) < len(KEPT)
    assert found["keep"].tolist() == [row in kept for row in range(NUM_ROWS)]
    assert_trained(found, kept)
    weights = [products[row] for row in kept if FRESH[row]]
    metrics = rollout_metrics(batch(), ONE_PROCESS, settings)
    count = sum(1 for row in KEPT if FRESH[row])
    assert metrics["correction/weight_mean"] == pytest.approx(sum(weights) / count)
    assert metrics["correction/effective_sample_share"] == pytest.approx(
        sum(weights) ** 2 / (count * sum(weight**2 for weight in weights))
    )


def test_metrics_of_ages_cover_all_response_tokens() -> None:
    found = rollout_metrics(batch(), ONE_PROCESS, SETTINGS, (), VERSION, MAX_VERSIONS)
    mask = torch.tensor([[place < LENGTHS[row] for place in range(WIDTH)] for row in range(NUM_ROWS)])
    expected = staleness_metrics(VERSIONS, mask, VERSION, MAX_VERSIONS)
    assert {name: value for name, value in found.items() if name.startswith("staleness/")} == expected
    assert found["staleness/older_share"] == pytest.approx(
        1 - sum(map(len, FRESH.values())) / sum(LENGTHS), abs=1e-12
    )
    plain = rollout_metrics(ROWS, ONE_PROCESS, SETTINGS)
    assert {name for name in found if name not in plain} == set(expected)


def test_log_probs_of_engine_and_trainer_are_compared_for_the_same_weights() -> None:
    rows = batch()
    assert rollout_metrics(rows, ONE_PROCESS, SETTINGS, (), VERSION)["rollout/log_prob_abs_diff_max"] == 0
    rows["versions"][1] = VERSION
    rows["versions"][1, LENGTHS[1] :] = -1
    found = rollout_metrics(rows, ONE_PROCESS, SETTINGS, (), VERSION)["rollout/log_prob_abs_diff_max"]
    own = [
        abs(float(rows["log_probs"][1, at] - rows["rollout_log_probs"][1, at])) for at in range(LENGTHS[1])
    ]
    everywhere = rollout_metrics(rows, ONE_PROCESS, SETTINGS)["rollout/log_prob_abs_diff_max"]
    assert found == pytest.approx(max(own)) != everywhere


class Batch(dict[str, Any]):
    """Rows in this process, with the methods that dataflows use."""

    def select(self, *names: str) -> Batch:
        return Batch({name: self[name] for name in names if name in self})

    def union(self, other: TensorDict) -> Batch:
        return Batch({**self, **dict(other.items())})


class Computing:
    """Functions over rows, as `compute` runs them."""

    def map(self, rows: Batch, function: str, *arguments: Any) -> Any:
        columns = TensorDict(dict(rows), batch_size=[NUM_ROWS])
        return import_object(function)(columns, ONE_PROCESS, *arguments)

    measure = map


def test_the_calls_of_an_asynchronous_dataflow() -> None:
    columns = dict.fromkeys(("term_columns", "episode_columns"), ())
    roles: Any = type("Roles", (), {"compute": Computing(), **columns})
    found: Any = Batch(dict(batch().items()))
    trained = with_advantages(
        roles, found, Grpo(advantages=f"{__name__}:ungrouped"), SAMPLES, columns=["fresh"]
    )
    assert_trained(trained, KEPT)
    metrics = measure_rollout(roles, found, SETTINGS, version=VERSION, max_versions=MAX_VERSIONS)
    assert metrics == rollout_metrics(batch(), ONE_PROCESS, SETTINGS, (), VERSION, MAX_VERSIONS)


def ungrouped(rows: TensorDict, across: Any, algorithm: Grpo, samples: int) -> TensorDict:
    """Return scores as advantages."""
    counted = advantages.counted_rows(rows, algorithm)
    return counted.columns(advantages=counted.scores_B[:, None] * counted.mask_BR)

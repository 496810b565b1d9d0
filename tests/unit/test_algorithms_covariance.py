"""Tokens of a high covariance: their choice compared with a sort of the whole batch; the losses clip-cov and kl-cov."""

from __future__ import annotations

import math
import statistics
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torch import Tensor

from hybridengine.algorithms.across import ONE_PROCESS, Across
from hybridengine.algorithms.covariance import covariances, largest_entries
from hybridengine.algorithms.losses.aggregation import Aggregation
from hybridengine.algorithms.losses.covariance import clip_cov_loss, kl_cov_loss
from hybridengine.config.loss_sections import CLIP_COV_LOSS, KL_COV_LOSS, CovarianceSection
from hybridengine.config.role_sections import ActorSection
from hybridengine.drivers.advantages import covariant_tokens
from hybridengine.drivers.grpo import Grpo
from hybridengine.rollouts.queue import first_seed
from hybridengine.rows.protocols import ROW_NUMBERS
from tests.unit.test_algorithms_across import cut, joined, on_ranks
from tests.unit.test_algorithms_gspo_cispo import (
    AGGREGATIONS,
    LENGTHS,
    MASK_BR,
    PLACES,
    WIDTH,
    _columns,
    _gradients,
    _share,
)

ACTOR = ActorSection(clip_low=0.2, clip_high=0.15)
CHOSEN = PLACES[1::3]


def marked() -> tuple[Tensor, dict[str, Tensor]]:
    """Return log-probs and columns with some `covariant` tokens, and others at masked entries."""
    new_BR, columns = _columns()
    chosen_BR = ~MASK_BR
    for place in CHOSEN:
        chosen_BR[place] = True
    return new_BR, columns | {"covariant": chosen_BR}


def entry(columns: dict[str, Tensor], name: str, place: tuple[int, int]) -> float:
    return columns[name][place].item()


@pytest.mark.parametrize("aggregation", AGGREGATIONS, ids=lambda one: one.name)
@pytest.mark.parametrize("weighted", [True, False])
def test_clip_cov_against_a_loop(aggregation: Aggregation, weighted: bool) -> None:
    """Chosen tokens have no loss and no gradient, and count in the mean; the others are PPO's."""
    new_BR, columns = marked()
    if not weighted:
        del columns["weights"]
    loss = clip_cov_loss(new_BR, columns, Grpo(loss=CLIP_COV_LOSS), ACTOR, aggregation)
    loss.loss_sum.backward()
    total, gradients = 0.0, []
    for place in PLACES:
        ratio = math.exp(new_BR[place].item() - entry(columns, "log_probs", place))
        advantage, clipped = entry(columns, "advantages", place), min(max(ratio, 0.8), 1.15)
        gain = min(ratio * advantage, clipped * advantage)
        slope = ratio * advantage if gain == ratio * advantage else 0.0
        share = _share(aggregation, place[0]) * (entry(columns, "weights", place) if weighted else 1.0)
        share *= place not in CHOSEN
        total -= gain * share
        gradients.append(-slope * share)
    assert loss.loss_sum.item() == pytest.approx(total, rel=1e-12)
    assert _gradients(new_BR) == pytest.approx(gradients, rel=1e-12)
    metrics = loss.stats.metrics(len(PLACES))
    assert metrics["actor/policy_loss"] == pytest.approx(total / int(aggregation.count(MASK_BR)))
    assert metrics["actor/covariant_fraction"] == pytest.approx(len(CHOSEN) / len(PLACES))


@pytest.mark.parametrize("aggregation", AGGREGATIONS, ids=lambda one: one.name)
def test_kl_cov_against_a_loop(aggregation: Aggregation) -> None:
    new_BR, columns = marked()
    algorithm = Grpo(loss=KL_COV_LOSS, covariance=CovarianceSection(kl_weight=0.7))
    loss = kl_cov_loss(new_BR, columns, algorithm, ACTOR, aggregation)
    loss.loss_sum.backward()
    total, gradients = 0.0, []
    for place in PLACES:
        difference = new_BR[place].item() - entry(columns, "log_probs", place)
        gain = slope = math.exp(difference) * entry(columns, "advantages", place)
        if place in CHOSEN:
            gain, slope = gain - 0.7 * abs(difference), slope - math.copysign(0.7, difference)
        share = _share(aggregation, place[0]) * entry(columns, "weights", place)
        total -= gain * share
        gradients.append(-slope * share)
    assert loss.loss_sum.item() == pytest.approx(total, rel=1e-12)
    assert _gradients(new_BR) == pytest.approx(gradients, rel=1e-12)
    assert loss.stats.metrics(len(PLACES))["actor/covariant_fraction"] == len(CHOSEN) / len(PLACES)


@pytest.mark.parametrize("loss_function", [clip_cov_loss, kl_cov_loss])
def test_constants_have_no_gradient(loss_function: Any) -> None:
    new_BR, columns = marked()
    constants = [columns[name].requires_grad_() for name in ("log_probs", "advantages", "weights")]
    loss_function(new_BR, columns, Grpo(), ACTOR, Aggregation()).loss_sum.backward()
    assert all(constant.grad is None for constant in constants)


def products(log_probs_BR: Tensor, advantages_BR: Tensor, places: list[tuple[int, int]]) -> dict[Any, float]:
    """Return the covariance of each place, by the paper's definition."""
    columns = [[column[place].item() for place in places] for column in (log_probs_BR, advantages_BR)]
    means = [statistics.fmean(column) for column in columns]
    return {
        place: (log_prob - means[0]) * (advantage - means[1])
        for place, log_prob, advantage in zip(places, *columns, strict=True)
    }


def test_covariances() -> None:
    _, columns = _columns()
    found_BR = covariances(columns["log_probs"], columns["advantages"], MASK_BR)
    expected = products(columns["log_probs"], columns["advantages"], PLACES)
    assert [found_BR[place].item() for place in PLACES] == pytest.approx([*expected.values()], rel=1e-12)
    assert not found_BR[~MASK_BR].any()


values = st.sampled_from([-math.inf, -2.5, -1e-310, -0.0, 0.0, 1e-310, 0.1, 3.0, 7.5])


@given(
    drawn=st.lists(st.tuples(values, st.booleans(), st.integers(0, 2)), min_size=1, max_size=9),
    count=st.integers(0, 10),
)
@settings(deadline=None, max_examples=30)
def test_the_largest_entries_of_all_ranks(drawn: list[tuple[float, bool, int]], count: int) -> None:
    """One entry per row: with many equal values, of any sign; 0 and -0 are two, the first the larger."""
    values_BR = torch.tensor([[value] for value, _, _ in drawn], dtype=torch.float64)
    mask_BR = torch.tensor([[kept] for _, kept, _ in drawn])
    draws_BR = torch.rand(len(drawn), 1, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    order = sorted(
        (row for row, (_, kept, _) in enumerate(drawn) if kept),
        key=lambda row: (drawn[row][0], math.copysign(1, drawn[row][0]), draws_BR[row].item()),
        reverse=True,
    )
    rows = cut([owner for *_, owner in drawn])
    parts = on_ranks(
        rows,
        lambda part, across: largest_entries(values_BR[part], draws_BR[part], mask_BR[part], count, across),
    )
    found = joined(rows, parts)[:, 0].nonzero()[:, 0].tolist()
    assert found == sorted(order[:count])


NUM_ROWS = len(LENGTHS)


def batch(*, varied: bool = False) -> TensorDict:
    """Return rows of a batch whose row 3 is dropped; log-probs are all 0 in row 4, as those of certain tokens are.

    If `varied`, no two tokens are equal.
    """
    _, columns = _columns(equal_advantages=not varied)
    log_probs_BR = columns["log_probs"].clone()
    if not varied:
        log_probs_BR[4, : LENGTHS[4]] = 0.0
    keep_B = torch.arange(NUM_ROWS) != 3
    found = {
        "log_probs": log_probs_BR,
        "advantages": columns["advantages"],
        "response_lengths": torch.tensor(LENGTHS),
        "trained": MASK_BR & keep_B[:, None],
        "keep": keep_B,
        ROW_NUMBERS: torch.arange(NUM_ROWS),
    }
    return TensorDict(found, batch_size=[NUM_ROWS])  # pyright: ignore[reportArgumentType]


ALL = [place for place in PLACES if place[0] != 3]


def chosen(
    algorithm: Grpo, owners: list[int], seed: int = 5, *, varied: bool = False
) -> set[tuple[int, int]]:
    rows, parts = batch(varied=varied), cut(owners)

    def one(part: list[int], across: Across) -> Tensor:
        return covariant_tokens(rows[part], across, algorithm, seed)["covariant"]  # type: ignore[return-value]

    return {(row, place) for row, place in joined(parts, on_ranks(parts, one)).nonzero().tolist()}


@pytest.mark.parametrize(("share", "count"), [(1e-6, 1), (0.3, 3), (0.5, 5), (1.0, 11)])
def test_kl_cov_takes_the_largest_on_any_ranks(share: float, count: int) -> None:
    algorithm = Grpo(loss=KL_COV_LOSS, covariance=CovarianceSection(share=share))
    rows = batch()
    expected = products(rows["log_probs"], rows["advantages"], ALL)
    found = chosen(algorithm, [0] * NUM_ROWS)
    assert len(ALL) == 11
    assert len(found) == count
    assert (
        min(expected[place] for place in found)
        >= max([value for place, value in expected.items() if place not in found], default=-math.inf) - 1e-15
    )
    assert chosen(algorithm, [0, 2, 1, 2, 0, 1]) == found


def test_equal_tokens_are_drawn_by_the_seed() -> None:
    """Row 4 has the largest advantages but one, and four equal tokens; some of these are needed."""
    algorithm = Grpo(loss=KL_COV_LOSS, covariance=CovarianceSection(share=0.34))
    last = first_seed(2**31 - 1, 10**6, 10**6)
    found = [chosen(algorithm, [0] * NUM_ROWS, seed) for seed in [*range(20), last]]
    assert {len(places) for places in found} == {3}
    assert len({frozenset(places) for places in found}) > 1
    assert found[3] == chosen(algorithm, [1, 0, 1, 0, 0, 1], seed=3)


def test_clip_cov_draws_among_those_in_the_range() -> None:
    rows = batch(varied=True)
    expected = products(rows["log_probs"], rows["advantages"], ALL)
    order = sorted(expected, key=lambda place: expected[place])
    low, high = expected[order[3]], expected[order[-2]]
    inside = set(order[4:-2])
    section = CovarianceSection(share=0.2, low=low + 1e-12, high=high - 1e-12)

    def taken(section: CovarianceSection, seed: int, owners: tuple[int, ...] = (0,) * NUM_ROWS) -> set[Any]:
        return chosen(Grpo(loss=CLIP_COV_LOSS, covariance=section), list(owners), seed, varied=True)

    found = [taken(section, seed) for seed in range(60)]
    assert all(len(places) == 2 and places <= inside for places in found)
    assert set().union(*found) == inside, "each of them is drawn at some time"
    assert found[7] == taken(section, 7, (2, 1, 0, 0, 1, 2))
    assert taken(section.model_copy(update={"share": 1.0}), 0) == inside
    assert taken(section.model_copy(update={"low": 50.0, "high": 60.0}), 0) == set()


def test_a_batch_without_trained_tokens_has_none() -> None:
    rows = batch()
    rows["keep"] = torch.zeros(NUM_ROWS, dtype=torch.bool)
    for loss in (CLIP_COV_LOSS, KL_COV_LOSS):
        found = covariant_tokens(rows, ONE_PROCESS, Grpo(loss=loss), 0)["covariant"]
        assert found.shape == (NUM_ROWS, WIDTH)
        assert not found.any()

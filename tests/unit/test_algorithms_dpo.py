"""The DPO loss: values and statistics compared with loops over Python floats, gradients with autograd."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridengine.algorithms.losses.aggregation import LossStats, merge_stats
from hybridengine.algorithms.losses.dpo import dpo_loss, sequence_log_probs
from hybridengine.algorithms.masking import response_mask

Pair = tuple[float, float, float, float]
"""Log-probs of chosen and rejected responses under the policy, then under the reference."""

PAIRS: list[Pair] = [
    (-3.0, -4.0, -3.5, -3.75),
    (-9.0, -2.0, -8.0, -2.5),
    (-5.0, -5.0, -5.0, -5.0),
    (0.0, -1.0, 0.0, -2.0),
]
KEEP = [True, True, False, True]


def _columns(pairs: list[Pair], keep: list[bool] | None = None) -> list[torch.Tensor]:
    """Return four columns that require gradients; entries of pairs that do not count are NaN."""
    columns = torch.tensor(pairs, dtype=torch.float64).reshape(-1, 4).T.clone()
    if keep is not None:
        columns[:, [not kept for kept in keep]] = math.nan
    return [column.requires_grad_() for column in columns]


def _expected(pairs: list[Pair], beta: float, smoothing: float) -> dict[str, float]:
    sums = dict.fromkeys(("loss", "accuracy", "margin", "chosen_reward", "rejected_reward"), 0.0)
    for chosen, rejected, ref_chosen, ref_rejected in pairs:
        margin = beta * ((chosen - ref_chosen) - (rejected - ref_rejected))
        sigmoid = 1 / (1 + math.exp(-margin))
        sums["loss"] -= (1 - smoothing) * math.log(sigmoid) + smoothing * math.log(1 - sigmoid)
        sums["accuracy"] += margin > 0
        sums["margin"] += margin
        sums["chosen_reward"] += beta * (chosen - ref_chosen)
        sums["rejected_reward"] += beta * (rejected - ref_rejected)
    return {f"actor/dpo_{name}": value / max(len(pairs), 1) for name, value in sums.items()}


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("beta", [0.1, 2.0])
@pytest.mark.parametrize("keep", [None, KEEP])
def test_value_and_statistics(beta: float, smoothing: float, keep: list[bool] | None) -> None:
    kept = [pair for pair, counts in zip(PAIRS, keep or [True] * 4, strict=True) if counts]
    keep_N = None if keep is None else torch.tensor(keep)
    loss = dpo_loss(*_columns(PAIRS, keep), beta, smoothing, keep_N)  # type: ignore[misc]
    expected = _expected(kept, beta, smoothing)
    assert loss.loss_sum.item() / len(kept) == pytest.approx(expected["actor/dpo_loss"], rel=1e-12)
    assert loss.stats.metrics(num_tokens=1000) == pytest.approx(expected, rel=1e-12)
    assert not any(value.requires_grad for value in loss.stats.sums.values())


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_gradient_against_autograd_of_the_plain_formula(smoothing: float) -> None:
    """log sigmoid is written out, pair by pair; pairs that do not count get a gradient of exactly 0."""
    columns = _columns(PAIRS, KEEP)
    dpo_loss(*columns, 0.5, smoothing, torch.tensor(KEEP)).loss_sum.backward()  # type: ignore[misc]
    assert columns[2].grad is None
    assert columns[3].grad is None
    for number, (chosen, rejected, ref_chosen, ref_rejected) in enumerate(PAIRS):
        leaves = [
            torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in (chosen, rejected)
        ]
        margin = 0.5 * ((leaves[0] - ref_chosen) - (leaves[1] - ref_rejected))
        plain = (1 - smoothing) * torch.log(1 + torch.exp(-margin)) + smoothing * torch.log(
            1 + torch.exp(margin)
        )
        exact = torch.autograd.grad(plain, leaves) if KEEP[number] else (torch.zeros(()), torch.zeros(()))
        for column, gradient in zip(columns[:2], exact, strict=True):
            assert column.grad is not None
            assert column.grad[number].item() == pytest.approx(gradient.item(), rel=1e-12, abs=0)


def test_at_the_reference_the_loss_is_log_2_and_pulls_with_half_of_beta() -> None:
    columns = _columns([(-4.0, -7.0, -4.0, -7.0)])
    loss = dpo_loss(*columns, beta=0.3)  # type: ignore[misc]
    loss.loss_sum.backward()
    assert loss.loss_sum.item() == pytest.approx(math.log(2), rel=1e-12)
    assert [column.grad.item() for column in columns[:2] if column.grad is not None] == pytest.approx(
        [-0.15, 0.15]
    )
    assert loss.stats.metrics(1)["actor/dpo_accuracy"] == 0.0


def test_all_pairs_dropped_or_none_at_all() -> None:
    for pairs, keep in ((PAIRS, [False] * 4), ([], [])):
        columns = _columns(pairs, keep)
        loss = dpo_loss(*columns, 0.1, 0.0, torch.tensor(keep, dtype=torch.bool))  # type: ignore[misc]
        loss.loss_sum.backward()
        assert loss.loss_sum.item() == 0.0
        assert columns[0].grad is not None
        assert columns[0].grad.tolist() == [0.0] * len(pairs)
        assert set(loss.stats.metrics(1).values()) == {0.0}


def test_statistics_survive_an_in_place_division_of_the_loss() -> None:
    """Megatron's schedule divides the given loss in place."""
    loss = dpo_loss(*_columns(PAIRS), 0.1)  # type: ignore[misc]
    before = loss.stats.metrics(0)
    loss.loss_sum.div_(1000)
    assert loss.stats.metrics(0) == before


def test_far_margins_stay_finite() -> None:
    columns = _columns([(-1e5, 0.0, 0.0, -1e5), (0.0, -1e5, -1e5, 0.0)])
    loss = dpo_loss(*columns, 1.0)  # type: ignore[misc]
    loss.loss_sum.backward()
    assert loss.loss_sum.item() == pytest.approx(2e5, rel=1e-12)
    assert columns[0].grad is not None
    assert columns[0].grad.tolist() == [-1.0, 0.0]


log_probs = st.floats(-20, 0, width=32)


@given(
    drawn=st.lists(
        st.tuples(st.tuples(log_probs, log_probs, log_probs, log_probs), st.booleans(), st.integers(0, 2)),
        min_size=1,
        max_size=8,
    )
)
@settings(deadline=None, max_examples=25)
def test_pairs_cut_into_micro_batches_add_up(drawn: list[tuple[Pair, bool, int]]) -> None:
    pairs, keep = [pair for pair, _, _ in drawn], [kept for _, kept, _ in drawn]
    columns, keep_N = _columns(pairs, keep), torch.tensor(keep)
    parts: list[LossStats] = []
    for micro in range(3):
        part = [number for number, (_, _, owner) in enumerate(drawn) if owner == micro]
        loss = dpo_loss(*(column[part] for column in columns), 0.2, 0.05, keep_N[part])  # type: ignore[misc]
        loss.loss_sum.backward()
        parts.append(loss.stats)
    kept = [pair for pair, counts in zip(pairs, keep, strict=True) if counts]
    assert merge_stats(parts).metrics(0) == pytest.approx(_expected(kept, 0.2, 0.05), rel=1e-6, abs=1e-6)
    gradients = columns[0].grad
    assert gradients is not None
    whole = _columns(pairs, keep)
    dpo_loss(*whole, 0.2, 0.05, keep_N).loss_sum.backward()  # type: ignore[misc]
    assert whole[0].grad is not None
    torch.testing.assert_close(gradients, whole[0].grad, rtol=1e-6, atol=1e-12)


def test_sequence_log_probs_are_sums_over_valid_tokens() -> None:
    mask_BR = response_mask(torch.tensor([2, 0, 3]), 3)
    log_probs_BR = torch.tensor(
        [[-1.0, -0.5, math.nan], [math.nan] * 3, [-2.0, -0.25, -4.0]], requires_grad=True
    )
    sums_B = sequence_log_probs(log_probs_BR, mask_BR)
    assert sums_B.tolist() == [-1.5, 0.0, -6.25]
    sums_B.sum().backward()
    assert log_probs_BR.grad is not None
    assert log_probs_BR.grad.tolist() == mask_BR.float().tolist()


def test_arguments_that_make_no_sense_are_refused() -> None:
    with pytest.raises(AssertionError, match=r"label_smoothing=0\.5 must be at least 0 and below 0\.5"):
        dpo_loss(*_columns(PAIRS), 0.1, 0.5)  # type: ignore[misc]
    with pytest.raises(AssertionError, match=r"one entry for each of 4 rows.*rejected_log_probs_N.*\(4, 1\)"):
        dpo_loss(torch.zeros(4), torch.zeros(4, 1), torch.zeros(4), torch.zeros(4), 0.1)

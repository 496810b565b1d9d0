"""The value loss, the entropy bonus, and common properties of all losses over tokens."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from hybridengine.algorithms.losses.aggregation import Aggregation, LossStats, SummedLoss
from hybridengine.algorithms.losses.policy import entropy_bonus, kl_loss, policy_loss
from hybridengine.algorithms.losses.value import value_loss
from hybridengine.algorithms.masking import response_mask

LENGTHS = [5, 0, 1, 3, 4, 2]
WIDTH = 5
MASK_BR = response_mask(torch.tensor(LENGTHS), WIDTH)


def _column(seed: int, scale: float = 1.0, garbage: float = math.nan) -> torch.Tensor:
    """Return random float64 [B, R]; masked entries contain `garbage`."""
    generator = torch.Generator().manual_seed(seed)
    values_BR = torch.randn(MASK_BR.shape, dtype=torch.float64, generator=generator) * scale
    return values_BR.masked_fill(~MASK_BR, garbage)


def _valid(*columns: torch.Tensor) -> list[tuple[float, ...]]:
    """Return the valid tokens in order, one tuple of Python floats each."""
    places = [(b, j) for b, length in enumerate(LENGTHS) for j in range(length)]
    return [tuple(column[b, j].item() for column in columns) for b, j in places]


def _check(stats: LossStats, expected_sums: dict[str, float], expected_maxima: dict[str, float]) -> None:
    assert {name: total.item() for name, total in stats.sums.items()} == pytest.approx(
        expected_sums, rel=1e-9
    )
    assert {name: v.item() for name, v in stats.maxima.items()} == pytest.approx(expected_maxima, rel=1e-9)
    assert not any(total.requires_grad for total in [*stats.sums.values(), *stats.maxima.values()])


@pytest.mark.parametrize("clip_value", [0.2, 1.0, None])
def test_value_loss_value_stats_and_gradient(clip_value: float | None) -> None:
    old_BR, returns_BR = _column(4), _column(5)
    values_BR = (old_BR + _column(6, scale=0.8)).requires_grad_()
    loss = value_loss(values_BR, old_BR, returns_BR, MASK_BR, clip_value)
    total = clips = squares = 0.0
    gradients = []
    tokens = _valid(values_BR, old_BR, returns_BR)
    for value, old, target in tokens:
        limit = math.inf if clip_value is None else clip_value
        clipped = min(max(value, old - limit), old + limit)
        total += max((value - target) ** 2, (clipped - target) ** 2) / 2
        clips += (clipped - target) ** 2 > (value - target) ** 2
        squares += (value - target) ** 2
        gradients.append(0.0 if (clipped - target) ** 2 > (value - target) ** 2 else value - target)
    assert (clips > 0) == (clip_value is not None)
    assert loss.loss_sum.item() == pytest.approx(total, rel=1e-12)
    sums = {
        "critic/value_loss": total,
        "critic/clip_fraction": clips,
        "critic/squared_error": squares,
        "critic/value_mean": math.fsum(value for value, _, _ in tokens),
        "critic/return_mean": math.fsum(target for _, _, target in tokens),
    }
    _check(loss.stats, sums, {})
    loss.loss_sum.backward()
    assert values_BR.grad is not None
    assert [gradient for (gradient,) in _valid(values_BR.grad)] == pytest.approx(gradients, rel=1e-12)
    assert not values_BR.grad[~MASK_BR].any()


def test_value_clip_fraction_counts_no_rounding_noise() -> None:
    """Inside the range the clipped value is the value itself, so float32 counts nothing as clipped."""
    generator = torch.Generator().manual_seed(8)
    old_BR, values_BR, returns_BR = 0.19 * torch.rand(3, 64, 64, generator=generator)
    loss = value_loss(values_BR, old_BR, returns_BR, torch.ones(64, 64, dtype=torch.bool), clip_value=0.2)
    assert loss.stats.sums["critic/clip_fraction"].item() == 0.0


def test_entropy_bonus_per_sequence_keeps_its_statistic_per_token() -> None:
    entropies_BR = _column(9).abs()
    loss = entropy_bonus(entropies_BR, MASK_BR, 0.01, Aggregation("sequence"))
    rows = [[entropies_BR[b, j].item() for j in range(length)] for b, length in enumerate(LENGTHS)]
    means = [math.fsum(row) / len(row) for row in rows if row]
    assert loss.loss_sum.item() == pytest.approx(-0.01 * math.fsum(means), rel=1e-12)
    _check(loss.stats, {"actor/entropy": math.fsum(value for row in rows for value in row)}, {})


def test_entropy_bonus_lowers_the_loss_by_the_entropy() -> None:
    entropies_BR = _column(9).abs().requires_grad_()
    loss = entropy_bonus(entropies_BR, MASK_BR, coefficient=0.01)
    entropy = math.fsum(value for (value,) in _valid(entropies_BR))
    assert loss.loss_sum.item() == pytest.approx(-0.01 * entropy, rel=1e-12)
    _check(loss.stats, {"actor/entropy": entropy}, {})
    loss.loss_sum.backward()
    assert entropies_BR.grad is not None
    assert entropies_BR.grad.tolist() == (MASK_BR.double() * -0.01).tolist()


def _losses(columns: list[torch.Tensor], mask_BR: torch.Tensor) -> dict[str, SummedLoss]:
    return {
        "policy": policy_loss(columns[0], columns[1], columns[2], mask_BR),
        "value": value_loss(columns[0], columns[1], columns[2], mask_BR),
        "entropy": entropy_bonus(columns[0], mask_BR, 0.1),
        "kl": kl_loss(columns[0], columns[1], mask_BR, 0.1),
        "per sequence": policy_loss(*columns[:3], mask_BR, aggregation=Aggregation("sequence")),  # type: ignore[misc]
    }


@pytest.mark.parametrize("name", ["policy", "value", "entropy", "kl", "per sequence"])
def test_no_valid_token_gives_zero_loss_with_zero_gradient(name: str) -> None:
    columns = [torch.full((2, 3), math.nan) for _ in range(3)]
    columns[0].requires_grad_()
    loss = _losses(columns, torch.zeros(2, 3, dtype=torch.bool))[name]
    assert loss.loss_sum.item() == 0.0
    loss.loss_sum.backward()
    assert columns[0].grad is not None
    assert columns[0].grad.tolist() == [[0.0] * 3] * 2
    assert set(loss.stats.metrics(0).values()) == {0.0}


@pytest.mark.parametrize("name", ["policy", "value", "entropy", "kl", "per sequence"])
def test_statistics_survive_an_in_place_division_of_the_loss(name: str) -> None:
    """Megatron's schedule divides the given loss in place."""
    loss = _losses([_column(1), _column(2), _column(3)], MASK_BR)[name]
    before = {key: total.item() for key, total in loss.stats.sums.items()}
    loss.loss_sum.div_(1000)
    assert {key: total.item() for key, total in loss.stats.sums.items()} == before


@pytest.mark.parametrize("function", [policy_loss, value_loss])
def test_losses_refuse_columns_that_would_broadcast(function: Callable[..., SummedLoss]) -> None:
    with pytest.raises(AssertionError, match=r"\(2, 1\)"):
        function(torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(2, 1), torch.ones(2, 3, dtype=torch.bool))

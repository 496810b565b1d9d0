"""GSPO's and CISPO's losses: values, gradients and statistics compared with the papers' formulas, row by row."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridengine.algorithms.losses.aggregation import Aggregation, SummedLoss
from hybridengine.algorithms.losses.policy import clipped_loss
from hybridengine.algorithms.masking import response_mask
from hybridengine.config.role_sections import ActorSection
from hybridengine.drivers.dataflow import check_functions
from hybridengine.drivers.grpo import Grpo
from hybridengine.importing import import_object

GSPO = "hybridengine.algorithms.losses.policy:gspo_loss"
CISPO = "hybridengine.algorithms.losses.policy:cispo_loss"
LENGTHS = [5, 0, 1, 3, 4, 2]
WIDTH = 5
ROWS = [row for row, length in enumerate(LENGTHS) if length]
# A hole in a response, as left by a token that is too old.
MASK_BR = response_mask(torch.tensor(LENGTHS), WIDTH)
MASK_BR[0, 1] = False
PLACES = [(row, place) for row in ROWS for place in range(WIDTH) if MASK_BR[row, place]]
AGGREGATIONS = [Aggregation("token"), Aggregation("sequence"), Aggregation("sequence_sum", divisor=8.0)]


def _column(seed: int) -> Tensor:
    """Return random float64 [B, R]; masked entries are NaN."""
    generator = torch.Generator().manual_seed(seed)
    values_BR = torch.randn(MASK_BR.shape, dtype=torch.float64, generator=generator)
    return values_BR.masked_fill(~MASK_BR, math.nan)


def _columns(*, equal_advantages: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
    old_BR = -_column(1).abs()
    advantages_BR = _column(3)
    if equal_advantages:
        advantages_BR = torch.linspace(-1, 1.5, len(LENGTHS)).double()[:, None].expand(MASK_BR.shape)
    columns = {"mask": MASK_BR, "log_probs": old_BR, "advantages": advantages_BR, "weights": _column(4).abs()}
    return (old_BR + 1.1 * _column(2)).requires_grad_(), columns


def _loss(
    path: str, new_BR: Tensor, columns: dict[str, Tensor], actor: ActorSection, aggregation: Aggregation
) -> SummedLoss:
    check_functions(Grpo(loss=path))
    return import_object(path)(new_BR, columns, Grpo(loss=path), actor, aggregation)


def _share(aggregation: Aggregation, row: int) -> float:
    shares = {"token": 1.0, "sequence": 1 / int(MASK_BR[row].sum()), "sequence_sum": 1 / 8}
    return shares[aggregation.name]


def _gradients(new_BR: Tensor) -> list[float]:
    assert new_BR.grad is not None
    assert not new_BR.grad[~MASK_BR].any()
    return [new_BR.grad[place].item() for place in PLACES]


@pytest.mark.parametrize("aggregation", AGGREGATIONS, ids=lambda one: one.name)
@pytest.mark.parametrize("dual_clip", [None, 1.05])
def test_gspo_against_a_loop(aggregation: Aggregation, dual_clip: float | None) -> None:
    actor = ActorSection(clip_low=0.2, clip_high=0.15, dual_clip=dual_clip)
    new_BR, columns = _columns()
    loss = _loss(GSPO, new_BR, columns, actor, aggregation)
    loss.loss_sum.backward()
    total, gradients, ratios, counts = 0.0, [], [], {"low": 0, "high": 0, "dual": 0}
    for row in ROWS:
        places = [place for place in range(WIDTH) if MASK_BR[row, place]]
        quotients = [math.exp(new_BR[row, j].item() - columns["log_probs"][row, j].item()) for j in places]
        ratio = math.prod(quotients) ** (1 / len(places))
        clipped = min(max(ratio, 0.8), 1.15)
        for place in places:
            advantage, weight = (columns[name][row, place].item() for name in ("advantages", "weights"))
            gain, slope = ratio * advantage, ratio * advantage
            if clipped * advantage < gain:
                gain, slope = clipped * advantage, 0.0
            if dual_clip is not None and advantage < 0 and gain < dual_clip * advantage:
                gain, slope = dual_clip * advantage, 0.0
                counts["dual"] += 1
            share = weight * _share(aggregation, row)
            total -= gain * share
            gradients.append(-slope * share)
            ratios.append(ratio)
            counts["low"] += advantage < 0 and ratio < 0.8
            counts["high"] += advantage > 0 and ratio > 1.15
    assert loss.loss_sum.item() == pytest.approx(total, rel=1e-12)
    assert _gradients(new_BR) == pytest.approx(gradients, rel=1e-12)
    assert 0.0 in gradients
    assert all(counts[name] for name in ("low", "high"))
    assert (counts["dual"] > 0) == (dual_clip is not None)
    metrics = loss.stats.metrics(len(PLACES))
    assert metrics["actor/policy_loss"] == pytest.approx(total / int(aggregation.count(MASK_BR)))
    assert metrics["actor/clip_low_fraction"] == pytest.approx(counts["low"] / len(PLACES))
    assert metrics["actor/clip_high_fraction"] == pytest.approx(counts["high"] / len(PLACES))
    assert metrics["actor/ratio_mean"] == pytest.approx(math.fsum(ratios) / len(ratios))
    assert metrics["actor/ratio_max"] == pytest.approx(max(ratios))


def test_gspo_as_published() -> None:
    """The gradient of the mean over sequences of min(s·A, clip(s)·A), by autograd of the geometric mean s itself."""
    actor = ActorSection(clip_low=0.2, clip_high=0.15)
    new_BR, columns = _columns(equal_advantages=True)
    del columns["weights"]
    loss = _loss(GSPO, new_BR, columns, actor, Aggregation("sequence"))
    loss.loss_sum.backward()
    plain_BR = new_BR.detach().clone().requires_grad_()
    objective = torch.zeros((), dtype=torch.float64)
    for row in ROWS:
        mask_R = MASK_BR[row]
        ratio = (plain_BR[row][mask_R] - columns["log_probs"][row][mask_R]).mean().exp()
        advantage = columns["advantages"][row, 0]
        objective = objective + torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.15) * advantage)
    (-objective).backward()
    assert loss.loss_sum.item() == pytest.approx(-objective.item(), rel=1e-12)
    assert plain_BR.grad is not None
    assert _gradients(new_BR) == pytest.approx([plain_BR.grad[place].item() for place in PLACES], rel=1e-12)


@pytest.mark.parametrize("aggregation", AGGREGATIONS, ids=lambda one: one.name)
@pytest.mark.parametrize("clip_low", [0.2, 1.0])
def test_cispo_against_a_loop(aggregation: Aggregation, clip_low: float) -> None:
    """Every token has the gradient of its own log p, times a bounded weight."""
    actor = ActorSection(clip_low=clip_low, clip_high=0.3)
    new_BR, columns = _columns()
    loss = _loss(CISPO, new_BR, columns, actor, aggregation)
    loss.loss_sum.backward()
    total, gradients, counts = 0.0, [], {"low": 0, "high": 0}
    for row, place in PLACES:
        new, old, advantage, weight = (
            column[row, place].item()
            for column in (new_BR, *(columns[name] for name in ("log_probs", "advantages", "weights")))
        )
        ratio = math.exp(new) / math.exp(old)
        share = min(max(ratio, 1 - clip_low), 1.3) * advantage * weight * _share(aggregation, row)
        total -= share * new
        gradients.append(-share)
        counts["low"] += ratio < 1 - clip_low
        counts["high"] += ratio > 1.3
    assert loss.loss_sum.item() == pytest.approx(total, rel=1e-12)
    assert _gradients(new_BR) == pytest.approx(gradients, rel=1e-12)
    assert counts["high"] > 0
    assert (counts["low"] > 0) == (clip_low < 1)
    metrics = loss.stats.metrics(len(PLACES))
    assert metrics["actor/policy_loss"] == pytest.approx(total / int(aggregation.count(MASK_BR)))
    expected = {f"actor/clip_{end}_fraction": count / len(PLACES) for end, count in counts.items()}
    assert metrics.items() >= expected.items()
    assert metrics["actor/clip_fraction"] == pytest.approx(sum(expected.values()))


@pytest.mark.parametrize("path", [GSPO, CISPO])
def test_losses_have_the_same_metrics_as_ppo_and_no_gradient_of_constants(path: str) -> None:
    new_BR, columns = _columns()
    constants: list[Any] = [column.requires_grad_() for name, column in columns.items() if name != "mask"]
    loss = _loss(path, new_BR, columns, ActorSection(), Aggregation())
    loss.loss_sum.backward()
    assert all(constant.grad is None for constant in constants)
    plain = clipped_loss(new_BR, columns, Grpo(), ActorSection(), Aggregation())
    assert loss.stats.metrics(1).keys() == plain.stats.metrics(1).keys()
    assert loss.loss_sum.item() != plain.loss_sum.item()

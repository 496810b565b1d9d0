"""SAPO's and GPG's losses: values, gradients and statistics compared with the papers' formulas, token by token."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hybridengine.algorithms.losses.aggregation import Aggregation
from hybridengine.algorithms.losses.policy import clipped_loss
from hybridengine.algorithms.losses.unclipped import gpg_loss, sapo_loss
from hybridengine.config.loss_sections import SapoSection
from hybridengine.config.role_sections import ActorSection
from hybridengine.drivers.grpo import Grpo
from tests.unit.test_algorithms_gspo_cispo import AGGREGATIONS, MASK_BR, PLACES, _columns, _gradients, _share

Formula = Callable[[float, float, float], float]
"""Gain of a token from its log-prob, its old log-prob and its advantage."""


def sapo(new: float, old: float, advantage: float) -> float:
    """Return f(r)·A with the gate of SAPO's paper at tau_pos = 0.8 and tau_neg = 1.3."""
    tau = 0.8 if advantage > 0 else 1.3
    return advantage * 4 / tau / (1 + math.exp(-tau * (math.exp(new - old) - 1)))


def gpg(new: float, old: float, advantage: float) -> float:
    return new * advantage


GATES = SapoSection(positive_temperature=0.8, negative_temperature=1.3)
LOSSES: dict[str, tuple[Any, Formula]] = {"sapo": (sapo_loss, sapo), "gpg": (gpg_loss, gpg)}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("aggregation", AGGREGATIONS, ids=lambda one: one.name)
@pytest.mark.parametrize("weighted", [True, False])
def test_against_a_loop(name: str, aggregation: Aggregation, weighted: bool) -> None:
    """Gradients are central differences of the formula; row 0 has a hole, masked entries are NaN."""
    loss_function, gain = LOSSES[name]
    new_BR, columns = _columns()
    if not weighted:
        del columns["weights"]
    loss = loss_function(new_BR, columns, Grpo(sapo=GATES), ActorSection(), aggregation)
    loss.loss_sum.backward()
    total, gradients, ratios = 0.0, [], []
    for row, place in PLACES:
        new, old, advantage = (
            column[row, place].item() for column in (new_BR, columns["log_probs"], columns["advantages"])
        )
        share = _share(aggregation, row) * (columns["weights"][row, place].item() if weighted else 1.0)
        total -= gain(new, old, advantage) * share
        step = 1e-5
        slope = (gain(new + step, old, advantage) - gain(new - step, old, advantage)) / (2 * step)
        gradients.append(-slope * share)
        ratios.append(math.exp(new - old))
    assert loss.loss_sum.item() == pytest.approx(total, rel=1e-12)
    assert _gradients(new_BR) == pytest.approx(gradients, rel=1e-7, abs=1e-9)
    metrics = loss.stats.metrics(len(PLACES))
    assert metrics["actor/policy_loss"] == pytest.approx(total / int(aggregation.count(MASK_BR)))
    assert metrics["actor/ratio_mean"] == pytest.approx(math.fsum(ratios) / len(ratios))
    assert metrics["actor/ratio_max"] == pytest.approx(max(ratios))


def test_on_policy_both_have_the_gradient_of_the_clipped_loss() -> None:
    """At r = 1 each is the policy gradient, -A·grad log pi."""
    gradients = []
    for function in (sapo_loss, gpg_loss, clipped_loss):
        _, columns = _columns()
        new_BR = columns["log_probs"].clone().requires_grad_()
        loss = function(new_BR, columns, Grpo(sapo=GATES), ActorSection(), Aggregation())
        loss.loss_sum.backward()
        gradients.append(_gradients(new_BR))
    assert gradients[0] == pytest.approx(gradients[2], rel=1e-12)
    assert gradients[1] == pytest.approx(gradients[2], rel=1e-12)


@pytest.mark.parametrize("name", LOSSES)
def test_constants_have_no_gradient_and_no_clip_is_reported(name: str) -> None:
    new_BR, columns = _columns()
    constants = [column.requires_grad_() for key, column in columns.items() if key != "mask"]
    loss = LOSSES[name][0](new_BR, columns, Grpo(), ActorSection(), Aggregation())
    loss.loss_sum.backward()
    assert all(constant.grad is None for constant in constants)
    plain = clipped_loss(new_BR, columns, Grpo(), ActorSection(), Aggregation()).stats.metrics(1)
    assert loss.stats.metrics(1).keys() == {metric for metric in plain if "clip" not in metric}


def test_sapo_of_extreme_ratios_is_finite() -> None:
    new_BR = torch.tensor([[-100.0, 100.0]], requires_grad=True)
    columns = {
        "mask": torch.ones(1, 2, dtype=torch.bool),
        "log_probs": torch.zeros(1, 2),
        "advantages": torch.tensor([[1.0, -1.0]]),
    }
    loss = sapo_loss(new_BR, columns, Grpo(sapo=GATES), ActorSection(), Aggregation())
    loss.loss_sum.backward()
    # The gates end at 4/tau·sigmoid(-tau) below and at 4/tau above.
    assert loss.loss_sum.item() == pytest.approx(4 / 1.3 - 4 / 0.8 / (1 + math.exp(0.8)), rel=1e-6)
    assert new_BR.grad is not None
    assert new_BR.grad.tolist() == [[0.0, 0.0]]

"""KL as a loss term: values compared with loops over Python floats, gradients with autograd and exact expectations."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import get_args

import pytest
import torch

from hybridengine.algorithms.losses.aggregation import PER_TOKEN, Aggregation
from hybridengine.algorithms.losses.policy import kl_loss
from hybridengine.algorithms.masking import response_mask
from hybridengine.config.role_sections import ActorSection

LENGTHS = [4, 0, 1, 2]
MASK_BR = response_mask(torch.tensor(LENGTHS), 4)
PLACES = [(b, j) for b, length in enumerate(LENGTHS) for j in range(length)]
VALUES: dict[str, Callable[[float], float]] = {
    "k1": lambda d: d,
    "k2": lambda d: d * d / 2,
    "k3": lambda d: math.exp(-d) + d - 1,
    "abs": abs,
}
SLOPES: dict[str, Callable[[float], float]] = {
    "k1": lambda d: 1.0,
    "k2": lambda d: d,
    "k3": lambda d: 1 - math.exp(-d),
    "abs": lambda d: math.copysign(1.0, d),
}
for straight_through in ("k1", "k3", "abs"):  # their value, with the gradient of k2
    VALUES[f"{straight_through}+"] = VALUES[straight_through]
    SLOPES[f"{straight_through}+"] = SLOPES["k2"]


def test_these_are_the_estimators_of_a_configuration() -> None:
    assert set(get_args(ActorSection.model_fields["kl_loss_estimator"].annotation)) == set(VALUES)


def _columns() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    new_BR, ref_BR = torch.randn(2, 4, 4, dtype=torch.float64, generator=generator)
    new_BR, ref_BR = (column_BR.masked_fill(~MASK_BR, math.nan) for column_BR in (new_BR, ref_BR))
    return new_BR.requires_grad_(), ref_BR.requires_grad_()


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize(
    "aggregation",
    [PER_TOKEN, Aggregation("sequence"), Aggregation("sequence_sum", divisor=3.0)],
    ids=lambda a: a.name,
)
def test_value_statistic_and_gradient(name: str, aggregation: Aggregation) -> None:
    new_BR, ref_BR = _columns()
    loss = kl_loss(new_BR, ref_BR, MASK_BR, 0.3, name, aggregation)
    total = value = 0.0
    gradients = []
    for b, j in PLACES:
        share = {"token": 1.0, "sequence": 1 / LENGTHS[b], "sequence_sum": 1 / 3.0}[aggregation.name]
        d = new_BR[b, j].item() - ref_BR[b, j].item()
        value += VALUES[name](d)
        total += 0.3 * share * VALUES[name](d)
        gradients.append(0.3 * share * SLOPES[name](d))
    assert loss.loss_sum.item() == pytest.approx(total, rel=1e-12)
    assert loss.stats.metrics(len(PLACES)) == pytest.approx({"actor/kl_loss": value / len(PLACES)}, rel=1e-12)
    loss.loss_sum.backward()
    assert ref_BR.grad is None
    assert new_BR.grad is not None
    assert [new_BR.grad[place].item() for place in PLACES] == pytest.approx(gradients, rel=1e-12)
    assert not new_BR.grad[~MASK_BR].any()


@pytest.mark.parametrize("name", VALUES)
def test_no_valid_token_gives_zero_loss_with_zero_gradient(name: str) -> None:
    new_BR = torch.full((2, 3), math.nan, requires_grad=True)
    loss = kl_loss(new_BR, new_BR.detach(), torch.zeros(2, 3, dtype=torch.bool), 1.0, name)
    loss.loss_sum.backward()
    assert loss.loss_sum.item() == 0.0
    assert new_BR.grad is not None
    assert new_BR.grad.tolist() == [[0.0] * 3] * 2
    assert loss.stats.metrics(0) == {"actor/kl_loss": 0.0}


@pytest.mark.parametrize("name", VALUES)
def test_what_the_expected_gradient_is(name: str) -> None:
    """The docstring's table: every token of a vocabulary of 4 occurs once, weighted by its probability under pi."""
    logits = torch.tensor([0.3, -0.2, 0.9, 0.0], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([0.1, 0.6, -0.4, -1.0], dtype=torch.float64).log_softmax(0)
    policy = logits.log_softmax(0)
    divergences = {
        "k1": 0.0 * policy.sum(),
        "k2": (policy.exp() * (policy - ref)).sum(),
        "k3": (ref.exp() * (ref - policy)).sum(),
        "abs": (policy.exp() - ref.exp()).abs().sum(),
    }
    divergences |= {f"{estimator}+": divergences["k2"] for estimator in ("k1", "k3", "abs")}
    (exact,) = torch.autograd.grad(divergences[name], logits, retain_graph=True)
    expected = torch.zeros_like(logits)
    for token, probability in enumerate(policy.exp().tolist()):
        loss = kl_loss(
            policy[token].reshape(1, 1),
            ref[token].reshape(1, 1),
            torch.ones(1, 1, dtype=torch.bool),
            1.0,
            name,
        )
        (gradient,) = torch.autograd.grad(loss.loss_sum, logits, retain_graph=True)
        expected += probability * gradient
    assert expected.tolist() == pytest.approx(exact.tolist(), rel=1e-10, abs=1e-14)


def test_columns_of_different_shapes_are_refused() -> None:
    mask_BR = torch.ones(1, 1, dtype=torch.bool)
    with pytest.raises(AssertionError, match=r"ref_log_probs_BR.*\(1, 2\)"):
        kl_loss(torch.zeros(1, 1), torch.zeros(1, 2), mask_BR, 1.0)

"""KL estimators: golden values, and their expectations over a distribution."""

from __future__ import annotations

import math

import pytest
import torch

from hybridengine.algorithms.kl import KL_ESTIMATORS, absolute, k1, k2, k3

DIFFERENCES = [-3.0, -0.5, 0.0, 1e-4, 0.7, 4.0]


@pytest.mark.parametrize("difference", DIFFERENCES)
def test_formulas(difference: float) -> None:
    log_probs = torch.tensor([-1.25 + difference], dtype=torch.float64)
    ref_log_probs = torch.tensor([-1.25], dtype=torch.float64)
    d = (-1.25 + difference) - -1.25
    assert k1(log_probs, ref_log_probs).item() == d
    assert absolute(log_probs, ref_log_probs).item() == abs(d)
    assert k2(log_probs, ref_log_probs).item() == pytest.approx(d**2 / 2, rel=1e-13)
    assert k3(log_probs, ref_log_probs).item() == pytest.approx(math.exp(-d) + d - 1, rel=1e-6, abs=1e-15)


def test_expectations_over_a_distribution() -> None:
    """k1 and k3 are unbiased: their exact expectations under pi are KL(pi || pi_ref); that of k2 differs."""
    pi, ref = [0.5, 0.3, 0.2], [0.2, 0.2, 0.6]
    exact = sum(p * math.log(p / q) for p, q in zip(pi, ref, strict=True))
    weights, reference = torch.tensor(pi, dtype=torch.float64), torch.tensor(ref, dtype=torch.float64)
    expectation = {
        name: (weights * estimate(weights.log(), reference.log())).sum().item()
        for name, estimate in KL_ESTIMATORS.items()
    }
    assert expectation["k1"] == pytest.approx(exact, rel=1e-12)
    assert expectation["k3"] == pytest.approx(exact, rel=1e-12)
    assert expectation["k2"] == pytest.approx(
        sum(p * math.log(p / q) ** 2 / 2 for p, q in zip(pi, ref, strict=True)), rel=1e-12
    )


def test_k3_keeps_its_digits_in_float32() -> None:
    """At D = 2^-13, exp(-D) - 1 + D in float32 has no correct digit; the exact value is about D^2/2."""
    difference = 2.0**-13
    value = k3(torch.tensor([difference]), torch.zeros(1)).item()
    assert value == pytest.approx(math.expm1(-difference) + difference, rel=1e-2)
    assert value > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_k3_goes_on_along_its_tangent_beyond_e_to_the_20(dtype: torch.dtype) -> None:
    """At D = -500, exp(-D) overflows float32; value and slope at 20 are known in closed form."""
    log_probs = torch.tensor([-500.0, -25.0, -20.0, -19.0, 500.0], dtype=dtype, requires_grad=True)
    values = k3(log_probs, torch.zeros(5, dtype=dtype))
    slope = math.expm1(20.0)
    at_20 = slope - 20.0
    expected = [
        at_20 + slope * 480,
        at_20 + slope * 5,
        at_20,
        math.expm1(19.0) - 19.0,
        math.expm1(-500.0) + 500.0,
    ]
    assert values.tolist() == pytest.approx(expected, rel=1e-6)
    values.sum().backward()
    assert log_probs.grad is not None
    gradients = [-slope, -slope, -slope, -math.expm1(19.0), 1.0]
    assert log_probs.grad.tolist() == pytest.approx(gradients, rel=1e-6)


def test_gradient_of_k2_is_that_of_the_kl() -> None:
    """Over samples of pi, the gradient of E[k2] is grad KL(pi || pi_ref): the sum over tokens of pi·D·grad log pi."""
    logits = torch.tensor([0.3, -0.2, 0.9], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.1, 0.6, -0.4], dtype=torch.float64).log_softmax(0)
    log_probs = logits.log_softmax(0)
    (log_probs.exp() * (log_probs - reference)).sum().backward()
    assert logits.grad is not None
    exact = logits.grad.clone()
    log_probs = logits.log_softmax(0)
    (gradient,) = torch.autograd.grad((log_probs.exp().detach() * k2(log_probs, reference)).sum(), logits)
    assert gradient.tolist() == pytest.approx(exact.tolist(), rel=1e-12)

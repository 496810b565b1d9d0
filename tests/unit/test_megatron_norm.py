"""The norm against torch's own in float64, its gradients against autograd of the plain formula."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridengine.backends.megatron.norm import RootMeanSquareNorm


def plain(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


@settings(deadline=None, max_examples=60)
@given(
    shape=st.lists(st.integers(1, 5), min_size=0, max_size=3),
    size=st.sampled_from([1, 2, 32, 193]),
    scale=st.sampled_from([0.0, 1e-4, 1.0, 1e4]),
    eps=st.sampled_from([1e-6, 1e-2]),
    seed=st.integers(0, 100),
)
def test_values_and_gradients(shape: list[int], size: int, scale: float, eps: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = scale * torch.randn(*shape, size, generator=generator)
    gradient = torch.randn(*shape, size, generator=generator)
    norm = RootMeanSquareNorm(None, size, eps)
    with torch.no_grad():
        norm.weight.normal_(generator=generator)
    x.requires_grad_()
    found = norm(x)
    found.backward(gradient)
    exact_x = x.detach().double().requires_grad_()
    exact_weight = norm.weight.detach().double().requires_grad_()
    expected = plain(exact_x, exact_weight, eps)
    expected.backward(gradient.double())
    assert x.grad is not None and exact_x.grad is not None
    assert norm.weight.grad is not None and exact_weight.grad is not None
    # The gradient of x is a difference and that of the weight a sum: they are as exact as what they are made of.
    subtracted = exact_weight * gradient / torch.sqrt((exact_x**2).mean(-1, keepdim=True) + eps)
    summed = (gradient * plain(exact_x, torch.ones(size), eps)).abs().reshape(-1, size).sum(0)
    for one, other, size_of in (
        (found, expected, expected),
        (x.grad, exact_x.grad, subtracted),
        (norm.weight.grad, exact_weight.grad, summed),
    ):
        largest = float(size_of.detach().abs().max())
        assert torch.allclose(one.double(), other, rtol=1e-5, atol=2e-6 * largest)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_types_are_torchs_own(dtype: torch.dtype) -> None:
    x = torch.randn(3, 64, dtype=dtype)
    norm = RootMeanSquareNorm(None, 64, 1e-6).to(dtype)
    assert torch.equal(norm(x), torch.nn.functional.rms_norm(x, (64,), norm.weight, 1e-6))

"""Response masks, and statistics over valid tokens, which ignore masked values, even NaN.

Shape suffixes: B sequences, R response tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridengine.algorithms.across import ONE_PROCESS, Across

WHITEN_EPSILON = 1e-8
"""Constant added to the variance, so that equal values become 0 instead of NaN."""


def response_mask(response_lengths_B: Tensor, max_response_tokens: int) -> Tensor:
    """Return a mask, bool [B, R], of each response's tokens: its length, in [0, R], includes the EOS token."""
    if response_lengths_B.numel():
        shortest, longest = (int(bound) for bound in response_lengths_B.aminmax())
        within = shortest >= 0 and longest <= max_response_tokens
        assert within, f"response lengths {shortest} to {longest} must lie in 0 to {max_response_tokens}"
    positions_R = torch.arange(max_response_tokens, device=response_lengths_B.device)
    return positions_R < response_lengths_B[:, None]


def zero_masked(values_BR: Tensor, mask_BR: Tensor) -> Tensor:
    """Return `values_BR` with zeros, and zero gradients if it precedes a non-linear function, at masked entries."""
    return torch.where(mask_BR, values_BR, torch.zeros((), dtype=values_BR.dtype, device=values_BR.device))


def over_tokens(values_B: Tensor, mask_BR: Tensor) -> Tensor:
    """Return each row's value at all of its valid tokens, and 0 at masked entries. Shapes: [B], [B, R] -> [B, R]."""
    check_rows(mask_BR.size(0), values_B=values_B)
    return zero_masked(values_B[:, None].expand(mask_BR.shape), mask_BR)


def masked_sum(values_BR: Tensor, mask_BR: Tensor) -> Tensor:
    """Return the sum over the valid tokens of the batch; 0 if there are none. Shapes: [B, R] -> []."""
    return zero_masked(values_BR, mask_BR).sum()


def masked_max(values_BR: Tensor, mask_BR: Tensor) -> Tensor:
    """Return the largest value at a valid token; 0 if there are none. Shapes: [B, R] -> []."""
    nothing = values_BR.new_zeros(())
    if values_BR.numel() == 0:
        return nothing
    return torch.where(mask_BR.any(), values_BR.masked_fill(~mask_BR, -torch.inf).amax(), nothing)


def whiten(values_BR: Tensor, mask_BR: Tensor, across: Across = ONE_PROCESS) -> Tensor:
    """Return the values scaled to variance 1 and shifted to mean 0 over the valid tokens.

    The statistics cover the rows of all ranks. The population variance is used: a single valid token gives 0.

    Shapes: [B, R] -> [B, R], 0 at masked entries.
    Source: advantage normalisation of PPO as in OpenAI baselines, ppo2.
    """
    check_shapes(values_BR=values_BR, mask_BR=mask_BR)
    # In float64, so that the result does not depend on the distribution of rows over ranks.
    exact_BR = values_BR.double()
    count = across.sum(mask_BR.sum()).clamp(min=1)
    mean = across.sum(masked_sum(exact_BR, mask_BR)) / count
    variance = across.sum(masked_sum((exact_BR - mean).square(), mask_BR)) / count
    whitened_BR = (exact_BR - mean) * torch.rsqrt(variance + WHITEN_EPSILON)
    return zero_masked(whitened_BR, mask_BR).to(values_BR.dtype)


def check_shapes(**tensors: Tensor) -> None:
    """Assert that all tensors are [B, R] of equal size: broadcasting would hide a mismatch."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    agree = len(set(shapes.values())) <= 1 and all(len(shape) == 2 for shape in shapes.values())
    assert agree, f"expected [B, R] tensors of one shape, got {shapes}"
    for name, tensor in tensors.items():
        assert name != "mask_BR" or tensor.dtype == torch.bool, f"mask_BR must be bool, got {tensor.dtype}"


def check_rows(num_rows: int, **columns: Tensor) -> None:
    """Assert that all tensors are [B], one entry per row."""
    shapes = {name: tuple(column.shape) for name, column in columns.items()}
    assert all(shape == (num_rows,) for shape in shapes.values()), (
        f"expected one entry for each of {num_rows} rows, got {shapes}"
    )

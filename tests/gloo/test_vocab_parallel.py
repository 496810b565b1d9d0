"""Log-probabilities, entropies and gradients on a sharded vocabulary, compared with float64 autograd on the whole one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hybridengine.backends.megatron.outputs import vocab_parallel_log_probs
from hybridengine.topology.grid import Grid
from hybridengine.topology.sizes import TrainSizes
from hybridengine.weights.process_groups import ProcessGroups
from tests.gloo.ranks import RankLauncher

VOCAB, PADDED = 131, 192
"""Vocabulary sizes: at t = 4 the third shard is partly padding and the fourth entirely."""
SIZES = ("1-1-4", "1-2-2", "1-4-1")
TEMPERATURES = (1.0, 0.7)


def make_case(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return logits [B, T, padded vocabulary] with garbage as padding, targets, gradients of log-probs and entropies."""
    generator = torch.Generator().manual_seed(0)
    logits = 4.0 * torch.randn(3, 5, PADDED, generator=generator)
    logits[..., VOCAB:] = 50.0
    logits[0, 0, 7] = (
        90.0  # nearly all probability on one token: exponentials overflow without a common maximum
    )
    targets = torch.randint(0, VOCAB, (3, 5), generator=generator)
    targets[0, :3] = torch.tensor([0, 95, 130])  # first and last rows of shards
    return (
        logits.to(dtype),
        targets,
        torch.randn(3, 5, generator=generator),
        torch.randn(3, 5, generator=generator),
    )


def log_probs_of_own_shard(rank: int, dtype: torch.dtype) -> list[tuple[Tensor, ...]]:
    """Return (log-probs, entropies, gradient of the rank's own shard) for every size and temperature."""
    registry = ProcessGroups()
    results = []
    for sizes in SIZES:
        grid = Grid(TrainSizes.parse(sizes))
        group = registry.of(grid.groups("tp"))
        width = PADDED // grid.sizes.tp_size
        first = grid.coordinate(rank).tp_rank * width
        for temperature in TEMPERATURES:
            logits, targets, grad_log_probs, grad_entropy = make_case(dtype)
            shard = logits[..., first : first + width].clone().requires_grad_()
            log_probs, entropy = vocab_parallel_log_probs(shard, targets, VOCAB, group, temperature)
            torch.autograd.backward([log_probs, entropy], [grad_log_probs, grad_entropy])
            assert shard.grad is not None
            assert shard.grad.dtype == dtype
            assert torch.equal(shard.detach(), logits[..., first : first + width])  # the input is not changed
            results.append((log_probs.detach(), entropy.detach(), shard.grad))
    return results


def expected(dtype: torch.dtype, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    logits, targets, grad_log_probs, grad_entropy = make_case(dtype)
    leaf = logits.double().requires_grad_()
    all_log_probs = (leaf[..., :VOCAB] / temperature).log_softmax(-1)
    log_probs = all_log_probs.gather(-1, targets[..., None])[..., 0]
    entropy = -(all_log_probs.exp() * all_log_probs).sum(-1)
    torch.autograd.backward([log_probs, entropy], [grad_log_probs.double(), grad_entropy.double()])
    assert leaf.grad is not None
    return log_probs.detach(), entropy.detach(), leaf.grad


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 1e-2)])
def test_values_and_gradients_on_every_tensor_parallel_size(
    dtype: torch.dtype, tolerance: float, run_ranks: RankLauncher
):
    by_rank = run_ranks(4, log_probs_of_own_shard, dtype)
    cases = [(sizes, temperature) for sizes in SIZES for temperature in TEMPERATURES]
    for index, (sizes, temperature) in enumerate(cases):
        log_probs, entropy, gradient = expected(dtype, temperature)
        grid = Grid(TrainSizes.parse(sizes))
        for rank, results in enumerate(by_rank):
            own_log_probs, own_entropy, own_gradient = results[index]
            width = PADDED // grid.sizes.tp_size
            first = grid.coordinate(rank).tp_rank * width
            torch.testing.assert_close(own_log_probs.double(), log_probs, atol=2e-5, rtol=1e-5)
            torch.testing.assert_close(own_entropy.double(), entropy, atol=2e-5, rtol=1e-5)
            shard = gradient[..., first : first + width]
            torch.testing.assert_close(own_gradient.double(), shard, atol=tolerance, rtol=tolerance)
            padding = max(0, min(width, VOCAB - first))
            assert not own_gradient[..., padding:].any(), "padding takes no gradient"

"""Log-probs, entropies, squared probabilities, likeliest tokens and gradients on a sharded vocabulary, beside float64
autograd on all of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from hybridengine.algorithms.losses.distillation import divergence
from hybridengine.backends import predictions
from hybridengine.backends.places import Places
from hybridengine.backends.predictions import Predictions
from hybridengine.backends.supports import Supports
from hybridengine.rows.supports import support_columns, support_of, support_row
from hybridengine.topology.grid import Grid
from hybridengine.topology.sizes import TrainSizes
from hybridengine.weights.process_groups import ProcessGroups
from tests.gloo.ranks import RankLauncher

VOCAB, PADDED, HIDDEN, ROWS, POSITIONS = 131, 192, 16, 3, 5
"""At t = 4 the third shard of the vocabulary is partly padding and the fourth entirely."""
SIZES = ("1-1-4", "1-2-2", "1-4-1")
TEMPERATURES = (1.0, 0.7, "by row")
BLOCKS = (1, 2**25)
"""Logits of a block: those of one token, or all."""
NUM_TOP = 50
SHARPENED = 0.7


@dataclass
class Case:
    hidden: Tensor
    weight: Tensor
    targets: Tensor
    temperature: float | Tensor
    grads: tuple[Tensor, Tensor]
    """Gradients of log-probs and entropies."""
    drawable: Tensor | None = None
    """Tokens that could be drawn, bool [ROWS, POSITIONS, VOCAB]."""

    @property
    def supports(self) -> Supports | None:
        """The same as words, as a rank finds them in its rows."""
        if self.drawable is None:
            return None
        rows = [
            support_row([support_of(np.flatnonzero(one), VOCAB) for one in row])
            for row in self.drawable.numpy()
        ]
        return Supports.of_columns(support_columns(rows, [POSITIONS] * ROWS, POSITIONS))


@dataclass
class Found:
    log_probs: Tensor
    entropies: Tensor
    hidden_grad: Tensor
    weight_grad: Tensor
    ids: Tensor
    top_log_probs: Tensor
    squares: Tensor
    """Sums of squared probabilities at the temperature `SHARPENED`."""


def make_case(dtype: torch.dtype, temperature: float | str, restricted: bool = False) -> Case:
    """Return a case with garbage as padding, and one token that has nearly all probability.

    The supports of a `restricted` one have between one token and all of them.
    """
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, POSITIONS, HIDDEN, generator=generator)
    weight = torch.randn(PADDED, HIDDEN, generator=generator)
    weight[VOCAB:] = 50.0
    weight[7] = 90.0 * hidden[0, 0] / hidden[0, 0].square().sum()  # overflows without a common maximum
    targets = torch.randint(0, VOCAB, (ROWS, POSITIONS), generator=generator)
    targets[0, :3] = torch.tensor([0, 95, 130])  # first and last rows of shards
    by_row = torch.tensor([[0.7], [1.0], [1.3]])
    grads = (
        torch.randn(ROWS, POSITIONS, generator=generator),
        torch.randn(ROWS, POSITIONS, generator=generator),
    )
    divisor = by_row if isinstance(temperature, str) else temperature
    drawable = (
        torch.rand(ROWS, POSITIONS, VOCAB, generator=generator)
        < torch.tensor([0, 0.02, 0.5, 0.9, 1])[:, None]
    )
    drawable.scatter_(-1, targets.unsqueeze(-1), True)
    return Case(hidden.to(dtype), weight.to(dtype), targets, divisor, grads, drawable if restricted else None)


def cases(dtype: torch.dtype) -> Iterator[tuple[str, Case, int]]:
    for sizes, temperature, restricted, block in product(SIZES, TEMPERATURES, (False, True), BLOCKS):
        yield sizes, make_case(dtype, temperature, restricted), block


def on_own_shard(rank: int, dtype: torch.dtype) -> list[Found]:
    """Return what this rank finds for every size, temperature and block."""
    registry = ProcessGroups()
    results = []
    for sizes, case, block in cases(dtype):
        grid = Grid(TrainSizes.parse(sizes))
        group = registry.of(grid.groups("tp"))
        width = PADDED // grid.sizes.tp_size
        first = grid.coordinate(rank).tp_rank * width
        predictions.BLOCK_ENTRIES = block
        hidden = case.hidden.clone().requires_grad_()
        weight = case.weight[first : first + width].clone().requires_grad_()
        places = Places.everywhere((ROWS, POSITIONS), registry.of(grid.groups()))
        one = Predictions(hidden.flatten(0, 1), weight, VOCAB, group, places)
        log_probs, entropies = one.log_probs(case.targets, case.temperature, case.supports)
        torch.autograd.backward([log_probs, entropies], [*case.grads])
        assert hidden.grad is not None
        assert weight.grad is not None
        assert weight.grad.dtype == hidden.grad.dtype == dtype
        partial = hidden.grad.double()
        torch.distributed.all_reduce(partial, group=group)
        top, squares = one.most_likely(NUM_TOP), one.squared_probs(SHARPENED, case.supports)
        results.append(Found(log_probs.detach(), entropies.detach(), partial, weight.grad, *top, squares))
    return results


def expected(case: Case) -> Found:
    """Return the values of all logits in float64, rounded as the model's type rounds them."""
    hidden, weight = (one.double().requires_grad_() for one in (case.hidden, case.weight[:VOCAB]))
    exact = hidden @ weight.T
    logits = exact + (exact.detach().to(case.hidden.dtype).double() - exact.detach())
    divisor = (
        case.temperature[..., None].double() if isinstance(case.temperature, Tensor) else case.temperature
    )
    scaled = logits / divisor
    if case.drawable is not None:
        scaled = scaled.masked_fill(~case.drawable, float("-inf"))
    every = scaled.log_softmax(-1)
    log_probs = every.gather(-1, case.targets[..., None])[..., 0]
    entropies = -(every.exp() * every.masked_fill(every == float("-inf"), 0.0)).sum(-1)
    torch.autograd.backward([log_probs, entropies], [one.double() for one in case.grads])
    assert hidden.grad is not None
    assert weight.grad is not None
    top = logits.detach().log_softmax(-1).topk(NUM_TOP)
    outside = torch.zeros(()).bool() if case.drawable is None else ~case.drawable
    drawable = logits.detach().masked_fill(outside, float("-inf"))
    squares = (drawable / SHARPENED).softmax(-1).square().sum(-1)
    return Found(
        log_probs.detach(), entropies.detach(), hidden.grad, weight.grad, top.indices, top.values, squares
    )


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_values_and_gradients_on_every_tensor_parallel_size(
    dtype: torch.dtype, tolerance: float, run_ranks: RankLauncher
):
    by_rank = run_ranks(4, on_own_shard, dtype)
    for index, (sizes, case, _) in enumerate(cases(dtype)):
        right, grid = expected(case), Grid(TrainSizes.parse(sizes))
        for rank, results in enumerate(by_rank):
            found, width = results[index], PADDED // grid.sizes.tp_size
            first = grid.coordinate(rank).tp_rank * width
            for name in ("log_probs", "entropies", "hidden_grad", "top_log_probs", "squares"):
                one, other = getattr(found, name).double(), getattr(right, name)
                torch.testing.assert_close(one, other, atol=2 * tolerance, rtol=tolerance, msg=name)
            own = right.weight_grad[first : first + width]
            torch.testing.assert_close(
                found.weight_grad[: len(own)].double(), own, atol=2 * tolerance, rtol=tolerance
            )
            assert not found.weight_grad[len(own) :].any(), "padding takes no gradient"
            if dtype is torch.float32:  # in bfloat16 tokens have equal logits
                assert torch.equal(found.ids, right.ids)


NUM_OTHERS = 9
"""Tokens of each position whose log-probs are computed together, some of them more than once."""


def others_on_own_shard(rank: int) -> list[tuple[Tensor, ...]]:
    """Return log-probs of several tokens, those of the teacher's likeliest, and gradients, for every size."""
    registry, case, results = ProcessGroups(), make_case(torch.float32, 1.0), []
    for sizes, block in product(SIZES, BLOCKS):
        grid = Grid(TrainSizes.parse(sizes))
        group = registry.of(grid.groups("tp"))
        width = PADDED // grid.sizes.tp_size
        first = grid.coordinate(rank).tp_rank * width
        predictions.BLOCK_ENTRIES = block
        places = Places.everywhere((ROWS, POSITIONS), registry.of(grid.groups()))
        hidden = case.hidden.clone().requires_grad_()
        weight = case.weight[first : first + width].clone().requires_grad_()
        one = Predictions(hidden.flatten(0, 1), weight, VOCAB, group, places)
        ids, teacher = teacher_of(case, VOCAB)
        divergences = divergence(one.log_probs_of(ids, SHARPENED), teacher.float())
        divergences.sum().backward()
        assert hidden.grad is not None and weight.grad is not None
        torch.distributed.all_reduce(hidden.grad, group=group)
        some = one.log_probs_of(ids[..., :NUM_OTHERS] // 2, SHARPENED)
        top = one.most_likely(NUM_TOP, SHARPENED)[1]
        results.append(
            (some.detach(), top, divergences.detach(), hidden.grad, weight.grad[: max(0, VOCAB - first)])
        )
    return results


def teacher_of(case: Case, count: int) -> tuple[Tensor, Tensor]:
    """Return (ids, log-probs in float64) of the most likely tokens of another model at each position."""
    generator = torch.Generator().manual_seed(8)
    logits = torch.randn(ROWS, POSITIONS, VOCAB, generator=generator, dtype=torch.float64)
    top = logits.log_softmax(-1).topk(count)
    return top.indices, top.values


def test_the_divergence_over_the_whole_vocabulary(run_ranks: RankLauncher):
    """They equal float64 autograd of sum(pi·(log pi - log pi_teacher)), whose tokens nobody lists."""
    case = make_case(torch.float32, 1.0)
    hidden, weight = (one.double().requires_grad_() for one in (case.hidden, case.weight[:VOCAB]))
    every = (hidden @ weight.T / SHARPENED).log_softmax(-1)
    ids, teacher = teacher_of(case, VOCAB)
    by_token = torch.zeros_like(teacher).scatter(-1, ids, teacher)
    divergences = (every.exp() * (every - by_token)).sum(-1)
    divergences.sum().backward()
    assert hidden.grad is not None and weight.grad is not None
    some = every.gather(-1, ids[..., :NUM_OTHERS] // 2).detach()
    top = every.detach().topk(NUM_TOP).values
    for rank, results in enumerate(run_ranks(4, others_on_own_shard)):
        for (sizes, _), found in zip(product(SIZES, BLOCKS), results, strict=True):
            grid = Grid(TrainSizes.parse(sizes))
            width = PADDED // grid.sizes.tp_size
            first = grid.coordinate(rank).tp_rank * width
            right = some, top, divergences.detach(), hidden.grad, weight.grad[first : first + width]
            for one, other in zip(found, right, strict=True):
                torch.testing.assert_close(one.double(), other, atol=1e-4, rtol=1e-4)


def whole(rank: int) -> None:
    case, group = make_case(torch.float32, 1.0), torch.distributed.group.WORLD
    assert group is not None
    frozen = case.weight[:VOCAB]
    hidden = case.hidden.clone().requires_grad_()
    one = Predictions(hidden.flatten(0, 1), frozen, VOCAB, group, Places.everywhere((ROWS, POSITIONS), group))
    log_probs, _ = one[:, 1:].log_probs(case.targets[:, 1:])
    log_probs.sum().backward()
    assert frozen.grad is None
    assert hidden.grad is not None
    assert not hidden.grad[:, 0].any()
    assert hidden.grad[:, 1:].any()
    every = one.logits().log_softmax(-1).gather(-1, case.targets[..., None])[..., 0]
    torch.testing.assert_close(log_probs, every[:, 1:])


def test_some_positions_and_a_frozen_weight(run_ranks: RankLauncher):
    run_ranks(1, whole)


TOKENS, WIDTH, MODEL = 16_384, 152_064 // 4, 3584
"""Qwen2.5-7B at t = 4, and the tokens of a micro-batch."""


def peak_bytes(rank: int) -> int:
    """Return the bytes of all tensors at the fullest moment of a forward and a backward pass, without touching them."""
    group = torch.distributed.group.WORLD
    assert group is not None
    with FakeTensorMode(), MemTracker() as tracker:
        hidden = torch.empty(1, TOKENS, MODEL, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.empty(WIDTH, MODEL, dtype=torch.bfloat16, requires_grad=True)
        targets = torch.empty(1, TOKENS, dtype=torch.int64)
        one = Predictions(hidden[0], weight, WIDTH, group, Places.everywhere((1, TOKENS), group))
        log_probs, entropies = one.log_probs(targets)
        (log_probs.sum() + entropies.sum()).backward()
    snapshot: Any = tracker.get_tracker_snapshot("peak")
    return snapshot[torch.device("cpu")]["Total"]


def test_logits_of_all_tokens_never_exist(run_ranks: RankLauncher):
    (peak,) = run_ranks(1, peak_bytes)
    weight, hidden, block = WIDTH * MODEL, TOKENS * MODEL, predictions.BLOCK_ENTRIES
    given = 2 * (weight + hidden)
    grads = (2 + 4) * weight + 2 * hidden
    assert peak <= given + grads + 3 * 4 * block
    assert given + grads < 1.4e9
    assert 4 * TOKENS * WIDTH > 2.4e9, "float32 logits of all tokens, of which there were four"

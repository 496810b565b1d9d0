"""The generators of a rank: those that third-party code may use, and the one that Megatron-core tracks."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from hybridengine.backends.megatron.groups import initialize_globals
from hybridengine.backends.megatron.shim import device_shim
from tests.gloo.ranks import RankLauncher


def draws(rank: int, seed: int) -> tuple[float, float]:
    initialize_globals(seed)
    return random.random(), float(np.random.random())


def test_a_seed_and_a_rank_make_the_draws_of_python_and_numpy(run_ranks: RankLauncher) -> None:
    first = run_ranks(2, draws, 7)
    assert run_ranks(2, draws, 7) == first
    others = run_ranks(2, draws, 8)
    assert len({number for pair in first + others for number in pair}) == 8


def tracked_draws(rank: int) -> tuple[list[float], list[float], list[int]]:
    """Draw inside and outside Megatron-core's tracker; return both draws, and PyTorch's queue of CUDA calls each time."""
    initialize_globals(7)
    tracker: Any = get_cuda_rng_tracker()
    inside, outside, queued = [], [], []
    with device_shim():
        for _ in range(3):
            with tracker.fork():
                inside.append(float(torch.rand(())))
            outside.append(float(torch.rand(())))
            queued.append(len(torch.cuda._queued_calls))
    return inside, outside, queued


def test_the_tracked_generator_draws_by_itself_and_leaves_nothing_behind(run_ranks: RankLauncher) -> None:
    """A state that waits for CUDA would neither be drawn from nor ever be freed."""
    ((inside, outside, queued),) = run_ranks(1, tracked_draws)
    alone = torch.Generator().manual_seed(7)
    assert outside == [float(torch.rand((), generator=alone)) for _ in range(3)]
    assert len({*inside, *outside}) == 6
    assert len(set(queued)) == 1

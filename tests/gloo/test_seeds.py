"""The generators of a rank that third-party code may use: seeded by the run, differently on each rank."""

from __future__ import annotations

import random

import numpy as np

from hybridengine.backends.megatron.groups import initialize_globals
from tests.gloo.ranks import RankLauncher


def draws(rank: int, seed: int) -> tuple[float, float]:
    initialize_globals(seed)
    return random.random(), float(np.random.random())


def test_a_seed_and_a_rank_make_the_draws_of_python_and_numpy(run_ranks: RankLauncher) -> None:
    first = run_ranks(2, draws, 7)
    assert run_ranks(2, draws, 7) == first
    others = run_ranks(2, draws, 8)
    assert len({number for pair in first + others for number in pair}) == 8

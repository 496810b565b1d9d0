"""The launcher itself: values come back in rank order, errors name their rank, and hangs end."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.gloo.ranks import RankError, RankLauncher


def sum_over_ranks(rank: int, factor: int) -> tuple[int, torch.Tensor, int]:
    value = torch.tensor([factor * (rank + 1)])
    dist.all_reduce(value)
    return rank, value, torch.get_num_threads()


def fail_on_one(rank: int) -> None:
    if rank == 1:
        raise ValueError("rank one is broken")
    dist.barrier()


def hang_on_one(rank: int) -> int:
    if rank == 0:
        time.sleep(600)
    return rank


def die_on_one(rank: int) -> int:
    if rank == 2:
        os._exit(7)
    return rank


def test_eight_ranks_form_a_world_and_answer_in_order(run_ranks: RankLauncher):
    answers = run_ranks(8, sum_over_ranks, 10)
    assert [rank for rank, _, _ in answers] == list(range(8))
    assert all(value.item() == 10 * 36 for _, value, _ in answers)
    assert all(num_threads == 1 for _, _, num_threads in answers)


def test_an_exception_comes_back_with_its_rank_and_traceback(run_ranks: RankLauncher):
    with pytest.raises(RankError, match=r"(?s)rank 1:.*in fail_on_one.*ValueError: rank one is broken"):
        run_ranks(2, fail_on_one, timeout_s=30)


def test_a_hang_ends_at_the_timeout(run_ranks: RankLauncher):
    began = time.monotonic()
    with pytest.raises(RankError, match=r"ranks \[0\] have not ended in time and were killed"):
        run_ranks(2, hang_on_one, timeout_s=2)
    assert time.monotonic() - began < 30


def test_a_dead_rank_is_an_error_unless_it_may_die(run_ranks: RankLauncher):
    with pytest.raises(RankError, match=r"rank 2:\nthe process ended with exit code 7"):
        run_ranks(3, die_on_one)
    assert run_ranks(3, die_on_one, may_die=[2]) == [0, 1, None]

"""Ranks on GPUs: their numbers, by whatever CUDA_VISIBLE_DEVICES names, and threads. There is no GPU: names are given."""

from __future__ import annotations

import os
import time
from unittest import mock

import pytest
import torch

from hybridengine.controller.pool import _number
from hybridengine.controller.rank_process import RankProcess, num_threads, placed_gpu

UUIDS = "GPU-8932f937-d72c,GPU-1c5a80f3-02bd"
MIGS = "MIG-c7384736-a75d,MIG-28ad7b56-5b3f"


@pytest.mark.parametrize(
    ("visible", "assigned", "expected"),
    [
        (None, ["3", "0"], ("0", "3")),
        ("7,2", ["2", "7"], ("7", "2")),  # CUDA's device 0 is the first in the list
        (None, ["10", "9"], ("9", "10")),
        (UUIDS, UUIDS.split(",")[::-1], tuple(UUIDS.split(","))),
        (MIGS, MIGS.split(","), tuple(MIGS.split(","))),
    ],
)
def test_local_ranks_follow_the_nodes_own_order(
    visible: str | None, assigned: list[str], expected: tuple[str, ...]
) -> None:
    seats = [("10.0.0.1", placed_gpu(name, visible)) for name in assigned]
    processes, identities = _number(assigned, [*seats], [2])
    assert tuple(processes) == expected
    assert [(one.rank, one.local_rank, one.node_gpus) for one in identities] == [
        (0, 0, expected),
        (1, 1, expected),
    ]


def test_each_node_has_its_own_names() -> None:
    seats = [("a", placed_gpu("GPU-x", "GPU-x")), ("b", placed_gpu("MIG-y", "MIG-z,MIG-y"))]
    _, identities = _number(["p", "q"], seats, [1, 1])
    assert [(one.rank, one.local_rank, one.node, one.node_gpus) for one in identities] == [
        (0, 0, "a", ("GPU-x",)),
        (1, 0, "b", ("MIG-y",)),
    ]


def test_ranks_without_gpus_keep_their_order() -> None:
    processes, identities = _number(["p", "q"], [("a", None), ("a", None)], [2])
    assert processes == ["p", "q"]
    assert [one.node_gpus for one in identities] == [(), ()]


@pytest.mark.parametrize(
    ("num_cores", "num_ranks", "given", "expected"),
    [(96, 8, "1", 12), (96, 8, None, 12), (96, 8, "4", 4), (4, 8, "1", 1), (30, 4, "1", 7)],
)
def test_ranks_on_gpus_share_the_cores(
    num_cores: int, num_ranks: int, given: str | None, expected: int
) -> None:
    with mock.patch.object(os, "sched_getaffinity", return_value=set(range(num_cores))):
        assert num_threads(num_ranks, given) == expected


def test_a_call_ends_with_the_work_of_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no GPU: `torch.cuda` is a stand-in, whose work takes 50 ms and then fails."""
    slow = mock.Mock(side_effect=lambda: time.sleep(0.05))
    monkeypatch.setattr(torch, "cuda", mock.Mock(synchronize=slow, memory_allocated=lambda: 7))
    process = RankProcess("pool", 0)
    outcome = process.leave_world()
    assert outcome.failure is None
    assert outcome.end - outcome.begin >= 0.05
    slow.side_effect = RuntimeError("an illegal memory access was encountered")
    outcome = process.leave_world()
    assert outcome.result is None
    assert "illegal memory access" in str(outcome.failure)

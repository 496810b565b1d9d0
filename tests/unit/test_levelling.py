"""Which requests move between engines, and what is left to draw of a request that moves."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from hybridengine.backends.engine import Request, Response, SamplingSettings
from hybridengine.backends.levelling import Move, Queue, continued, moves


@pytest.mark.parametrize("num_engines", [2, 3, 4])
def test_every_queue_is_levelled_with_the_fewest_moves(num_engines: int):
    for waiting in product(range(5), repeat=num_engines):
        found = moves([Queue(count, 8, 9) for count in waiting])
        after = [*waiting]
        for giver, taker, count in found:
            assert count > 0
            after[giver] -= count
            after[taker] += count
        assert sum(after) == sum(waiting)
        assert max(after) - min(after) <= 1
        least = min(
            sum(max(0, before - target) for before, target in zip(waiting, targets, strict=True))
            for targets in product(range(5), repeat=num_engines)
            if sum(targets) == sum(waiting) and max(targets) - min(targets) <= 1
        )
        assert sum(move.count for move in found) == least, waiting


def test_nothing_moves_while_every_engine_has_enough_until_the_next_comparison():
    assert moves([Queue(3, 8, 2), Queue(40, 8, 2)]) == []
    assert moves([Queue(2, 8, 2), Queue(40, 8, 2)]) == [Move(1, 0, 19)]


def test_the_last_waiting_request_goes_to_the_engine_with_most_free_slots():
    assert moves([Queue(1, 8, 0), Queue(0, 7, 1), Queue(0, 3, 5)]) == [Move(0, 2, 1)]
    assert moves([Queue(1, 8, 0), Queue(0, 8, 0), Queue(0, 8, 0)]) == []


def test_a_continued_request_draws_the_tokens_that_are_left():
    request = Request("0/7", (5, 6), 11, SamplingSettings(10, 0.8, stop_token_ids=(3,)))
    once = continued(request, Response("a", [21, 22]))
    assert once == Request("0/7", (5, 6, 21, 22), 11, SamplingSettings(8, 0.8, stop_token_ids=(3,)), 2)
    assert continued(once, Response("a", [23])) == continued(request, Response("a", [21, 22, 23]))
    assert continued(request, Response("a")) == request
    routed = continued(request, Response("a", [21], routes=np.zeros((4, 1, 2), np.int8)))
    assert routed.num_routed == 4

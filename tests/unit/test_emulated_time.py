"""The time and the lengths of the runs of `scripts/measure_async.py`."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from hybridengine.planning.costs.lengths import Lengths
from hybridengine.rollouts.queue import first_seed
from scripts import emulated_time
from scripts.emulated_time import LENGTHS, Pace, response_tokens


def test_lengths_by_seed_have_the_distribution_of_the_run() -> None:
    """Seeds of a run are consecutive, and those of another step are others."""
    lengths = Lengths.of(LENGTHS, 4096)
    seeds = [first_seed(7, step, 64) + row for step in range(1, 101) for row in range(64)]
    drawn = np.array([response_tokens(lengths, seed) for seed in seeds])
    assert drawn.mean() == pytest.approx(64, rel=0.04)
    assert drawn.std() / drawn.mean() == pytest.approx(0.8, abs=0.06)
    assert drawn[:64].tolist() == [response_tokens(lengths, seed) for seed in seeds[:64]]
    steps = drawn.reshape(100, 64).mean(axis=1)
    assert steps.std() == pytest.approx(64 * 0.8 / 8, rel=0.3)  # of independent lengths


def test_work_that_took_too_long_is_made_up_for(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [0.0]

    def sleep(seconds: float) -> None:
        now_s[0] += seconds

    monkeypatch.setattr(emulated_time, "time", SimpleNamespace(monotonic=lambda: now_s[0], sleep=sleep))
    pace, ends_s = Pace(), list[float]()
    for work_s in (0.25, 1.75, 0.25, 0.0, 2.5, 0.0, 0.5):
        with pace.takes(1.0):
            sleep(work_s)
        ends_s.append(now_s[0])
    assert ends_s == [1.0, 2.75, 3.0, 4.0, 6.5, 6.5, 7.5]  # of the last delay, MOST_LATE_S is made up for

"""Scores of verdicts that no number can be read from, as a judge's worker gives them. No engine is started."""

from __future__ import annotations

import math
from collections import Counter

import pytest

from hybridengine.config.judge_section import JudgeSection
from hybridengine.data.dropped_rows import MOST_NAMED, DroppedRows
from hybridengine.data.judging import Verdicts
from hybridengine.errors import DataError
from tests.unit.test_judging import judge
from workers.judge import JudgeWorker


def worker_of(section: JudgeSection) -> JudgeWorker:
    """Return a judge's worker that needs no engine."""
    worker = object.__new__(JudgeWorker)
    worker._key, worker._judge, worker._counts = "reward.judge", section, Counter()
    worker._verdicts = Verdicts("reward.judge", section, 1.0, 1.0)
    return worker


def test_verdicts_that_cannot_be_parsed(caplog: pytest.LogCaptureFixture) -> None:
    worker, unscored = worker_of(judge()), DroppedRows("unparsed")
    for row in range(2 * MOST_NAMED):
        assert math.isnan(worker._score(row, "6", ["fine", "good"], unscored))
    assert worker._score(99, "6", ["fine", "4"], unscored) == 4.0
    assert worker._counts["unparsed"] == 4 * MOST_NAMED + 1
    assert [record.levelname for record in caplog.records] == ["WARNING"] * MOST_NAMED
    assert 'reward.judge, row 0: the verdict "fine" has no valid score' in caplog.messages[0]
    assert caplog.messages[-1].endswith("further ones are only counted (unparsed)")
    assert worker_of(judge(on_unparsed="score", unparsed_score=-1.0))._score(0, "6", None, unscored) == -1.0
    with pytest.raises(DataError, match=r"reward\.judge, row 3: the judge's prompt is too long"):
        worker_of(judge(on_unparsed="fail"))._score(3, "6", None, unscored)

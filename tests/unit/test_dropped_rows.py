"""Warnings of dropped rows: how many there are, and that none of a kind hides another kind."""

from __future__ import annotations

import pytest

from hybridengine.data.dropped_rows import MOST_NAMED, DroppedRows


def test_the_first_rows_and_the_first_of_each_kind_are_named(caplog: pytest.LogCaptureFixture) -> None:
    dropped = DroppedRows("count")
    for number in range(2 * MOST_NAMED):
        dropped.warn(f"late {number}", "deadline")
    for number in range(3):
        dropped.warn(f"ended {number}", "process")
    named = [f"late {number}" for number in range(MOST_NAMED)]
    named[-1] += "; further ones are only counted (count)"
    assert caplog.messages == [*named, "ended 0"]

"""Ranks that an error names as missing, from the notes that the other ranks have left."""

from __future__ import annotations

import pytest

from hybridengine.weights.failure_notes import FailureNote, explain


def waiting(rank: int, *waited_for: int) -> FailureNote:
    return FailureNote(rank, f"bucket {rank} of 9", waited_for, "timed out")


OWN_FAULT = FailureNote(2, "bucket 4 of 9", (), "no memory")


@pytest.mark.parametrize(
    ("own", "notes", "expected"),
    [
        pytest.param(waiting(0, 3), [], "missing ranks: [3]", id="nobody else has said anything"),
        pytest.param(
            waiting(0, 1),
            [waiting(1, 3), waiting(2, 3)],
            "missing ranks: [3]; ranks [1, 2] have stopped as well, waiting for ranks [3]",
            id="a chain ends at the rank that has left no note",
        ),
        pytest.param(
            waiting(0, 1, 3),
            [waiting(1, 3, 5)],
            "missing ranks: [3, 5]; ranks [1] have stopped as well, waiting for ranks [3, 5]",
            id="two are missing",
        ),
        pytest.param(
            waiting(0, 2),
            [OWN_FAULT],
            "rank 2 failed by itself in bucket 4 of 9: no memory",
            id="who has said why is not missing",
        ),
        pytest.param(
            waiting(0, 1),
            [waiting(1, 2), OWN_FAULT],
            "rank 2 failed by itself in bucket 4 of 9: no memory; ranks [1] have stopped as well, waiting for ranks"
            " [2]",
            id="the cause before those that followed",
        ),
        pytest.param(
            OWN_FAULT,
            [waiting(0, 2), waiting(1, 2)],
            "ranks [0, 1] have stopped as well, waiting for ranks [2]",
            id="the cause itself does not blame itself",
        ),
        pytest.param(
            waiting(0, 1),
            [waiting(0, 1), waiting(1, 0)],
            "ranks [1] have stopped as well, waiting for ranks [0]",
            id="two that waited for each other: nobody is missing",
        ),
        pytest.param(OWN_FAULT, [], "", id="nothing to add"),
        pytest.param(
            waiting(0, 1, 3),
            None,
            "the rank that hosts the store is missing as well, or alone: ranks [1, 3] may only have stopped because of"
            " it",
            id="no store, no notes",
        ),
    ],
)
def test_explain(own: FailureNote, notes: list[FailureNote] | None, expected: str):
    assert explain(own, notes) == expected


def test_the_order_of_the_notes_does_not_matter():
    notes = [waiting(3, 1), waiting(1, 4)]
    assert explain(waiting(0, 1), notes).startswith("missing ranks: [4]; ranks [1, 3] have")
    assert explain(waiting(0, 1), notes[::-1]) == explain(waiting(0, 1), notes)

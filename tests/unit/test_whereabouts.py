"""The list of the ranks of a call that does not end."""

from __future__ import annotations

from hybridengine.controller.whereabouts import MOST_LINES, SILENT, report_lines


def test_those_that_are_elsewhere_come_first() -> None:
    places = {rank: f"tp={rank}" for rank in range(5)}
    words = dict.fromkeys(range(5), "in wait (a.py:1)") | {3: "in sleep (b.py:2)", 4: SILENT}
    assert report_lines(places, words) == [
        f"  rank 4 (tp=4): {SILENT}",
        "  rank 3 (tp=3): in sleep (b.py:2)",
        "  rank 0 (tp=0): in wait (a.py:1)",
        "  rank 1 (tp=1): in wait (a.py:1)",
        "  rank 2 (tp=2): in wait (a.py:1)",
    ]


def test_who_waits_in_a_collective_comes_last() -> None:
    words = {0: "in wait (torch/distributed/c.py:1)", 1: "in sleep (b.py:2)", 2: "in sleep (b.py:2)"}
    lines = report_lines(dict.fromkeys(range(3), "here"), words)
    assert [line.split()[1] for line in lines] == ["1", "2", "0"]


def test_many_that_wait_are_counted() -> None:
    places = {rank: f"tp={rank}" for rank in range(128)}
    words = dict.fromkeys(range(128), "in wait (a.py:1)") | {77: "in sleep (b.py:2)"}
    lines = report_lines(places, words)
    assert lines[0] == "  rank 77 (tp=77): in sleep (b.py:2)"
    assert lines[1:MOST_LINES] == [
        f"  rank {rank} (tp={rank}): in wait (a.py:1)" for rank in range(MOST_LINES - 1)
    ]
    assert lines[MOST_LINES:] == [f"  and {128 - MOST_LINES} more"]


def test_where_nobody_says_anything_ranks_are_listed_as_they_are() -> None:
    assert report_lines({1: "tp=1", 0: "tp=0, still in actor.update"}, {}) == [
        "  rank 0 (tp=0, still in actor.update)",
        "  rank 1 (tp=1)",
    ]

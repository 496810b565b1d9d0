"""The recorded order of engines' calls: kept, cut at a resume, and repeated."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridengine.errors import DataError
from hybridengine.rollouts.order import CallOrder, Wait, read_order

WAITS = [Wait(1, [[0], [1, 0], []]), Wait(1, []), Wait(2, [[1]]), Wait(3, [[0]])]


def recorded(file: Path, waits: list[Wait]) -> CallOrder:
    order = CallOrder(file)
    order.go_on_after(0)
    for wait in waits:
        assert order.next_wait(wait.step) is None
        order.record(wait)
    return order


def test_a_resumed_run_forgets_what_it_does_again(tmp_path: Path) -> None:
    file = tmp_path / "calls.jsonl"
    recorded(file, WAITS)
    assert read_order(file) == WAITS
    with file.open("a") as half:
        half.write("[4, [[0")  # killed while it wrote
    assert read_order(file) == WAITS
    again = CallOrder(file)
    again.go_on_after(2)
    again.record(Wait(3, [[1]]))
    assert read_order(file) == [*WAITS[:3], Wait(3, [[1]])]


def test_another_run_repeats_the_order(tmp_path: Path) -> None:
    recorded(tmp_path / "first.jsonl", WAITS)
    order = CallOrder(tmp_path / "second.jsonl", tmp_path / "first.jsonl")
    order.go_on_after(0)
    assert [order.next_wait(wait.step) for wait in WAITS] == [wait.ended for wait in WAITS]
    with pytest.raises(DataError, match=r"first.jsonl has no more waits where step 3 waits; name the file"):
        order.next_wait(3)
    order.go_on_after(1)
    with pytest.raises(DataError, match="has a wait of step 2 where step 3 waits"):
        order.next_wait(3)


@pytest.mark.parametrize("text", ['{"a": 1}\n', "[1]\n", "[1, 2]\n", "nothing\n"])
def test_files_of_another_kind_are_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "other.jsonl"
    file.write_text(text)
    with pytest.raises(DataError, match=r"other.jsonl is not the order of a run's calls"):
        read_order(file)
    with pytest.raises(DataError, match=r"none.jsonl is not the order of a run's calls .*No such file"):
        read_order(tmp_path / "none.jsonl")

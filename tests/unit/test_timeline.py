"""The timeline as other programs read it: fields of the trace event format, rows, nesting, damage and resumption."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridengine.errors import DataError
from hybridengine.report.timeline import Reading, Span, Timeline, TimelineWriter, read_timeline

EPOCH_S = 1_760_000_000.123456


def _span(start_s: float, end_s: float, rank: int = 0, name: str = "actor.update", **fields: Any) -> Span:
    given: dict[str, Any] = {"phase": "updates", "node": "node-a", "role": "actor"} | fields
    return Span(name, rank=rank, start_s=EPOCH_S + start_s, end_s=EPOCH_S + end_s, **given)


def _write(file: Path, *spans: Span, **arguments: Any) -> list[dict[str, Any]]:
    """Write spans; return the file's events as a strict JSON parser reads them."""
    with closing(TimelineWriter(file)) as writer:
        writer.write(spans, **arguments)
    return _parse(file.read_bytes())


def _parse(content: bytes) -> list[dict[str, Any]]:
    def refuse(constant: str) -> float:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(content, parse_constant=refuse)


def _named(events: list[dict[str, Any]], name: str) -> dict[int, Any]:
    """Return the value of a metadata event by process or thread."""
    number = "pid" if name.startswith("process") else "tid"
    return {event[number]: event["args"]["name"] for event in events if event["name"] == name}


def _bars(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in events if event["ph"] == "X"]


def test_every_event_has_the_fields_of_its_kind(tmp_path: Path) -> None:
    """The fields are those that the format's document lists for complete, counter and metadata events."""
    spans = [
        _span(0, 2, rank=1, step=3),
        _span(0.5, 1, rank=1, name="fetch", phase="transfers"),
    ]
    readings = [Reading("memory/bytes", 1, "node-a", EPOCH_S + 1, 2**33)]
    events = _write(tmp_path / "timeline.json", *spans, readings=readings)
    assert {event["ph"] for event in events} == {"X", "C", "M"}
    for event in events:
        assert isinstance(event["name"], str)
        assert all(isinstance(event[key], int) for key in ("pid", "tid", "ts"))
        if event["ph"] == "M":
            assert isinstance(event["args"]["name"], str)
    bar, nested = _bars(events)
    assert (bar["name"], bar["cat"], bar["args"]) == (
        "actor.update",
        "updates",
        {"role": "actor", "step": 3},
    )
    assert (bar["ts"], bar["dur"]) == (1_760_000_000_123_456, 2_000_000)
    assert (nested["ts"], nested["dur"], nested["tid"]) == (1_760_000_000_623_456, 500_000, bar["tid"])
    (counter,) = (event for event in events if event["ph"] == "C")
    assert counter["args"] == {"value": 2**33}
    assert (counter["pid"], counter["id"]) == (bar["pid"], "rank 1")


def test_rows_are_named_and_sorted_by_rank_and_grouped_by_node(tmp_path: Path) -> None:
    """More than ten ranks are in numerical order, whatever order they arrive in."""
    spans = [_span(0, 1, rank=rank, node=f"node-{'ab'[rank // 8]}") for rank in reversed(range(12))]
    events = _write(tmp_path / "timeline.json", *spans)
    threads, nodes = _named(events, "thread_name"), _named(events, "process_name")
    assert [threads[tid] for tid in sorted(threads)] == [f"rank {rank}" for rank in range(12)]
    assert 0 not in threads
    assert [nodes[pid] for pid in sorted(nodes)] == ["node-a", "node-b"]
    assert nodes.keys().isdisjoint(threads)
    for bar in _bars(events):
        assert nodes[bar["pid"]] == ("node-a" if int(threads[bar["tid"]].split()[1]) < 8 else "node-b")


def test_the_ranks_of_pools_have_rows_of_their_own(tmp_path: Path) -> None:
    spans = [_span(0, 2, pool=pool) for pool in ("", "reward")] + [_span(0, 2, rank=1, node="node-b")]
    events = _write(tmp_path / "timeline.json", *spans)
    assert sorted(_named(events, "thread_name").values()) == ["rank 0", "rank 1", "reward rank 0"]
    assert {bar["tid"] for bar in _bars(events)} == _named(events, "thread_name").keys()


WIDTHS = st.tuples(st.integers(0, 3), st.integers(1, 12), st.integers(0, 12), st.integers(0, 2))
"""Times of a call: the pause before it, its length, the part that fetches rows; and its rank."""


@settings(deadline=None, max_examples=40)
@given(
    writes=st.lists(st.lists(WIDTHS, max_size=12), max_size=4),
    unit_s=st.sampled_from([1.0, 0.1, 1e-6, 3e-7]),
)
def test_bars_of_calls_in_turn_nest_and_none_is_lost(
    tmp_path_factory: pytest.TempPathFactory, writes: list[list[tuple[int, int, int, int]]], unit_s: float
) -> None:
    """A rank runs one call at a time, and fetches rows at its beginning: rounding must not let bars cross."""
    file = tmp_path_factory.mktemp("spans") / "timeline.json"
    spans, now = list[Span](), [0, 0, 0]
    with closing(TimelineWriter(file)) as writer:
        for write in writes:
            new = list[Span]()
            for pause, width, fetched, rank in write:
                start, now[rank] = now[rank] + pause, now[rank] + pause + width
                for end in (start + min(fetched, width), now[rank]):
                    new.append(_span(start * unit_s, end * unit_s, rank, name=str(len(spans) + len(new))))
            writer.write(reversed(new))
            spans += new
            assert len(_bars(_parse(file.read_bytes()))) == len(spans)
    rows: dict[int, list[tuple[int, int]]] = {}
    for bar in _bars(_parse(file.read_bytes())):
        rows.setdefault(bar["tid"], []).append((bar["ts"], bar["ts"] + bar["dur"]))
    for bars in rows.values():
        assert bars == sorted(bars, key=lambda bar: bar[0])
        for index, (start, end) in enumerate(bars):
            for other_start, other_end in bars[:index]:
                assert start >= other_end or (other_start <= start and end <= other_end)
    read = sorted(read_timeline(file).spans, key=lambda span: int(span.name))
    for got, expected in zip(read, spans, strict=True):
        assert (got.name, got.rank) == (expected.name, expected.rank)
        assert (got.start_s, got.end_s) == pytest.approx((expected.start_s, expected.end_s), abs=1e-6, rel=0)


def test_a_clock_that_was_set_back_makes_a_bar_of_no_width(tmp_path: Path) -> None:
    (bar,) = _bars(_write(tmp_path / "timeline.json", _span(5, 4)))
    assert (bar["ts"], bar["dur"]) == (1_760_000_005_123_456, 0)


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    span = Span('a "name" </script>\n 😀 ü', "log-probs", 3, "nöde", "reference", 1.25, 2.5, "pool b", 7)
    reading = Reading("memory/bytes", 3, "nöde", 1.5, 0.25, "pool b")
    with closing(TimelineWriter(tmp_path / "timeline.json")) as writer:
        writer.write([span], [reading])
    assert read_timeline(tmp_path / "timeline.json") == Timeline([span], [reading])
    assert read_timeline(tmp_path / "missing.json") == Timeline([], [])


def test_a_new_timeline_is_an_empty_array(tmp_path: Path) -> None:
    with closing(TimelineWriter(tmp_path / "runs" / "demo" / "timeline.json")):
        assert _parse((tmp_path / "runs" / "demo" / "timeline.json").read_bytes()) == []
    assert read_timeline(tmp_path / "runs" / "demo" / "timeline.json").spans == []


def test_a_resumed_run_appends_to_the_same_rows(tmp_path: Path) -> None:
    file = tmp_path / "timeline.json"
    first = _write(file, _span(0, 1), _span(0, 1, rank=1, node="node-b"))
    second = _write(file, _span(5, 6, rank=1, node="node-b"), _span(5, 6, rank=2, node="node-b"))
    assert second[: len(first)] == first
    assert [(event["ph"], event["name"]) for event in second[len(first) :]] == [
        ("M", "thread_name"), ("X", "actor.update"), ("X", "actor.update"),
    ]  # fmt: skip
    assert list(_named(second, "thread_name").values()) == ["rank 0", "rank 1", "rank 2"]
    assert len({event["tid"] for event in _bars(second)}) == 3


def test_a_file_cut_anywhere_is_readable_and_can_be_continued(tmp_path: Path) -> None:
    """After a power failure, complete events are kept, the rest is cut off, and the file is JSON again."""
    file = tmp_path / "timeline.json"
    _write(file, _span(0, 1), _span(1, 2, rank=1), _span(2, 3))
    content, spans = file.read_bytes(), read_timeline(file).spans
    counts = set()
    for length in range(len(content)):
        file.write_bytes(content[:length])
        kept = read_timeline(file).spans
        assert kept == spans[: len(kept)]
        counts.add(len(kept))
        with closing(TimelineWriter(file)) as writer:
            assert len(_bars(_parse(file.read_bytes()))) == len(kept)
            writer.write([_span(9, 10)])
        assert len(_bars(_parse(file.read_bytes()))) == len(kept) + 1
        assert read_timeline(file).spans[: len(kept)] == kept
    assert counts == {0, 1, 2, 3}


def test_a_killed_process_loses_nothing_that_was_written(tmp_path: Path) -> None:
    """The kill may come in the middle of a write, which Linux then stops between two pages."""
    file = tmp_path / "timeline.json"
    program = f"""
import itertools
from hybridengine.report.timeline import Span, TimelineWriter
writer = TimelineWriter({str(file)!r})
for step in itertools.count():
    writer.write([Span("x" * 500, "generate", rank, "n", "actor", step, step + 1) for rank in range(8)])
    if step == 5:
        print("going", flush=True)
"""
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "going\n"
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    child.stdout.close()
    spans = read_timeline(file).spans
    assert len(spans) >= 48
    with closing(TimelineWriter(file)):
        assert len(_bars(_parse(file.read_bytes()))) == len(spans)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"hello", r"timeline.json begins with b'hello', a timeline with '\['; move the file away"),
        (b'{"traceEvents": []}', "begins with"),
        (b'[\n{"ph": "M", \n{"ph": "X"}\n]\n', r"timeline.json:2: .* is not an event that a run writes"),
        (b'[\n{"ph": "M", "name": "thread_name", "pid": 1, "tid": 2, "args": {"name": "x"}}\n]', "is not an event that"),
        (b'[\n{"name": "x"}\n]\n', "is not an event that a run writes"),
    ],
)  # fmt: skip
def test_what_is_no_timeline_is_refused_and_left_alone(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "timeline.json"
    file.write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_timeline(file)
    with pytest.raises(DataError, match=message):
        TimelineWriter(file)
    assert file.read_bytes() == content

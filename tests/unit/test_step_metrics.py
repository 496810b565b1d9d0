"""Summaries of a step's calls, compared with a clock that is read at every millisecond."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridengine.controller.call_log import CallRecord
from hybridengine.training import iterations
from hybridengine.training.iterations import call_metrics

EPOCH_S, STEP_MS = 1_700_000_000.0, 60


def record(
    role: str,
    method: str,
    spans_ms: dict[int, tuple[int, int]],
    transferred: dict[str, int] | None = None,
    held: dict[int, dict[str, int]] | None = None,
) -> CallRecord:
    spans = {rank: (EPOCH_S + begin / 1000, EPOCH_S + end / 1000) for rank, (begin, end) in spans_ms.items()}
    return CallRecord(role, method, spans, dict.fromkeys(spans, 0.0), Counter(transferred), held or {})


span = st.tuples(st.integers(-20, STEP_MS + 20), st.integers(0, 40)).map(
    lambda one: (one[0], one[0] + one[1])
)


@settings(max_examples=30)
@given(st.lists(st.dictionaries(st.integers(0, 3), span, min_size=1), max_size=6))
def test_overhead_is_the_time_in_which_no_rank_is_in_a_call(calls: list[dict[int, tuple[int, int]]]) -> None:
    records = [record("actor", "update", spans) for spans in calls]
    found = call_metrics(records, 0, EPOCH_S, EPOCH_S + STEP_MS / 1000)
    spans = [one for call in calls for one in call.values()]
    idle = sum(not any(begin <= moment < end for begin, end in spans) for moment in range(STEP_MS))
    assert found["controller/overhead_s"] == pytest.approx(idle / 1000, abs=1e-5)


def test_seconds_are_those_of_the_slowest_rank_and_memory_is_the_most_after_any_call() -> None:
    records = [
        record(
            "actor",
            "generate_sequences",
            {0: (0, 20), 1: (0, 30)},
            {"prompts.training_prompts": 5},
            {0: {"resident_bytes": 70}, 1: {"resident_bytes": 90}},
        ),
        record(
            "reward_style",
            "compute_scores",
            {0: (30, 35), 1: (30, 32)},
            {"actor.generate_sequences": 7},
            {0: {"resident_bytes": 80}, 1: {"resident_bytes": 60}},
        ),
        record("reward", "compute_scores", {0: (35, 41), 1: (35, 36)}, {"actor.generate_sequences": 2}),
    ]
    found = call_metrics(records, 3, EPOCH_S, EPOCH_S + 0.05)
    assert found["time/generate_s"] == pytest.approx(0.030, abs=1e-5)
    assert found["time/scores_s"] == pytest.approx(0.005 + 0.006, abs=1e-5)
    assert found["memory/resident_bytes"] == 90
    assert found["transfer/actor.generate_sequences->reward.compute_scores_bytes"] == 2
    assert found["transfer/actor.generate_sequences->reward_style.compute_scores_bytes"] == 7
    assert found["transfer/bytes"] == 14
    assert found["controller/payload_bytes"] == 3


def test_engines_count_once_and_pools_have_idle_shares() -> None:
    """Two engines draw at the same time; a call that began before the step belongs to it."""
    records = [
        replace(record("generation", "advance", {0: (-10, 20)}), pool="engines.0"),
        replace(record("generation", "advance", {0: (20, 40)}), pool="engines.0"),
        replace(record("generation", "advance", {0: (0, 40)}), pool="engines.1"),
        replace(record("actor", "update", {0: (0, 10), 1: (0, 30)}), pool="main"),
    ]
    found = call_metrics(records, 0, EPOCH_S, EPOCH_S + 0.05)
    assert found["time/generate_s"] == pytest.approx(0.050, abs=1e-5)
    expected = {"engines.0": 0.0, "engines.1": 0.2, "main": 0.6}
    for pool, share in expected.items():
        assert found[f"idle/{pool}_share"] == pytest.approx(share, abs=1e-4)
    assert "idle/engines.2_share" not in found
    pools = [*expected, "engines.2"]
    found = call_metrics(records, 0, EPOCH_S, EPOCH_S + 0.05, pools)
    assert found["idle/engines.2_share"] == 1
    assert found["idle/main_share"] == pytest.approx(0.6, abs=1e-4)
    assert not [name for name in call_metrics(records[3:], 0, EPOCH_S, EPOCH_S + 1) if "idle" in name]


def test_records_of_a_step_are_timed_apart_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of 2 s, whose records take 3 s."""
    now = [EPOCH_S]

    def take(seconds: float) -> dict[str, float]:
        now[0] += seconds
        return {}

    monkeypatch.setattr(iterations.time, "time", lambda: now[0])
    monkeypatch.setattr(iterations, "_carry_out", lambda *arguments: take(2))
    pools: Any = SimpleNamespace(wait=lambda: None, nodes={})
    output: Any = SimpleNamespace(begin=lambda step: None, draw=lambda step, records: take(3))
    nothing: Any = None
    found = iterations._Iterations(nothing, pools, nothing, None, output, nothing).train(1)
    assert found["controller/records_s"] == 3
    assert found["time/step_s"] == found["controller/overhead_s"] == 2

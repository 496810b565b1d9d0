"""The planner's description of every dataflow against the calls that its driver makes."""

from __future__ import annotations

import pytest

from hybridengine.config.algorithm_sections import ALGORITHM_ROLES
from hybridengine.errors import ConfigError
from hybridengine.planning.dataflows import DATAFLOWS, HELPERS, PHASES, Count, Work, calls_of
from tests.unit.dataflow_traces import PROMPTS, SAMPLES, trace

ROWS = {Count.ROWS: PROMPTS * SAMPLES, Count.PROMPTS: PROMPTS, Count.PAIRS: 2 * PROMPTS}


@pytest.mark.parametrize("name", ALGORITHM_ROLES)
def test_described_calls_are_those_of_the_driver(name: str) -> None:
    calls, traced = calls_of(name), trace(name)
    assert [str(call) for call in calls] == [one.name for one in traced]
    for place, (call, one) in enumerate(zip(calls, traced, strict=True)):
        # What the controller itself waits for before it makes a call is no row that the call reads.
        waits = {place - 1} if name == "safe_rlhf" and call.method == "map" else set()
        assert set(call.reads) - waits == set(one.reads), call
        assert waits <= set(call.reads)
        if call.work is not Work.SWITCH:
            assert ROWS[call.count] == one.num_rows, call
        assert str(call) in PHASES
    assert {call.role for call in calls} - set(HELPERS) == set(ALGORITHM_ROLES[name])


def test_every_dataflow_of_the_project_is_described() -> None:
    assert set(DATAFLOWS) == set(ALGORITHM_ROLES)
    with pytest.raises(ConfigError, match="mine\\.step is a dataflow of your own"):
        calls_of("mine.step")

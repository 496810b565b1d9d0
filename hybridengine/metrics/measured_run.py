"""What a run has taken, as plans count it: lengths from its metrics, seconds of each call from its timeline.

A call's seconds are those by which it moves the end of its pool's work: from when the last rank could begin it (the
call before it on the pool and the calls whose rows it reads have ended everywhere) until the last rank has ended it.
Ranks that are early begin the next call early and then wait in it, so that what each rank itself spends in a call
(`time/PHASE_s` in the metrics) adds up to more than the step.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hybridengine.config import RunConfig, load_config
from hybridengine.errors import ConfigError, DataError
from hybridengine.metrics import keys
from hybridengine.metrics.rows import METRICS_FILE, Row, latest_rows, read_rows
from hybridengine.metrics.timeline import TIMELINE_FILE, Span, read_timeline
from hybridengine.planning.dataflows import Call
from hybridengine.planning.lengths import Lengths
from hybridengine.planning.workload import Workload, workload_of

CONFIG_FILE = "config.yaml"
WARM_STEPS = 2
"""First steps of a run, whose first requests and allocations take longer."""
FEWEST_STEPS = 3


@dataclass(frozen=True, eq=False)
class MeasuredRun:
    """A run that has been carried out."""

    folder: Path
    config: RunConfig
    workload: Workload
    """With the lengths that its prompts and responses had."""
    phases_s: Mapping[str, float]
    """Phase -> seconds of a step, the median of the steps that count."""
    step_s: float
    memory_bytes: Mapping[str, int]
    """Name -> most bytes that a rank's process held, of those that the run could read."""
    peak_weight_bytes: int
    """Most bytes of weights that a rank held while switching."""
    num_steps: int
    """That count."""


def read_run(folder: str | Path) -> MeasuredRun:
    """What the run of a folder has taken, its first steps left out.

    Raises:
        ConfigError: the folder holds no run.
        DataError: too few steps, or steps without the figures that are needed.
    """
    folder = Path(folder)
    for name in (CONFIG_FILE, METRICS_FILE, TIMELINE_FILE):
        if not (folder / name).is_file():
            raise ConfigError(f"{folder} has no {name}; name the folder of a run, such as runs/arithmetic")
    config = load_config(folder / CONFIG_FILE, dry_run=True)
    rows = [row for row in latest_rows(read_rows(folder)) if _counts(row)][WARM_STEPS:]
    if len(rows) < FEWEST_STEPS:
        raise DataError(
            f"{folder} has {len(rows)} steps after the first {WARM_STEPS} of training, which warm up; let it run for at"
            f" least {WARM_STEPS + FEWEST_STEPS}"
        )
    workload = workload_of(config, _lengths(folder, config, rows), _prompt_tokens(config, rows))
    spans = defaultdict[int, list[Span]](list)
    for span in read_timeline(folder / TIMELINE_FILE).spans:
        if span.step is not None:
            spans[span.step].append(span)
    steps = [call_seconds(workload.calls, spans[int(row[keys.STEP] or 0)]) for row in rows]
    phases: dict[str, float] = {}
    for place, call in enumerate(workload.calls):
        found = [step[place] for step in steps if step[place] is not None]
        if not found:
            raise DataError(
                f"{folder / TIMELINE_FILE} has no {call}, which {config.algorithm.name} calls in each step"
            )
        seconds = statistics.median(value for value in found if value is not None)
        phases[call.phase] = phases.get(call.phase, 0.0) + seconds
    return MeasuredRun(
        folder,
        config,
        workload,
        phases,
        statistics.median(float(row[keys.STEP_S] or 0.0) for row in rows),
        _memory(rows),
        max(int(row.get(keys.PEAK_WEIGHT_BYTES) or 0) for row in rows),
        len(rows),
    )


def call_seconds(calls: Sequence[Call], spans: Sequence[Span]) -> list[float | None]:
    """Of each call of a step, as above; None where the step has no such call.

    Args:
        spans: of one step; where a call is made more often than the dataflow does, as for an evaluation, the first ones
            count.
    """
    by_name = defaultdict[str, dict[tuple[str, str], list[Span]]](dict)
    for span in sorted(spans, key=lambda span: span.start_s):
        by_name[span.name].setdefault((span.pool, span.row), []).append(span)
    begun = min((span.start_s for span in spans), default=0.0)
    free: dict[str, float] = {}
    ends: list[float] = []
    made: dict[str, int] = defaultdict(int)
    found: list[float | None] = []
    for call in calls:
        number = made[str(call)]
        made[str(call)] += 1
        own = [ranks[number] for ranks in by_name[str(call)].values() if len(ranks) > number]
        if not own:
            found.append(None)
            ends.append(begun)
            continue
        pool, end = own[0].pool, max(span.end_s for span in own)
        could = max(free.get(pool, begun), *(ends[read] for read in call.reads), begun)
        found.append(max(0.0, end - could))
        ends.append(end)
        free[pool] = max(end, free.get(pool, begun))
    return found


def _counts(row: Row) -> bool:
    """Whether it is a step of training, and no evaluation came with it."""
    return row.get(keys.STEP_S) is not None and row.get(keys.SCORE_MEAN) is None


def _lengths(folder: Path, config: RunConfig, rows: Sequence[Row]) -> Lengths:
    names = [keys.response_tokens_key(percent) for percent in keys.LENGTH_SHARES]
    if any(row.get(name) is None for row in rows for name in names):
        raise DataError(
            f"{folder / METRICS_FILE} has no {names[0]} to {names[-1]}; it is of an older version: run it again"
        )
    return Lengths.between(
        str(folder),
        [percent / 100 for percent in keys.LENGTH_SHARES],
        [[float(row[name] or 0.0) for name in names] for row in rows],
        config.rollout.max_response_tokens,
    )


def _prompt_tokens(config: RunConfig, rows: Sequence[Row]) -> float:
    """Mean length of the prompts."""
    means = [
        float(row.get(keys.TOKENS) or 0.0) / config.rows_per_step
        - float(row[keys.RESPONSE_TOKENS_MEAN] or 0.0)
        for row in rows
    ]
    return statistics.fmean(means)


def _memory(rows: Sequence[Row]) -> dict[str, int]:
    prefix = keys.memory_key("")
    found: dict[str, int] = {}
    for row in rows:
        for name, value in row.items():
            if name.startswith(prefix) and value is not None:
                found[name.removeprefix(prefix)] = max(found.get(name.removeprefix(prefix), 0), int(value))
    return found

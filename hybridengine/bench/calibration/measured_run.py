"""Measurements of a run in the terms of a plan: lengths from its metrics, seconds of each call from its timeline.

As in a plan, a call begins when its ranks are free and the calls that it reads have ended, and ends with its last rank.
It thus includes the time in which ranks wait for each other, which the metric `time/PHASE_s` counts twice.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

from hybridengine.bench.calibration.fitting import MeasuredRun
from hybridengine.config import load_config
from hybridengine.errors import ConfigError, DataError
from hybridengine.planning.costs.dataflows import Call
from hybridengine.planning.costs.lengths import Lengths
from hybridengine.planning.costs.workload import workload_of
from hybridengine.report import keys
from hybridengine.report.step_rows import CONFIG_FILE, METRICS_FILE, Row, latest_rows, read_rows
from hybridengine.report.timeline import TIMELINE_FILE, Span, read_timeline

WARM_STEPS = 2
"""Number of initial steps that are not counted, because first requests and allocations take longer."""
FEWEST_STEPS = 3


def read_run(folder: str | Path) -> MeasuredRun:
    """Return the measurements of a run, without its first steps; a ConfigError or DataError if its folder lacks any."""
    folder = Path(folder)
    for name in (CONFIG_FILE, METRICS_FILE, TIMELINE_FILE):
        if not (folder / name).is_file():
            raise ConfigError(f"{folder} has no {name}; name the folder of a run, such as runs/arithmetic")
    config = load_config(folder / CONFIG_FILE, dry_run=True)
    rows = _counted(folder)[WARM_STEPS:]
    if len(rows) < FEWEST_STEPS:
        raise DataError(
            f"{folder} has {len(rows)} steps that count, and {FEWEST_STEPS} are needed: the first {WARM_STEPS} warm up,"
            " and those with an evaluation are left out; let it run for more steps, with run.eval_every=0 for"
            f" {WARM_STEPS + FEWEST_STEPS + 1}"
        )
    lengths = _lengths_of(str(folder), config.rollout.max_response_tokens, rows)
    prompt_tokens = statistics.fmean(
        float(row.get(keys.TOKENS) or 0.0) / config.rows_per_step
        - float(row[keys.RESPONSE_TOKENS_MEAN] or 0.0)
        for row in rows
    )
    workload = workload_of(config, lengths, prompt_tokens)
    spans = defaultdict[int | None, list[Span]](list)
    for span in read_timeline(folder / TIMELINE_FILE).spans:
        spans[span.step].append(span)
    steps = [call_seconds(workload.calls, spans[int(row[keys.STEP] or 0)]) for row in rows]
    phases = defaultdict[str, float](float)
    for call, seconds in zip(workload.calls, zip(*steps, strict=True), strict=True):
        made = [value for value in seconds if value is not None]
        if not made:
            raise DataError(
                f"the timeline has no {call}, which the dataflow calls in each step; run it again"
            )
        phases[call.phase] += statistics.median(made)
    return MeasuredRun(
        str(folder),
        config,
        workload,
        dict(phases),
        statistics.median(float(row[keys.STEP_S] or 0.0) for row in rows),
        max(int(row.get(keys.memory_key("resident_bytes")) or 0) for row in rows),
        max(int(row.get(keys.PEAK_WEIGHT_BYTES) or 0) for row in rows),
        len(rows),
    )


def call_seconds(calls: Sequence[Call], spans: Sequence[Span]) -> list[float | None]:
    """Return the seconds of each call of a step, None if it was not made; of repeated calls, the first spans count."""
    by_name = defaultdict[str, dict[tuple[str, str], list[Span]]](dict)
    for span in sorted(spans, key=lambda span: span.start_s):
        by_name[span.name].setdefault((span.pool, span.row), []).append(span)
    made, free = Counter[str](), dict[str, float]()
    ends, found = list[float | None](), list[float | None]()
    for call in calls:
        number = made[str(call)]
        made[str(call)] += 1
        own = [spans[number] for spans in by_name[str(call)].values() if len(spans) > number]
        if not own:
            ends.append(None)
            found.append(None)
            continue
        before = [end for read in call.reads if (end := ends[read]) is not None]
        before += [free[span.pool] for span in own if span.pool in free]
        end = max(span.end_s for span in own)
        begin = max(before, default=min(span.start_s for span in own))
        free |= {span.pool: end for span in own}
        ends.append(end)
        found.append(max(end - begin, 1e-6))  # resolution of a timeline
    return found


def _counted(folder: Path) -> list[Row]:
    """Return the rows of training steps without an evaluation."""
    return [
        row
        for row in latest_rows(read_rows(folder))
        if row.get(keys.STEP_S) is not None and row.get(keys.SCORE_MEAN) is None
    ]


def run_lengths(folder: str | Path, max_tokens: int) -> Lengths:
    """Return the response lengths of a run, cut to `max_tokens`; raise DataError if its metrics lack them."""
    rows = _counted(Path(folder))
    if not rows:
        raise DataError(
            f"lengths {folder}: {METRICS_FILE} has no steps; name a run that has trained, or a file"
        )
    return _lengths_of(str(folder), max_tokens, rows)


def _lengths_of(name: str, max_tokens: int, rows: Sequence[Row]) -> Lengths:
    names = [keys.response_tokens_key(percent) for percent in keys.LENGTH_SHARES]
    if any(row.get(name) is None for row in rows for name in names):
        raise DataError(
            f"{name}: the metrics have no {names[0]} to {names[-1]}; they are of an older version: run it again"
        )
    return Lengths.between(
        name,
        [percent / 100 for percent in keys.LENGTH_SHARES],
        [[float(row[name] or 0.0) for name in names] for row in rows],
        max_tokens,
    )

"""What a run has taken, as plans count it: lengths from its metrics, seconds of each call from its timeline.

A call's seconds are the mean of what its ranks spend in it. Where all ranks meet in a call, to put statistics together,
those that are early wait there for what the calls before it have left uneven: the rank that comes last says what the call
itself takes, and the others' waits count as part of the calls with a model before it, in proportion. The metrics'
`time/PHASE_s` is the slowest rank's: ranks that are early begin the next call early, and then wait in it, so that the sum
of the slowest ranks' seconds is more than the step.
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
from hybridengine.planning.dataflows import Call, Work
from hybridengine.planning.lengths import Lengths
from hybridengine.planning.workload import Workload, workload_of

CONFIG_FILE = "config.yaml"
WARM_STEPS = 2
"""First steps of a run, whose first requests and allocations take longer."""
FEWEST_STEPS = 3
MEETINGS = ("map", "measure")
"""Methods that put together what all ranks have."""


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
            f"{folder} has {len(rows)} steps that count, and {FEWEST_STEPS} are needed: the first {WARM_STEPS} warm up,"
            " and those with an evaluation are left out; let it run for more steps, with run.eval_every=0 for"
            f" {WARM_STEPS + FEWEST_STEPS + 1}"
        )
    lengths = lengths_of(str(folder), config.rollout.max_response_tokens, rows)
    workload = workload_of(config, lengths, prompt_tokens_of(config, rows))
    spans = defaultdict[int, list[Span]](list)
    for span in read_timeline(folder / TIMELINE_FILE).spans:
        if span.step is not None:
            spans[span.step].append(span)
    phases = phase_seconds(workload.calls, [spans[int(row[keys.STEP] or 0)] for row in rows])
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


def phase_seconds(calls: Sequence[Call], steps: Sequence[Sequence[Span]]) -> dict[str, float]:
    """Phase -> seconds of a step, medians of the steps.

    Raises:
        DataError: no step has one of the calls.
    """
    seconds = [call_seconds(calls, spans) for spans in steps]
    phases: dict[str, float] = {}
    for place, call in enumerate(calls):
        found = [value for step in seconds if (value := step[place]) is not None]
        if not found:
            raise DataError(
                f"the timeline has no {call}, which the dataflow calls in each step; run it again"
            )
        phases[call.phase] = phases.get(call.phase, 0.0) + statistics.median(found)
    return phases


def call_seconds(calls: Sequence[Call], spans: Sequence[Span]) -> list[float | None]:
    """Of each call of a step, as above; None where the step has no such call.

    Args:
        spans: of one step; where a call is made more often than the dataflow does, as for an evaluation, the first ones
            count.
    """
    by_name = defaultdict[str, dict[tuple[str, str], list[float]]](dict)
    for span in sorted(spans, key=lambda span: span.start_s):
        by_name[span.name].setdefault((span.pool, span.row), []).append(span.end_s - span.start_s)
    made: dict[str, int] = defaultdict(int)
    before: list[int] = []  # calls with a model since the last meeting
    found: list[float | None] = []
    for call in calls:
        number = made[str(call)]
        made[str(call)] += 1
        own = [seconds[number] for seconds in by_name[str(call)].values() if len(seconds) > number]
        if not own:
            found.append(None)
            continue
        found.append(statistics.fmean(own))
        if call.method in MEETINGS:
            found[-1] = min(own)
            _share_out(found, before, statistics.fmean(own) - min(own))
            before = []
        elif call.work is not Work.HOST:
            before.append(len(found) - 1)
    return found


def _share_out(found: list[float | None], places: Sequence[int], waited_s: float) -> None:
    """Add what ranks have waited in a meeting to the calls before it, in proportion."""
    seconds = {place: found[place] or 0.0 for place in places}
    total = sum(seconds.values())
    for place, own in seconds.items():
        found[place] = own + waited_s * own / total if total else own


def _counts(row: Row) -> bool:
    """Whether it is a step of training, and no evaluation came with it."""
    return row.get(keys.STEP_S) is not None and row.get(keys.SCORE_MEAN) is None


def run_lengths(folder: str | Path, max_tokens: int) -> Lengths:
    """Lengths that the responses of a run had, cut to `max_tokens`.

    Raises:
        DataError: the folder has no steps, or they do not say.
    """
    rows = [row for row in latest_rows(read_rows(folder)) if _counts(row)]
    if not rows:
        raise DataError(
            f"lengths {folder}: {METRICS_FILE} has no steps; name a run that has trained, or a file"
        )
    return lengths_of(str(folder), max_tokens, rows)


def lengths_of(name: str, max_tokens: int, rows: Sequence[Row]) -> Lengths:
    """Lengths that the responses of some steps had, cut to `max_tokens`.

    Raises:
        DataError: the metrics do not say.
    """
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


def prompt_tokens_of(config: RunConfig, rows: Sequence[Row]) -> float:
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

"""Sections of curves: evaluation, training by prefix of the metrics' names, memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from hybridengine.metrics import keys
from hybridengine.metrics.report.blocks import Chart, ChartGroup, Section, unit_of
from hybridengine.metrics.report.charts import curve, curves
from hybridengine.metrics.report.colours import PALETTE
from hybridengine.metrics.report.run_record import RunRecord
from hybridengine.metrics.rows import METRICS_FILE, Row
from hybridengine.metrics.timeline import Reading

EVALUATION = "eval"
FIRST_PREFIXES = ("reward", "score", "kl", "throughput", "rollout", "actor", "critic")
"""Training curves that come first, in this order; others follow as the run wrote them."""
NUM_TOGETHER = 3
"""Charts up to which neighbouring prefixes share a heading."""
ELSEWHERE = {EVALUATION, "time", "transfer", "controller", "memory"}
"""Prefixes that have sections of their own."""
MEMORY_KEYS = (keys.PEAK_WEIGHT_BYTES, keys.REDUNDANT_BYTES)
MAX_MEMORY_CURVES = len(PALETTE)


def evaluation_section(run: RunRecord) -> Section:
    """What the run's evaluations measured."""
    charts, notes = _charts(run.rows, [key for key in metric_keys(run.rows) if prefix_of(key) == EVALUATION])
    if not charts:
        notes = [*notes, "The run was not evaluated, or not yet."]
    lead = "Held-out problems, answered greedily; step 0 is the model before training."
    return Section("evaluation", "Evaluation", [ChartGroup(charts)], lead, notes)


def training_section(run: RunRecord) -> Section:
    """Reward, KL, losses, entropy, lengths, throughput and what else the run measured, by prefix."""
    by_prefix: dict[str, list[str]] = {prefix: [] for prefix in FIRST_PREFIXES}
    for key in metric_keys(run.rows):
        if prefix_of(key) not in ELSEWHERE and key not in MEMORY_KEYS:
            by_prefix.setdefault(prefix_of(key), []).append(key)
    groups: list[ChartGroup] = []
    notes = list(run.notes.get(METRICS_FILE, []))
    for prefix, names in by_prefix.items():
        names.sort(key=lambda name: not name.endswith("/mean"))  # before counters, which step 0 has already
        charts, unknown = _charts(run.rows, names)
        notes += unknown
        if not charts:
            continue
        if groups and len(groups[-1].charts) + len(charts) <= NUM_TOGETHER:
            before = groups.pop()
            prefix, charts = f"{before.heading}, {prefix}", [*before.charts, *charts]
        groups.append(ChartGroup(charts, heading=prefix))
    if not groups and not notes:
        notes = [f"{METRICS_FILE} has no training step yet."]
    return Section(
        "training", "Training", groups, "What each step measured, by the names of metrics.jsonl.", notes
    )


def memory_section(run: RunRecord) -> Section:
    """Bytes of weights per step, and what was read off the ranks over time."""
    named = [key for key in metric_keys(run.rows) if key in MEMORY_KEYS or prefix_of(key) == "memory"]
    charts, notes = _charts(run.rows, named)
    groups = [ChartGroup(charts, heading="per step")] if charts else []
    by_name: dict[str, list[Reading]] = defaultdict(list)
    for reading in run.timeline.readings:
        by_name[reading.name].append(reading)
    if by_name:
        over_time = [_reading_chart(name, readings) for name, readings in by_name.items()]
        groups.append(ChartGroup(over_time, heading="over time", wide=True))
    if not groups:
        notes = [*notes, "The run has measured no memory."]
    return Section(
        "memory", "Memory", groups, "Of the rank with the most, unless a drawing says otherwise.", notes
    )


def metric_keys(rows: Sequence[Row]) -> list[str]:
    """All metrics of the rows in order of first appearance, without the step."""
    return [key for key in dict.fromkeys(key for row in rows for key in row) if key != keys.STEP]


def prefix_of(key: str) -> str:
    """ "actor/lr" -> "actor"; a name without a slash is a prefix of its own."""
    return key.split("/", 1)[0]


def column(rows: Sequence[Row], key: str) -> tuple[list[int], list[float | None]]:
    """Steps that have the metric, and its values."""
    present = [row for row in rows if key in row]
    return [int(row[keys.STEP] or 0) for row in present], [row[key] for row in present]


def _charts(rows: Sequence[Row], names: Sequence[str]) -> tuple[list[Chart], list[str]]:
    """A curve for every metric, and notes on those that have no finite value."""
    charts, notes = [], []
    for key in names:
        steps, values = column(rows, key)
        if all(value is None for value in values):
            notes.append(f"{key} was never finite.")
        else:
            charts.append(curve(key, unit_of(key), steps, values))
    return charts, notes


def _reading_chart(name: str, readings: Sequence[Reading]) -> Chart:
    """A curve per rank; of more ranks than there are colours, those that reached the highest values."""
    by_row: dict[str, list[Reading]] = defaultdict(list)
    for reading in sorted(readings, key=lambda reading: reading.time_s):
        by_row[f"{reading.node} {reading.row}"].append(reading)
    highest = sorted(by_row, key=lambda row: -max(reading.value for reading in by_row[row]))
    shown = sorted(highest[:MAX_MEMORY_CURVES], key=list(by_row).index)
    first_s = min(reading.time_s for reading in readings)
    lines = {
        row: ([one.time_s - first_s for one in by_row[row]], [one.value for one in by_row[row]])
        for row in shown
    }
    colours = dict(zip(shown, PALETTE, strict=False))
    others = f", the {len(shown)} highest of {len(by_row)} ranks" if len(by_row) > len(shown) else ""
    return curves(f"{name}{others}", unit_of(name), lines, colours, "seconds")

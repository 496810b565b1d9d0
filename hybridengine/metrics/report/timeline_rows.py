"""Section: what every rank did in the last steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hybridengine.metrics.report.blocks import ChartGroup, Section
from hybridengine.metrics.report.charts import Bar, bar_rows
from hybridengine.metrics.report.colours import phase_colours
from hybridengine.metrics.report.run_record import RunRecord
from hybridengine.metrics.timeline import TIMELINE_FILE, Span

MAX_STEPS = 3
"""Steps that are drawn, as long as they have no more than `MAX_SPANS`."""
MAX_SPANS = 4000
MAX_ROWS = 64


def timeline_section(run: RunRecord) -> Section:
    """A row per rank with a bar per span."""
    lead = f"The whole run: open {TIMELINE_FILE} in Perfetto (ui.perfetto.dev) or chrome://tracing."
    notes = run.notes.get(TIMELINE_FILE, [])
    spans, what = last_spans(run.timeline.spans)
    if not spans:
        notes = notes or [f"{TIMELINE_FILE} has no spans yet."]
        return Section("timeline", "Timeline", [], notes=notes)
    many_nodes = len({span.node for span in spans}) > 1

    def place(span: Span) -> tuple[str, str, int]:
        return span.pool, span.node if many_nodes else "", span.rank

    places = sorted({place(span) for span in spans}, key=lambda place: (place[0], place[2], place[1]))
    numbers = {place: number for number, place in enumerate(places[:MAX_ROWS])}
    names = {place(span): f"{span.node} {span.row}" if many_nodes else span.row for span in spans}
    if len(places) > MAX_ROWS:
        what += f" The first {MAX_ROWS} of {len(places)} ranks."
    first_s = min(span.start_s for span in spans)
    bars = [
        Bar(
            numbers[place(span)], depth, span.start_s - first_s, max(span.start_s, span.end_s) - first_s, span.name,
            span.phase, _details(span),
        )
        for span, depth in with_depths(span for span in spans if place(span) in numbers)
    ]  # fmt: skip
    chart = bar_rows(
        "What every rank did",
        [names[place] for place in numbers],
        bars,
        phase_colours(bar.phase for bar in bars),
        what,
    )
    return Section("timeline", "Timeline", [ChartGroup([chart], wide=True)], lead, notes)


def last_spans(spans: Sequence[Span]) -> tuple[list[Span], str]:
    """Spans of the last steps, and a sentence that says which they are."""
    steps = sorted({span.step for span in spans if span.step is not None})
    for num_steps in range(min(MAX_STEPS, len(steps)), 0, -1):
        first = steps[-num_steps]
        begin_s = min(span.start_s for span in spans if span.step is not None and span.step >= first)
        chosen = [
            span for span in spans if (span.start_s >= begin_s if span.step is None else span.step >= first)
        ]
        if len(chosen) <= MAX_SPANS:
            which = f"Steps {first} to {steps[-1]}." if num_steps > 1 else f"Step {steps[-1]}."
            return chosen, which
    last = sorted(spans, key=lambda span: span.start_s)[-MAX_SPANS:]
    return last, f"The last {len(last)} of {len(spans)} spans."


def with_depths(spans: Iterable[Span]) -> list[tuple[Span, int]]:
    """Every span with the number of spans of its rank around it, outer ones first."""
    around: dict[tuple[str, str, int], list[float]] = {}
    placed = []
    for span in sorted(spans, key=lambda span: (span.start_s, -span.end_s)):
        ends = around.setdefault((span.pool, span.node, span.rank), [])
        ends[:] = [end for end in ends if end > span.start_s and end >= span.end_s]
        placed.append((span, len(ends)))
        ends.append(span.end_s)
    return placed


def _details(span: Span) -> str:
    facts = {"role": span.role} | ({} if span.step is None else {"step": span.step})
    return ", ".join(f"{name} {value}" for name, value in facts.items())

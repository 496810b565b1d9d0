"""Section: bytes along every edge of the dataflow, and through the controller."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hybridengine.metrics import keys
from hybridengine.metrics.report.blocks import ChartGroup, Section, Table, format_value, unit_of
from hybridengine.metrics.report.charts import curve, stacked_bars
from hybridengine.metrics.report.colours import OTHER, PALETTE
from hybridengine.metrics.report.curves import column, metric_keys, prefix_of
from hybridengine.metrics.report.run_record import RunRecord

MAX_EDGES = len(PALETTE)
"""Edges that are told apart in the drawing; the table has all."""
OTHERS = "other edges"
_PREFIX, _ARROW = "transfer/", "->"


@dataclass(frozen=True)
class Edge:
    """Rows that one call produced and another one read."""

    producer: str
    consumer: str

    def __str__(self) -> str:
        return f"{self.producer} \N{RIGHTWARDS ARROW} {self.consumer}"


def edge_of(key: str) -> Edge | None:
    """The edge whose bytes the metric counts: "transfer/a.x->b.y_bytes" or "transfer/bytes/a.x->b.y"."""
    if not key.startswith(_PREFIX) or _ARROW not in key:
        return None
    name = key.removeprefix(_PREFIX).removeprefix("bytes/").removesuffix("_bytes")
    producer, consumer = name.split(_ARROW, 1)
    return Edge(producer, consumer)


def transfers_section(run: RunRecord) -> Section:
    """Bytes per edge and step, stacked, and over the run; what passed through the controller."""
    rows = [row for row in run.rows if (row[keys.STEP] or 0) >= 1]
    steps = [int(row[keys.STEP] or 0) for row in rows]
    num_bytes = {
        edge: np.asarray([row.get(key) or 0.0 for row in rows])
        for key in metric_keys(rows)
        if (edge := edge_of(key)) is not None
    }
    singles, blocks = [], []
    for key in metric_keys(rows):
        if prefix_of(key) in ("transfer", "controller") and edge_of(key) is None and key != keys.OVERHEAD_S:
            places, values = column(rows, key)
            if any(value is not None for value in values):
                singles.append(curve(key, unit_of(key), places, values))
    moved = {edge: values for edge, values in num_bytes.items() if values.any()}
    if moved:
        most = sorted(moved, key=lambda edge: -moved[edge].sum())
        parts = {str(edge): moved[edge].tolist() for edge in most[:MAX_EDGES]}
        colours = dict(zip(parts, PALETTE, strict=False)) | {OTHERS: OTHER}
        if len(most) > MAX_EDGES:
            parts[OTHERS] = np.sum([moved[edge] for edge in most[MAX_EDGES:]], axis=0).tolist()
        blocks.append(
            ChartGroup(
                [stacked_bars("Bytes of every edge, step by step", "bytes", steps, parts, colours)], wide=True
            )
        )
    if singles:
        blocks.append(ChartGroup(singles))
    if num_bytes:
        blocks.append(_table(num_bytes))
    notes = [] if blocks else ["The run has counted no transfers."]
    lead = "Rows that ranks fetched from other processes, by the call that produced them and the call that read them."
    return Section("transfers", "Transfers", blocks, lead, notes)


def _table(num_bytes: dict[Edge, np.ndarray]) -> Table:
    rows = [
        (
            edge.producer,
            edge.consumer,
            format_value(float(values.sum()), "bytes"),
            format_value(float(values.mean()), "bytes"),
        )
        for edge, values in sorted(num_bytes.items(), key=lambda entry: -entry[1].sum())
    ]
    return Table(
        "Edges, the largest first", ("produced by", "read by", "total", "mean per step"), rows, num_names=2
    )

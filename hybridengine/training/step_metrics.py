"""Metrics of one iteration's calls: seconds, and bytes moved between them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from hybridengine.controller.calls import CallRecord
from hybridengine.planning.costs.dataflows import phase_of_call
from hybridengine.report import keys


def call_metrics(
    records: Sequence[CallRecord], payload_bytes: int, begin: float, end: float
) -> dict[str, float]:
    """Return the metrics of one iteration's calls.

    They are the seconds by phase, the bytes that moved between ranks and through the controller, the overhead of the
    controller, and the largest memory of a rank's process after any call.

    Args:
        begin, end: start and end of the iteration, in seconds since the epoch.
    """
    seconds, edges = defaultdict[str, float](float), Counter[str]()
    for record in records:
        seconds[keys.time_key(phase_of_call(record.role, record.method))] += record.seconds
        for producer, num_bytes in record.transferred.items():
            edges[f"transfer/{producer}->{record}_bytes"] += num_bytes
    held = defaultdict[str, int](int)
    for by_name in (by_name for record in records for by_name in record.held_bytes.values()):
        for name, num_bytes in by_name.items():
            held[keys.memory_key(name)] = max(held[keys.memory_key(name)], num_bytes)
    spans = sorted(span for record in records for span in record.spans.values())
    busy, last = 0.0, begin
    for start, stop in spans:
        busy += max(0.0, min(stop, end) - max(start, last))
        last = max(last, stop)
    return {
        **seconds,
        **edges,
        **held,
        keys.TRANSFER_BYTES: sum(edges.values()),
        keys.PAYLOAD_BYTES: payload_bytes,
        keys.OVERHEAD_S: end - begin - busy,
    }

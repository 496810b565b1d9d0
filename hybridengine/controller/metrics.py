"""Prometheus metrics of ranks and of the controller, recorded through Ray.

Ray's agent on each node exports the metrics of the processes there, with `ray_` before every name and `_total` after that
of a counter. Labels of a rank are `run`, `pool`, `rank`, `host` (name), and for its calls `role` and `phase`.
"""

from __future__ import annotations

import contextlib
import math
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import ray
from ray.util.metrics import Counter, Gauge

from hybridengine.controller.failures import Outcome
from hybridengine.files import writing
from hybridengine.planning.costs.dataflows import phase_of_call

COUNTERS = {
    "wait_seconds": "Seconds between two calls",
    "fetch_seconds": "Seconds of calls until their input rows were available",
    "fetched_bytes": "Bytes of rows read from other processes",
}
"""Counters of a rank, without the prefix."""
PHASE_COUNTERS = {
    "call_seconds": "Seconds in calls",
    "switch_bytes": "Bytes of weights received in switches and pushes",
    "tokens": "Tokens drawn, or else of the rows read; counted by one rank of each replica",
}
"""Counters of a rank by role and phase."""
MEMORY, STEP = "memory_bytes", "step"
"""Gauges: memory held by a rank's process after its last call, by `kind`, and metrics of the newest step, by `metric`."""
REFRESH_S = 1.0
"""Seconds after which gauges are set again: Ray exports one only if it was set since the last export."""


def full_name(name: str) -> str:
    """Return the name under which a metric is recorded."""
    return f"hybridengine_{name}"


@dataclass(frozen=True)
class Work:
    """A rank's work in a call."""

    role: str
    method: str
    tokens: int = 0
    switch_bytes: int = 0


class RankMetrics:
    """Metrics of this process, which is a rank."""

    def __init__(self, run: str, pool: str, rank: int) -> None:
        place = {"run": run, "pool": pool, "rank": str(rank), "host": socket.gethostname()}
        labels = dict.fromkeys(COUNTERS, (*place,)) | dict.fromkeys(PHASE_COUNTERS, (*place, "role", "phase"))
        self._counters = {
            name: Counter(full_name(name), text, labels[name]).set_default_tags(place)
            for name, text in (COUNTERS | PHASE_COUNTERS).items()
        }
        self._memory = Gauge(
            full_name(MEMORY),
            "Bytes of memory held by a rank's process after its last call",
            (*place, "kind"),
        ).set_default_tags(place)
        self._ended, self._held = math.inf, dict[str, int]()
        _Refresher(self._set_memory).start()

    def count(self, work: Work, outcome: Outcome) -> None:
        """Add an ended call."""
        phase = {"role": work.role, "phase": phase_of_call(work.role, work.method)}
        self._add("wait_seconds", outcome.begin - self._ended)
        self._add("fetch_seconds", outcome.fetch_seconds)
        self._add("fetched_bytes", sum(outcome.transferred.values()))
        self._add("call_seconds", outcome.end - outcome.begin, phase)
        self._add("switch_bytes", work.switch_bytes, phase)
        self._add("tokens", work.tokens, phase)
        self._ended, self._held = outcome.end, outcome.held_bytes

    def _add(self, name: str, value: float, tags: dict[str, str] | None = None) -> None:
        if value > 0:  # 0 makes no series; a clock may have been set back
            self._counters[name].inc(value, tags or {})

    def _set_memory(self) -> None:
        for name, num_bytes in self._held.items():  # read by the thread that uses the device
            self._memory.set(num_bytes, {"kind": name.removesuffix("_bytes")})


class StepMetrics:
    """Metrics of a run's steps, by the keys of metrics.jsonl; a context manager that ends their export."""

    def __init__(self, run: str) -> None:
        self._row: Mapping[str, float | int | None] = {}
        self._gauge = Gauge(
            full_name(STEP), "Metrics of the newest step, by key", ("run", "metric")
        ).set_default_tags({"run": run})
        self._refresher = _Refresher(self._set)

    def record(self, row: Mapping[str, float | int | None]) -> None:
        """Export a row in place of earlier values; keys that it does not have keep theirs."""
        self._row = {**self._row, **row}

    def _set(self) -> None:
        for key, value in self._row.items():
            self._gauge.set(math.nan if value is None else value, {"metric": key})

    def __enter__(self) -> StepMetrics:
        self._refresher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._refresher.stop()


class _Refresher(threading.Thread):
    """Thread that sets gauges again and again."""

    def __init__(self, record: Callable[[], None]) -> None:
        super().__init__(name="metrics", daemon=True)
        self._record, self._ends = record, threading.Event()

    def run(self) -> None:
        while not self._ends.wait(REFRESH_S):
            self._record()

    def stop(self) -> None:
        self._ends.set()
        self.join()


def work_of(role: str, method: str, arguments: Iterable[Any], result: Any, *, is_source: bool) -> Work:
    """Return what a call has done, from its arguments and its result.

    Tokens are those drawn, or else the prompt and response tokens of the rows read; only sources count them.
    """
    received = result.get("received_bytes", 0) if isinstance(result, dict) else 0
    tokens = 0
    if is_source:
        read = sum(_num_tokens(one, "prompt_lengths", "response_lengths") for one in arguments)
        tokens = getattr(result, "num_tokens", 0) or _num_tokens(result, "response_lengths") or read
    return Work(role, method, tokens, received)


def _num_tokens(rows: Any, *columns: str) -> int:
    """Return the sum of columns of rows, 0 for what does not have them all."""
    from tensordict import TensorDictBase

    if not isinstance(rows, TensorDictBase) or not set(columns) <= set(rows.keys()):
        return 0
    return sum(int(rows[column].sum()) for column in columns)


def export_addresses() -> list[str]:
    """Return host:port of each live node of the cluster whose Ray exports metrics."""
    found = ((node["NodeManagerAddress"], node["MetricsExportPort"]) for node in ray.nodes() if node["Alive"])
    return sorted(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in found if port > 0)


def targets_file(run_folder: Path) -> Path:
    """Return the file with the addresses to scrape, in the folder of all runs: Prometheus finds the files of a folder."""
    return run_folder.with_name(f"{run_folder.name}.prometheus.json")


@contextlib.contextmanager
def metrics_targets(run_folder: Path) -> Iterator[None]:
    """Keep the addresses to scrape in `targets_file` during the run; no file if there are none."""
    path, addresses = targets_file(run_folder), export_addresses()
    if addresses:
        partial = path.with_suffix(".partial")
        with writing(path):
            partial.write_bytes(msgspec.json.encode([{"targets": addresses}]))
            partial.rename(path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)

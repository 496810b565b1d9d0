"""A run's metrics, as Prometheus reads them from Ray, and its logs of JSON, against the run's own files."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

import psutil
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from hybridengine.controller.metrics import targets_file
from hybridengine.planning.costs.dataflows import phase_of_call
from hybridengine.report import keys
from hybridengine.report.step_rows import Row, read_rows
from hybridengine.report.timeline import Span, Timeline, read_timeline
from tests.full.tiny_runs import SECTIONS
from tests.unit.exported_metrics import CONTROLLER_NAMES, NAMES, RANK_LABELS
from tests.warm_workers import warm_program

pytestmark = pytest.mark.timeout(600)

COMMAND = str(Path(sys.executable).with_name("hybridengine"))
STEPS, LIMIT_S = 12, 300.0
"""Steps, enough for pages in their midst, of which Ray writes one a second; and time limit of the run."""
TWO_RANKS = {
    "run": {"name": "watched", "steps": STEPS, "seed": 7, "log_format": "json"},
    "cluster": {"ranks_per_node": [2]},
    "actor": SECTIONS["actor"] | {"parallel": "1-2-1", "mini_batches": 1},
    "critic": SECTIONS["critic"] | {"parallel": "2-1-1", "mini_batches": 1},
    "reference": {"parallel": "1-1-2"},
}
DRAWN = (
    "actor.generate_sequences",
    "actor.compute_log_probs",
    "actor.update",
    "critic.update",
    "actor.switch_to_generate",
)
"""Calls of which the timeline has every one."""


@dataclass
class Observed:
    """What was seen of a run from outside, and what it has written."""

    folder: Path
    pages: list[list[Sample]] = field(default_factory=list)
    """Metrics of this project on each page, one after another."""
    listening: set[str] = field(default_factory=set)
    """Addresses at which the page's port listened."""
    controller_lines: list[str] = field(default_factory=list)
    rank_lines: list[list[str]] = field(default_factory=list)
    """Lines of stderr of each rank."""
    stdout: str = ""

    @property
    def rows(self) -> list[Row]:
        return read_rows(self.folder)

    @property
    def timeline(self) -> Timeline:
        return read_timeline(self.folder / "timeline.json")


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory, warm_ray: dict[str, str]) -> Iterator[Observed]:
    folder = tmp_path_factory.mktemp("observed")
    config = folder / "watched.yaml"
    config.write_text(yaml.safe_dump(SECTIONS | TWO_RANKS))
    with contextlib.ExitStack() as ends:
        ray_folder = ends.enter_context(tempfile.TemporaryDirectory(prefix="he-", dir="/tmp"))  # short
        stdout, stderr = (ends.enter_context((folder / name).open("w+")) for name in ("out", "err"))
        environment = warm_ray | {"RAY_TMPDIR": ray_folder, "RAY_metrics_report_interval_ms": "1000"}
        command = warm_program(COMMAND, "train", config, f"run.folder={folder / 'runs'}")
        process = subprocess.Popen(command, stdout=stdout, stderr=stderr, env=os.environ | environment)
        ends.callback(process.kill)
        seen, deadline = Observed(folder / "runs" / "watched"), time.monotonic() + LIMIT_S
        while process.poll() is None and time.monotonic() < deadline:
            scrape(seen)
            time.sleep(0.2)
        assert process.poll() == 0, (folder / "err").read_text()[-2000:]
        seen.stdout = (folder / "out").read_text()
        seen.controller_lines = (folder / "err").read_text().splitlines()
        logs = Path(ray_folder, "ray", "session_latest", "logs")
        files = [file.read_text() for file in logs.glob("worker-*.err")]
        seen.rank_lines = [text.splitlines() for text in files if "actor_name:rank" in text]
        yield seen


def scrape(seen: Observed) -> None:
    """Read the page at the address that the run's file names, as Prometheus would."""
    try:
        ((target,),) = (one["targets"] for one in json.loads(targets_file(seen.folder).read_text()))
        with urllib.request.urlopen(f"http://{target}/metrics", timeout=10) as answer:
            families = list(text_string_to_metric_families(answer.read().decode()))
    except (OSError, FileNotFoundError):  # not started, or ending
        return
    found = [sample for family in families for sample in family.samples if "hybridengine" in sample.name]
    seen.pages.append(found)
    if not seen.listening:
        port = int(target.rpartition(":")[2])
        listeners = [one.laddr for one in psutil.net_connections("tcp") if one.status == psutil.CONN_LISTEN]
        seen.listening |= {address[0] for address in listeners if address and address[1] == port}


def by_labels(page: list[Sample], name: str, *labels: str) -> dict[tuple[str, ...], float]:
    """Return labels -> value of a metric; each may occur once."""
    found = [(tuple(one.labels[label] for label in labels), one.value) for one in page if one.name == name]
    assert len(found) == len(dict(found)), f"{name} has several series with the same {labels}"
    return dict(found)


def test_the_page_is_that_of_every_rank_and_on_loopback_only(observed: Observed):
    assert observed.listening == {"127.0.0.1"}
    last = observed.pages[-1]
    assert {one.name for one in last} == NAMES
    for one in last:
        assert one.labels["run"] == "watched"
        if one.name not in CONTROLLER_NAMES:
            assert one.labels.keys() >= RANK_LABELS
            assert (one.labels["pool"], one.labels["host"]) == ("main", socket.gethostname())
    assert {one.labels["rank"] for one in last if one.name not in CONTROLLER_NAMES} == {"0", "1"}
    assert not targets_file(observed.folder).exists(), "the page has ended with the run"


def test_seconds_are_those_of_the_timeline(observed: Observed):
    """Each counter is the sum of the first bars of its rank and call: the page may be older than the last of them."""
    bars = defaultdict[tuple[str, str, str], list[Span]](list)
    for span in observed.timeline.spans:
        if span.name in DRAWN:
            role, _, method = span.name.partition(".")
            bars[str(span.rank), role, phase_of_call(role, method)].append(span)
    assert len(bars) == 2 * len(DRAWN)
    name = "ray_hybridengine_call_seconds_total"
    exported = by_labels(observed.pages[-1], name, "rank", "role", "phase")
    for place, spans in bars.items():
        sums = accumulate(span.end_s - span.start_s for span in sorted(spans, key=lambda span: span.start_s))
        assert any(exported[place] == pytest.approx(seconds, abs=1e-4) for seconds in sums), place


def test_bytes_and_tokens_are_those_of_the_steps(observed: Observed):
    last = observed.pages[-1]
    (received,) = {row[keys.RECEIVED_BYTES] for row in observed.rows[1:]}
    switches = [span for span in observed.timeline.spans if span.name == "actor.switch_to_generate"]
    switched = by_labels(last, "ray_hybridengine_switch_bytes_total", "rank")
    # A row has the bytes of the rank that received most; on a page, the others may have counted one switch more.
    assert received and {*switched.values()} & {received * n for n in range(1, len(switches) // 2 + 1)}
    # A page may be that of one rank after a step, and of the other before it.
    trained = set[float]()
    for page in observed.pages:
        tokens = by_labels(page, "ray_hybridengine_tokens_total", "phase", "rank")
        trained.add(sum(value for (phase, _), value in tokens.items() if phase == "update_actor"))
    sums = list(accumulate(row[keys.TOKENS] or 0 for row in observed.rows[1:]))
    assert max(trained) <= sums[-1]
    assert trained & {*sums}


def test_memory_is_that_after_a_call(observed: Observed):
    """The last page may be that of a call after the last step, which the timeline does not have."""
    known = {(str(one.rank), one.value) for one in observed.timeline.readings}
    pages = [by_labels(page, "ray_hybridengine_memory_bytes", "rank", "kind") for page in observed.pages]
    assert pages[-1].keys() == {("0", "resident"), ("1", "resident")}
    seen = {(rank, value) for page in pages for (rank, _), value in page.items()}
    assert {rank for rank, _ in seen & known} == {"0", "1"}


def test_the_controller_exports_the_newest_row(observed: Observed):
    rows = {row[keys.STEP]: row for row in observed.rows}
    pages = [by_labels(page, "ray_hybridengine_step", "metric") for page in observed.pages]
    pages = list(filter(None, pages))
    for page in pages:  # possibly while a row takes the place of another
        for (key,), value in page.items():
            assert value in {row.get(key) for row in rows.values()}, key
    newest = ((page, rows[int(page["step",])]) for page in pages)
    assert any(all(page[key,] == value for key, value in row.items()) for page, row in newest)


def parsed(lines: list[str]) -> list[Mapping[str, object]]:
    """Return lines of JSON; those that begin with a colon are marks of Ray's."""
    return [json.loads(line) for line in lines if not line.startswith(":")]


def test_the_controller_logs_json_alone(observed: Observed):
    logged = parsed(observed.controller_lines)
    assert not observed.stdout
    for line in logged:
        assert (line["run"], line["role"], line["rank"]) == ("watched", "controller", None)
        assert line["host"] == socket.gethostname()
    assert [line["metrics"] for line in logged if "metrics" in line] == observed.rows
    assert any(f"checkpoint of step {STEPS} saved" in str(line["message"]) for line in logged)


def test_every_rank_logs_json_alone(observed: Observed):
    assert len(observed.rank_lines) == 2
    for rank, logged in enumerate(
        sorted(map(parsed, observed.rank_lines), key=lambda one: str(one[0]["rank"]))
    ):
        assert {(line["run"], line["rank"], line["host"]) for line in logged} == {
            ("watched", rank, socket.gethostname())
        }
        assert {line["role"] for line in logged} <= {"pool", "actor", "critic", "reference"}
        assert f"rank {rank} of 2 has joined pool 'main'" in {line["message"] for line in logged}

"""A Ray cluster of three raylets: 6 ranks in the order of their addresses, roles on pools of their own, and a node
that disappears."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from hybridengine.checkpoints.folders import CHECKPOINTS_FOLDER
from hybridengine.report import keys
from hybridengine.report.step_rows import Row, latest_rows, read_rows
from hybridengine.report.timeline import TIMELINE_FILE, Span, read_timeline
from tests.full.probe_workers import WIDE_BYTES
from tests.full.programs.several_nodes import NUM_ROWS
from tests.full.tiny_runs import SECTIONS, Run, value
from tests.warm_workers import warm_program

pytestmark = pytest.mark.timeout(900)

LIMIT_S = 600
STEPS = 2
POOLS = {
    "values": {"roles": ["critic"], "ranks_per_node": [1, 1]},
    "frozen": {"roles": ["reference"], "ranks_per_node": [1]},
    "scoring": {"roles": ["reward"], "ranks_per_node": [1]},
}
"""Pools of the other roles, next to the actor's 2 ranks on two nodes."""


@dataclass(frozen=True)
class Seen:
    """Results of the process with the cluster, and the files of its run."""

    cluster: dict[str, Any]
    rows: list[Row]
    spans: Sequence[Span]
    console: str
    folder: Path
    """Folder of that process."""


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory, warm_ray: dict[str, str]) -> Seen:
    folder = tmp_path_factory.mktemp("nodes")
    changes = {
        "run": SECTIONS["run"] | {"steps": STEPS, "folder": str(folder / "runs")},
        "cluster": {"ranks_per_node": [1, 1], "pools": POOLS},
        "actor": SECTIONS["actor"] | {"parallel": "2-1-1"},
        "critic": SECTIONS["critic"] | {"parallel": "1-1-2"},  # same d: mini-batches have the same rows
        "reference": {"parallel": "1-1-1"},
    }
    (folder / "faults").mkdir()
    (folder / "faults" / f"{STEPS}-kill-node").touch()
    algorithm = {
        "name": "tests.full.faulty:Faulty",
        "faults": str(folder / "faults"),
        "checkpoints": str(folder / "runs" / "nodes" / CHECKPOINTS_FOLDER),
    }
    changes |= {"algorithm": algorithm, "checkpoint": {"every": 1}}
    (folder / "nodes.yaml").write_text(yaml.safe_dump(SECTIONS | changes))
    program = Path(__file__).with_name("several_nodes.py")
    done = subprocess.run(
        warm_program(program, folder / "nodes.yaml", folder / "seen.json"),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        cwd=Path(__file__).parents[3],
        env=os.environ | warm_ray,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    run = folder / "runs" / "nodes"
    timeline = read_timeline(run / TIMELINE_FILE)
    return Seen(
        json.loads((folder / "seen.json").read_text()),
        latest_rows(read_rows(run)),
        timeline.spans,
        done.stdout,
        run.parent,
    )


def test_ranks_are_numbered_by_the_addresses_of_their_nodes_as_numbers(seen: Seen):
    """The nodes join as .10, .2, .9; in textual order, .10 would come first."""
    light = seen.cluster["light"]
    assert [offer.split()[0] for offer in seen.cluster["offers"]] == ["127.0.0.2", "127.0.0.9", "127.0.0.10"]
    assert light["nodes"] == ["127.0.0.2"] * 2 + ["127.0.0.9"] * 2 + ["127.0.0.10"] * 2
    assert light["local_ranks"] == [0, 1] * 3
    assert light["worlds"] == [[rank, 6, "gloo"] for rank in range(6)]
    assert light["tp_sums"] == [2 * 10.0 + 2 * (rank // 2 * 2) + 1 for rank in range(6)]
    assert light["ports"] == light["ports_of_ray"] and len({*light["ports"].values()}) == 3


def test_rows_go_over_the_network_between_nodes(seen: Seen):
    """31 rows of 3-2-1, kept by the last stage's rank 4, go to the 6 ranks of 1-2-3."""
    light = seen.cluster["light"]
    assert light["narrowed"] == [[row, row] for row in range(NUM_ROWS)]
    per_rank = [6] + [5] * 5
    assert light["transferred"] == {"actor.wide": WIDE_BYTES * (NUM_ROWS - per_rank[4])}
    assert light["payload_bytes"] == 2 * 8 * NUM_ROWS, "the narrow rows, inside the ranks' answers"


def test_roles_on_pools_of_their_own_give_the_run_of_roles_on_one_pool(seen: Seen, run: Run):
    """The same dataflow with other layouts and six ranks instead of four: equal up to rounding."""
    assert [row[keys.STEP] for row in seen.rows] == list(range(STEPS + 1))
    for row, shared in zip(seen.rows, run.rows, strict=False):
        others = ("time/", "throughput/", "transfer/", "switch/", "controller/", "memory/", "reward/call")
        numbers = {key for key in shared if not key.startswith(others)}
        assert numbers <= row.keys()
        for key in numbers - {keys.LOG_PROB_ABS_DIFF_MAX}:
            assert row[key] == pytest.approx(shared[key], rel=2e-3, abs=2e-5), key
    for row in seen.rows[1:]:
        assert value(row, keys.TRANSFER_BYTES) > 0


def test_pools_work_at_the_same_time(seen: Seen):
    """Critic and actor update at once; if they share ranks, one follows the other."""
    assert {(span.pool, span.role) for span in seen.spans} >= {
        ("main", "actor"),
        ("main", "compute"),
        ("values", "critic"),
        ("frozen", "reference"),
        ("scoring", "reward"),
    }
    assert {span.node for span in seen.spans if span.role == "actor" and span.step == 1} == {
        "127.0.0.2",
        "127.0.0.9",
    }
    together = [overlap(seen.spans, step, "actor.update", "critic.update") for step in range(1, STEPS + 1)]
    assert max(together) > 0


def test_a_run_goes_on_where_a_node_disappears(seen: Seen):
    """Two nodes have room for all ranks. Other tests show that the resumed run computes the same results."""
    assert seen.cluster["left"] == ["127.0.0.2", "127.0.0.10"]
    failed = rf"failed in step {STEPS}: \S+ died on rank 1 \(.*node 127\.0\.0\.9\): "
    assert re.search(failed, seen.console), seen.console
    assert re.search(r"resuming after step 1\b", seen.console), seen.console
    gone = max(span.end_s for span in seen.spans if span.node == "127.0.0.9")
    assert {span.node for span in seen.spans if span.start_s > gone} == {"127.0.0.2", "127.0.0.10"}


def test_the_doctor_finds_nothing_to_mend_on_the_nodes_that_are_left(seen: Seen):
    found = seen.cluster["doctor"]
    assert [one for one in found if one["level"] == "problem"] == []
    texts = {one["subject"]: one["text"] for one in found if one["level"] == "ok"}
    assert "all 2 nodes see the same files there" in texts["shared files"]
    assert texts["ports"].startswith("2 nodes reach each other's ports")
    assert re.match(r"2 ranks meet and sum 64\.0 MiB right, in .* \(gloo\)", texts["links"])
    assert texts["clock"].startswith("clocks are within")
    assert not (seen.folder / "examined").exists()


def test_one_pool_works_in_turn(run: Run):
    spans = read_timeline(run.folder / TIMELINE_FILE).spans
    assert {span.pool for span in spans} == {""}
    assert all(overlap(spans, step, "actor.update", "critic.update") <= 0 for step in (1, 2, 3))


def overlap(spans: Sequence[Span], step: int, one: str, other: str) -> float:
    """Return the seconds in which the calls run at the same time on rank 0 of their pools; negative if they do not."""
    found = [
        next(span for span in spans if (span.step, span.rank, span.name) == (step, 0, name))
        for name in (one, other)
    ]
    return min(span.end_s for span in found) - max(span.start_s for span in found)

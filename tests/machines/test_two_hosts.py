"""Two hosts whose names resolve to their loopback, one Ray node each: a run over both, and ranks that cannot connect."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from hybridengine.report import keys
from hybridengine.report.step_rows import read_rows
from hybridengine.report.timeline import TIMELINE_FILE, read_timeline
from tests.full.tiny_runs import SECTIONS, value
from tests.machines.hosts import joined_hosts
from tests.machines.ray_nodes import RayCluster, warm_folder

pytestmark = pytest.mark.timeout(600)

ADDRESSES = ("10.77.0.1", "10.77.0.2")

WRONG_INTERFACE_THEN_TRAIN = """
import sys
from hybridengine.cli.main import main
from hybridengine.controller.pool import ResourcePool
from hybridengine.errors import WorkerError
pool = ResourcePool([1, 1], env={"GLOO_SOCKET_IFNAME": "lo"}, start_timeout_s=20)
try:
    pool.start()
except WorkerError as error:
    print(f"\\nFOUND {error}")
sys.exit(main(["train", sys.argv[1]]))
"""


@dataclass(frozen=True)
class Seen:
    """Output of the program on the first host, and the run's folder."""

    run: subprocess.CompletedProcess
    folder: Path


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory, warm_ray: dict[str, str]) -> Seen:
    folder = tmp_path_factory.mktemp("hosts")
    with joined_hosts(["first", "second"], shared=[folder, warm_folder(warm_ray)]) as network:
        cluster = RayCluster(network.hosts, warm_ray)
        changes = {
            "run": SECTIONS["run"] | {"steps": 1, "folder": str(folder / "runs")},
            "cluster": {"ranks_per_node": [1, 1], "address": cluster.address},
            # vLLM's own groups are over both hosts too.
            "actor": SECTIONS["actor"] | {"parallel": "1-2-1", "generate": "2-1"},
            "critic": SECTIONS["critic"] | {"parallel": "2-1-1"},
            "reference": {"parallel": "1-1-2"},
            "timeouts": {"start_s": 120, "call_s": 120},
        }
        (folder / "run.yaml").write_text(yaml.safe_dump(SECTIONS | changes))
        (folder / "program.py").write_text(WRONG_INTERFACE_THEN_TRAIN)
        run = cluster.run(folder / "program.py", folder / "run.yaml", check=False)
    return Seen(run, folder / "runs" / "run")


def test_a_run_over_two_hosts_trains(seen: Seen) -> None:
    assert seen.run.returncode == 0, seen.run.stdout
    rows = read_rows(seen.folder)
    assert [row[keys.STEP] for row in rows] == [0, 1]
    assert value(rows[1], keys.LOG_PROB_ABS_DIFF_MAX) < 1e-3
    spans = read_timeline(seen.folder / TIMELINE_FILE).spans
    assert {(span.rank, span.node) for span in spans} == {(rank, ADDRESSES[rank]) for rank in range(2)}


def test_ranks_that_do_not_meet_say_where_they_are_in_one_line(seen: Seen) -> None:
    """The interface that the environment names is used, even if it is the wrong one."""
    said = seen.run.stdout
    assert "Traceback" not in said, said
    assert re.search(
        r"^FOUND rank (0 on host first|1 on host second) \(Ray's node 10\.77\.0\.[12], GLOO_SOCKET_IFNAME='lo'\) did not "
        r"meet the other ranks: .*(Connection refused, remote=|closed by peer )\[127\.0\.0\.1\]:\d+.*; the nodes must "
        r"reach .*: unset GLOO_SOCKET_IFNAME where Ray is started .* open the ports .* between the nodes$",
        said,
        re.MULTILINE,
    ), said

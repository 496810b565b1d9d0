"""`scripts/load_server.py`, short: six clients of a real server, which is killed with its ranks in the middle."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clients.servers import ROOT

pytestmark = pytest.mark.timeout(1800)


def test_nothing_is_lost_when_the_server_is_killed_under_load(tmp_path: Path) -> None:
    report = tmp_path / "load.json"
    options = ["--clients", "6", "--minutes", "0.6", "--folder", tmp_path / "load", "--json", report]
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/load_server.py", *options],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1700,
    )
    assert done.returncode == 0, done.stdout
    found = json.loads(report.read_text())
    assert found["problems"] == []
    assert found["kinds"] == {"train": 1, "sample_base": 2, "score": 1, "complete": 1, "sample_saved": 1}
    assert found["requests_answered"] == found["requests_sent"] > 6
    assert found["steps"] >= 1
    for kind in ("forward_backward", "optim_step"):
        assert found["stored"][kind] == {"done": found["steps"]}
    assert found["restart_s"] > 0
    assert len(found["weights_sha256"]) == 64

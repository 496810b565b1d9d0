"""The Tinker server on a host of its own: its ranks are on two others, and the client, the published SDK, on a fourth."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hybridengine.bench.serve.server import KEY
from tests.clients.servers import CLIENT_PYTHON, ROOT, Server, result_of
from tests.clients.warm_model import write_random_model
from tests.machines.hosts import joined_hosts
from tests.machines.ray_nodes import COMMAND, RayCluster, warm_folder
from tests.warm_workers import warm_program

pytestmark = pytest.mark.timeout(1500)

CALLS = ROOT / "tests/clients/sdk_calls.py"
START_S, CLIENT_S, POLL_S = 600.0, 600.0, 1.0
ASKS = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1], timeout=5).read().decode())"


def without_ids(found: dict[str, Any]) -> dict[str, Any]:
    """Return a client's results without the names that differ between servers."""
    return {name: value for name, value in found.items() if name not in ("model_id", "sampler_weights")}


def test_a_server_on_a_third_host_answers_as_one_on_one_machine(tmp_path: Path, warm_ray: dict[str, str]):
    write_random_model(tmp_path / "model")
    alone = Server(tmp_path / "alone", tmp_path / "model")
    alone.start()
    try:
        expected = [result_of(alone.client(CALLS, part, cwd=tmp_path)) for part in ("losses", "sampling")]
    finally:
        alone.stop()
    names = ["first", "second", "front", "laptop"]
    with joined_hosts(names, shared=[tmp_path, warm_folder(warm_ray)]) as network:
        *ranks, front, laptop = network.hosts
        cluster = RayCluster([*ranks, front], warm_ray)
        sections = json.loads(alone.config.read_text())
        sections["run"] |= {"folder": str(tmp_path / "apart")}
        sections["cluster"] |= {"ranks_per_node": [1, 1], "address": cluster.address}
        sections["serve"] |= {
            "host": front.address,
            "port": 8000,
            "calls_file": str(tmp_path / "calls.jsonl"),
        }
        config = tmp_path / "apart.yaml"
        config.write_text(json.dumps(sections))
        with (tmp_path / "server.log").open("w") as log:
            front.start(
                *warm_program(COMMAND, "serve", config), env=cluster.variables, stdout=log, stderr=log
            )
        url, deadline = f"http://{front.address}:8000", time.monotonic() + START_S
        asked = (sys.executable, "-c", ASKS, f"{url}/api/v1/healthz")
        while '"ok"' not in laptop.run(*asked, check=False).stdout:
            assert time.monotonic() < deadline, (tmp_path / "server.log").read_text()
            time.sleep(POLL_S)
        key = {"TINKER_API_KEY": KEY, "TINKER_BASE_URL": url, "TINKER_TELEMETRY": "0", "PYTHONPATH": ""}
        found = [
            result_of(laptop.run(CLIENT_PYTHON, CALLS, part, limit_s=CLIENT_S, env=key).stdout)
            for part in ("losses", "sampling")
        ]
        crossed = network.sent_bytes()
    assert list(map(without_ids, found)) == list(map(without_ids, expected))
    # The client talks to the server alone, but for the hosts' search for each other's addresses; ranks exchange weights.
    assert min(crossed["laptop", "front"], crossed["front", "laptop"]) > 10**4
    assert max(crossed[pair] for pair in crossed if "laptop" in pair and "front" not in pair) < 2000
    assert min(crossed["first", "second"], crossed["second", "first"]) > 10**6
    (weights,) = (tmp_path / "apart").rglob("sampler_weights/stepped*/model.safetensors")
    assert weights.read_bytes() == (alone.saved(expected[0]["sampler_weights"]) / weights.name).read_bytes()

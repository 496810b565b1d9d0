"""`hybridengine launch node` on hosts that have IPv6 alone, no default route, and names that resolve to nothing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.machines.hosts import joined_hosts
from tests.machines.launching import launch_environment, processes_of_ray, trained_steps, write_run
from tests.machines.ray_nodes import warm_folder

pytestmark = pytest.mark.timeout(900)
NAMES = ("first", "second")
LIMIT_S = 600.0


def test_a_run_trains_over_hosts_without_names_and_ipv4(tmp_path: Path, warm_ray: dict[str, str]):
    config, folder = write_run(tmp_path, "six", steps=2), tmp_path / "launch"
    shared = [tmp_path, warm_folder(warm_ray)]
    with joined_hosts(NAMES, shared=shared, ip_version=6, own_name="unknown") as network:
        nodes = [
            host.start(
                *(sys.executable, "-m", "hybridengine.cli.main", "launch", "node", config),
                *("--hosts", ",".join(NAMES), "--index", index, "--launch-folder", folder),
                env=launch_environment(warm_ray),
            )
            for index, host in enumerate(network.hosts)
        ]
        assert [node.wait(LIMIT_S) for node in nodes] == [0, 0]
        for host in network.hosts:
            assert processes_of_ray(host) == []
    assert trained_steps(tmp_path, "six") == [0, 1, 2]
    assert not (folder / "token").exists()

"""A Ray cluster over hosts, one node on each, and commands of this project in it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from hybridengine.controller.cluster import QUIET_RAY
from tests.machines.hosts import ROOT, Host
from tests.warm_workers import warm_program

COMMAND = str(Path(sys.executable).with_name("hybridengine"))
PORT = 6379
AHEAD = ROOT / "tests/machines/ahead"
"""Folder in PYTHONPATH with which Python's clock is ahead."""
START_RAY = """
from tests.warm_workers import with_warm_workers
with_warm_workers(None)
from ray.scripts.scripts import main
main()
"""


class RayCluster:
    """Ray's nodes on hosts; the first host has the head node. They end with their hosts.

    The hosts must share the folder of the warm workers: `shared=[tmp_path, warm_folder(warm_ray)]`.
    """

    def __init__(
        self,
        hosts: Sequence[Host],
        warm_ray: Mapping[str, str],
        num_cpus: int = 2,
        options: Sequence[object] = (),
    ) -> None:
        """Start a node with `num_cpus` logical CPUs on each host, with workers that are forks of the warm process, and
        with more `options` of `ray start`."""
        self.hosts, first = list(hosts), hosts[0].address
        self.address = f"[{first}]:{PORT}" if ":" in first else f"{first}:{PORT}"
        paths = filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))
        plain = {"RAY_AUTH_MODE": "disabled", "PYTHONPATH": os.pathsep.join(paths)}
        self.variables: dict[str, str] = {**QUIET_RAY, **warm_ray, **plain}
        self._num_cpus = num_cpus
        for host in hosts:
            self.join(host, *options)

    def join(self, host: Host, *options: object, num_cpus: int | None = None, **variables: str) -> None:
        """Start a node on a host, or start it again, with more options of `ray start` and environment variables."""
        count = self._num_cpus if num_cpus is None else num_cpus
        head = ["--head", "--port", PORT, "--include-dashboard", "false"]
        where = head if host is self.hosts[0] else ["--address", self.address]
        offer = ["--node-ip-address", host.address, "--num-cpus", count, "--num-gpus", 0, *options]
        host.run(sys.executable, "-c", START_RAY, "start", *where, *offer, env=self.variables | variables)

    def join_ahead(self, host: Host, seconds: float) -> None:
        """Start a node on a host whose Python processes have a clock that is ahead; they come from no warm process."""
        offer = ["--node-ip-address", host.address, "--num-cpus", self._num_cpus, "--num-gpus", 0]
        cold = {name: value for name, value in self.variables.items() if name != "RAY_RUNTIME_ENV_HOOK"}
        paths = os.pathsep.join([str(AHEAD), self.variables["PYTHONPATH"]])
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--address", self.address, *offer]
        host.run(*command, env=cold | {"PYTHONPATH": paths, "AHEAD_S": str(seconds)})

    def run(
        self, *command: object, host: int = 0, limit_s: float = 300, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run Python with these arguments on one of the hosts, as a driver of the cluster."""
        variables = self.variables | {"RAY_ADDRESS": self.address}
        return self.hosts[host].run(*warm_program(*command), limit_s=limit_s, env=variables, check=check)


def warm_folder(warm_ray: Mapping[str, str]) -> Path:
    """Return the folder in which the warm process listens."""
    return Path(warm_ray["WARM_WORKERS"]).parent

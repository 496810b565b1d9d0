"""SLURM on hosts: a controller on the first, which runs no jobs, and a node on each of the others.

Debian's packages slurm-wlm and munge are needed (`make test-machines` installs them).
"""

from __future__ import annotations

import secrets
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tests.machines.hosts import Host

SOCKET = "/tmp/munge.socket"
CONFIGURATION = """
ClusterName=machines
SlurmctldHost={controller.name}({controller.address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={socket}
StateSaveLocation=/tmp/slurmctld
SlurmdSpoolDir=/tmp/slurmd
SlurmctldPidFile=/tmp/slurmctld.pid
SlurmdPidFile=/tmp/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SlurmdTimeout=20
KillWait=10
ReturnToService=2
MpiDefault=none
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class SlurmCluster:
    """A running SLURM, which ends with its hosts; `folder` is one that all hosts share."""

    def __init__(self, hosts: Sequence[Host], folder: Path, num_cpus: int = 2) -> None:
        """Start munge and SLURM's daemons, and wait until all nodes are idle."""
        self.controller, *self.nodes = hosts
        lines = [f"NodeName={one.name} NodeAddr={one.address} CPUs={num_cpus}" for one in self.nodes]
        text = CONFIGURATION.format(
            controller=self.controller, socket=SOCKET, folder=folder, nodes="\n".join(lines)
        )
        (folder / "slurm.conf").write_text(text)
        key = folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        self.variables = {"SLURM_CONF": str(folder / "slurm.conf")}
        files = {
            "key-file": key,
            "socket": SOCKET,
            "pid-file": "/tmp/munged.pid",
            "seed-file": "/tmp/munge.seed",
        }
        self.daemons: dict[str, subprocess.Popen[str]] = {}
        for host in hosts:
            log = "--log-file=/tmp/munged.log"
            host.run("munged", "--force", log, *(f"--{name}={file}" for name, file in files.items()))
            host.run("mkdir", "/tmp/slurmctld", "/tmp/slurmd")
        self.daemons[self.controller.name] = self.controller.start("slurmctld", "-D", env=self.variables)
        for node in self.nodes:
            self.daemons[node.name] = node.start("slurmd", "-D", "-N", node.name, env=self.variables)
        self.wait_for(
            lambda: self.say("sinfo", "-h", "-o", "%D %t").split() == [str(len(self.nodes)), "idle"], 120
        )

    def say(self, *command: object, env: Mapping[str, str] | None = None) -> str:
        """Return what a command prints on the controller's host, whatever its status."""
        return self.controller.run(
            *command, env={**self.variables, **(env or {})}, check=False
        ).stdout.strip()

    def state(self, job: str) -> dict[str, str]:
        """Return what SLURM knows of a job."""
        words = self.say("scontrol", "show", "job", job).split()
        pairs = (word.partition("=") for word in words)
        return {name: value for name, equals, value in pairs if equals}

    def wait_for(self, holds: Callable[[], bool], limit_s: float) -> None:
        """Wait until something holds; raise AssertionError with the state of nodes and jobs if it does not."""
        deadline = time.monotonic() + limit_s
        while not holds():
            assert time.monotonic() < deadline, self.say("scontrol", "show", "job") + self.say(
                "sinfo", "-N", "-l"
            )
            time.sleep(0.5)

"""Hosts on one machine, joined by a network of their own.

A host is a process with its own namespaces for network, processes, mounts and the host name, and hence its own loopback,
/etc/hosts, /dev/shm and folder for Ray. The kernel removes all of it with its first process, which ends when
its standard input is closed, even if the process of the tests is killed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from ray._common.utils import get_default_ray_temp_dir

needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or not all(map(shutil.which, ("ip", "unshare", "nsenter"))),
    reason="hosts in network namespaces need root, and ip (Debian: iproute2), unshare and nsenter (util-linux)",
)

NAMESPACES = ("--net", "--pid", "--mount", "--uts")
RAY_FOLDER = get_default_ray_temp_dir()
BECOME = f"""set -e
hostname "$1"
mount --bind "$2/hosts" /etc/hosts
mount --bind "$2/ray" {RAY_FOLDER}
mount -t tmpfs tmpfs /dev/shm
ip link set lo up
echo ready
exec cat
"""


class Host:
    """A running host; `pid` is the id of its first process, as seen from outside."""

    def __init__(self, name: str, address: str, folder: Path) -> None:
        self.name, self.address = name, address
        (folder / name / "ray").mkdir(parents=True)
        # As on Debian: the host's name resolves to an address that no other host reaches.
        (folder / name / "hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {name}\n")
        Path(RAY_FOLDER).mkdir(exist_ok=True)  # the host's own folder is mounted there
        self._first = subprocess.Popen(
            ["unshare", *NAMESPACES, "--fork", "--kill-child", "--mount-proc"]  # noqa: RUF005
            + ["sh", "-c", BECOME, "sh", name, str(folder / name)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._first.stdout is not None
        assert self._first.stdout.readline() == "ready\n", f"{name} could not be made"
        children = Path(f"/proc/{self._first.pid}/task/{self._first.pid}/children").read_text()
        self.pid = int(children.split()[0])

    def inside(self, *command: object) -> list[str]:
        """Return the command that runs `command` on the host."""
        return ["nsenter", "--target", str(self.pid), *NAMESPACES, *map(str, command)]

    def run(
        self, *command: object, limit_s: float = 120, env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess:
        """Run a command on the host to its end; its output is text and includes stderr."""
        return subprocess.run(
            self.inside(*command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=limit_s,
            env=os.environ | (env or {}),
            cwd=Path(__file__).parents[3],
            check=False,
        )

    def close(self) -> None:
        """End every process of the host."""
        self._first.communicate()


@contextmanager
def joined_hosts(names: Sequence[str], addresses: Sequence[str], folder: Path) -> Iterator[list[Host]]:
    """Yield two hosts with one cable between them."""
    with ExitStack() as ends:
        hosts = []
        for name, address in zip(names, addresses, strict=True):
            hosts.append(Host(name, address, folder))
            ends.callback(hosts[-1].close)
        one, other = hosts
        in_network = ["nsenter", "--target", str(one.pid), "--net"]
        cable = [
            "ip",
            "link",
            "add",
            "wire0",
            "type",
            "veth",
            "peer",
            "name",
            "wire0",
            "netns",
            str(other.pid),
        ]
        subprocess.run(in_network + cable, check=True)
        for host in hosts:
            for command in (f"addr add {host.address}/24 dev wire0", "link set wire0 up"):
                done = host.run("ip", *command.split())
                assert done.returncode == 0, done.stdout
        yield hosts

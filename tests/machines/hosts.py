"""Hosts on one machine, each with a cable to a switch: what crosses a network can be tested on it, and made to fail.

    with joined_hosts(["first", "second"], shared=[tmp_path], cable=Cable(rate_bits_s=1e9)) as network:
        first, second = network.hosts
        server = second.start(sys.executable, "-m", "http.server", "--bind", second.address)
        print(first.run("hostname").stdout)
        network.change("second", delay_s=0.02, loss=0.01)   # from now on
        network.change("second", up=False)                  # it has disappeared
        network.sent_bytes()["first", "second"]             # as counted on the wire, headers included

A host is a process with its own namespaces for network, processes, mounts, IPC and the host name; hence it has its own
loopback, /etc/hosts, /dev/shm and /tmp. Folders in `shared` are the same on all hosts, as those of a cluster's file
system; so is everything outside of /tmp and /dev/shm, and this repository with its environment anyway.

The kernel removes all of a host with its first process, which ends when its standard input is closed, even if the process
of the tests is killed. Nothing has a name outside the host. `tests.machines.switch` has the switch and its cables;
decision 0061 says why they are not the kernel's.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any, Literal

from tests.machines.switch import INTERFACE, Cable

ROOT = Path(__file__).parents[2]
NETWORKS = {4: ip_network("10.77.0.0/24"), 6: ip_network("fd77::/64")}
OwnName = Literal["loopback", "address", "unknown"]
NAMESPACES = ("--net", "--pid", "--mount", "--uts", "--ipc")

# The new /tmp is made at /dev/shm, so that folders in the old one can still be reached. The kernel waits for children
# of a process that ignores SIGCHLD. Without a name server, unknown names are refused at once.
BECOME = """set -e
name="$1" names="$2" shm="$3"; shift 3
hostname "$name"
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
for folder; do
  mkdir -p "/dev/shm/${folder#/tmp/}"
  mount --rbind "$folder" "/dev/shm/${folder#/tmp/}"
done
mount --move /dev/shm /tmp
mount -t tmpfs -o "mode=1777$shm" tmpfs /dev/shm
printf '%s' "$names" > /tmp/hosts
: > /tmp/resolv.conf
for file in hosts resolv.conf; do
  mount --bind "/tmp/$file" "/etc/$file"
  rm "/tmp/$file"
done
ip link set lo up
echo ready
exec env --ignore-signal=CHLD cat
"""


class Command(subprocess.Popen[str]):
    """A command on a host; signals reach the command itself, not `nsenter`, which waits for it and ends as it does."""

    def send_signal(self, sig: int) -> None:
        own = [self.pid] if sig == signal.SIGCONT else []  # `nsenter` stops with its command
        for pid in own + children(self.pid) or [self.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, sig)


def children(pid: int) -> list[int]:
    """Return the processes that a process has started; none if it has ended."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


class Host:
    """A running host; `pid` is the id of its first process, as seen from outside."""

    def __init__(
        self, name: str, address: str, names: str, shm_bytes: int | None, shared: Sequence[Path]
    ) -> None:
        self.name, self.address = name, address
        outside = [ROOT, Path(sys.prefix), Path(sys.base_prefix), *shared]
        folders = [folder for folder in map(Path.resolve, outside) if folder.is_relative_to("/tmp")]
        become = ["sh", "-c", BECOME, "sh", name, names, f",size={shm_bytes}" if shm_bytes else "", *folders]
        self._first = subprocess.Popen(
            ["unshare", *NAMESPACES, "--fork", "--kill-child", "--mount-proc", *map(str, become)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._first.stdout is not None
        assert self._first.stdout.readline() == "ready\n", f"host {name} could not be made"
        (self.pid,) = children(self._first.pid)

    def inside(self, *command: object, cwd: Path = ROOT) -> list[str]:
        """Return the command that runs `command` on the host, for `subprocess`."""
        entered = ["nsenter", "--target", str(self.pid), *NAMESPACES, "env", f"--chdir={cwd}", "TMPDIR=/tmp"]
        return [*entered, *map(str, command)]

    def run(
        self,
        *command: object,
        limit_s: float = 120,
        env: Mapping[str, str] | None = None,
        check: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the host to its end; its `stdout` includes stderr.

        Raises:
            AssertionError: it ended with another status than 0, unless `check` is False.
        """
        done = subprocess.run(
            self.inside(*command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=limit_s,
            env=os.environ | (env or {}),
            check=False,
        )
        said = f"{' '.join(map(str, command))} on {self.name} ended with {done.returncode}: {done.stdout}"
        assert not check or done.returncode == 0, said
        return done

    def start(self, *command: object, env: Mapping[str, str] | None = None, **streams: Any) -> Command:
        """Start a command on the host; `streams` are those of `subprocess.Popen`. It ends with the host at the latest."""
        return Command(self.inside(*command), text=True, env=os.environ | (env or {}), **streams)

    def close(self) -> None:
        """End every process of the host."""
        self._first.communicate()


class Network:
    """Hosts and the switch between them."""

    def __init__(self, hosts: Sequence[Host]) -> None:
        self.hosts, self.cables = list(hosts), {host.name: Cable() for host in hosts}
        self._switch = subprocess.Popen(
            [sys.executable, "-S", Path(__file__).with_name("switch.py")]
            + [f"{host.name}={host.pid}" for host in hosts],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answer()

    def change(self, host: str, **values: Any) -> None:
        """Change values of a host's `Cable`, from now on; the others stay."""
        self.cables[host] = replace(self.cables[host], **values)
        self._ask(do="change", host=host, cable=asdict(self.cables[host]))

    def block(self, *pairs: tuple[str, str]) -> None:
        """Drop what these pairs of hosts send to each other, as a firewall does, and nothing else any more."""
        self._ask(do="block", pairs=pairs)

    def sent_bytes(self) -> Counter[tuple[str, str]]:
        """Return the bytes of the frames that have arrived, by sender and receiver; each TCP segment has its headers."""
        return Counter({(one, other): size for one, other, size in self._ask(do="count")[0]})

    def dropped_frames(self) -> Counter[tuple[str, str]]:
        """Return the number of frames that were lost or dropped, by sender and receiver."""
        return Counter({(one, other): frames for one, other, frames in self._ask(do="count")[1]})

    def close(self) -> None:
        """Remove the hosts' interfaces."""
        self._switch.communicate()

    def _ask(self, **request: Any) -> Any:
        assert self._switch.stdin is not None
        self._switch.stdin.write(json.dumps(request) + "\n")
        self._switch.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._switch.stdout is not None
        line = self._switch.stdout.readline()
        assert line, "the switch has ended"
        return json.loads(line)


@contextmanager
def joined_hosts(
    names: Sequence[str],
    *,
    shared: Sequence[Path] = (),
    cable: Cable | None = None,
    own_name: OwnName = "loopback",
    shm_bytes: int | None = None,
    ip_version: Literal[4, 6] = 4,
    mtu: int = 1500,
) -> Iterator[Network]:
    """Yield running hosts with these names and the addresses .1, .2, ... (::1, ::2, ...) of one network.

    Args:
        shared: folders that all hosts see under the same path; the others in /tmp and /dev/shm are hidden.
        cable: the cable of each host; a fast one by default.
        own_name: what a host's own name resolves to. `loopback`: 127.0.1.1, as on Debian; `unknown`: nothing;
            `address`: every host knows the addresses of all.
        shm_bytes: size of each host's /dev/shm; half of the memory by default.
        mtu: largest packet of the hosts' interfaces; what the cables let pass is a value of theirs.
    """
    addresses = [str(address) for address, _ in zip(NETWORKS[ip_version].hosts(), names, strict=False)]
    places = list(zip(names, addresses, strict=True))
    with ExitStack() as ends:
        hosts = []
        for name, address in places:
            known = {
                "loopback": [("127.0.1.1", name)],
                "address": [(at, one) for one, at in places],
                "unknown": [],
            }
            lines = [("127.0.0.1", "localhost"), ("::1", "localhost"), *known[own_name]]
            table = "".join(f"{at} {one}\n" for at, one in lines)
            hosts.append(Host(name, address, table, shm_bytes, shared))
            ends.callback(hosts[-1].close)
        network = Network(hosts)
        ends.callback(network.close)
        prefix = NETWORKS[ip_version].prefixlen
        for host in hosts:
            nodad = ["nodad"] if ip_address(host.address).version == 6 else []  # nobody else has the address
            host.run("ip", "addr", "add", f"{host.address}/{prefix}", "dev", INTERFACE, *nodad)
            host.run("ip", "link", "set", INTERFACE, "up", "mtu", mtu)
            if cable:
                network.change(host.name, **asdict(cable))
        yield network

"""`hybridengine launch node`: Ray on one node of a launch, and on the first node the run."""

from __future__ import annotations

import os
import platform
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridengine.checkpoints.run_lock import is_locked
from hybridengine.errors import ConfigError, HybridEngineError, OutputError, WorkerError
from hybridengine.launch.addresses import answering, common_address, own_addresses, reached
from hybridengine.launch.alive import LiveNodes
from hybridengine.launch.meeting import (
    END,
    HEAD,
    POLL_S,
    RAY,
    REPORT_EVERY_S,
    STOP,
    LaunchEnded,
    Meeting,
    listed,
)
from hybridengine.launch.output import passed_on
from hybridengine.launch.ray_node import RayEnded, RayNode, fated, token_environment
from hybridengine.launch.stopping import Stopping
from hybridengine.version import __version__

NODE_LOST = 75
"""Exit status of a launch that has lost a node, and may succeed on others (EX_TEMPFAIL of sysexits.h)."""
LOOPBACK = "127.0.0.1"
ANSWER_LIMIT_S = 60.0
"""Time limit for Ray to say which nodes it still has."""
SAVE_LIMIT_S = 600.0
"""Time limit for a run to save its step and end once nobody launches it any more."""
LOCK_LIMIT_S, LOCK_POLL_S = SAVE_LIMIT_S + 150.0, 5.0
"""An earlier attempt holds the lock until its step is saved; where its machine has died, a file server frees it after its
lease, 90 s with Linux's NFS."""
FAILED = "failed-"
"""Begin of the names of files in which nodes say why they have failed."""


@dataclass(frozen=True)
class NodeTask:
    """The part of one node in a launch."""

    hosts: tuple[str, ...]
    """Names of all nodes; the first one leads."""
    index: int
    """Position of this node in `hosts`."""
    folder: Path
    """Folder of this launch, which all nodes see."""
    num_cpus: int
    num_gpus: int | None
    """GPUs that Ray offers; None lets Ray count them."""
    run: Callable[[str], Sequence[str]]
    """Arguments of `hybridengine` that carry out the run on the cluster at an address."""
    lock_file: Path
    """Lock of the run's folder, which an earlier attempt on a node that has died may hold for a while."""
    start_limit_s: float
    """Time limit until all nodes have joined."""
    interface: str | None = None
    address: str | None = None
    attached: bool = False
    """True if the node ends when its standard input does."""
    metrics_port: int | None = None
    """Port at which Ray exports metrics on all addresses of the node; None exports them at loopback or not at all."""

    @property
    def host(self) -> str:
        """Name of this node."""
        return self.hosts[self.index]

    def log(self) -> Path:
        """Return the file of what Ray prints on this node."""
        return self.folder / f"ray-{self.index}-{self.host.replace('/', '_')}.log"


def run_node(task: NodeTask, say: Callable[[str], None]) -> int:
    """Do what a node has to do, until the launch ends; return the exit status: on the first node that of the run."""
    stopping = Stopping(leads=task.index == 0, attached=task.attached, say=say)
    meeting = Meeting(task.folder, say)
    if task.index == 0:
        return Lead(task, meeting, stopping, say).carry_out()
    try:
        _follow(task, meeting, stopping, say)
    except LaunchEnded as end:  # not a failure of this node: a launcher would replace it
        say(f"{task.host} is done: {str(end).partition(chr(10))[0]}")
    except Exception as error:
        file, lacks_ray = f"{FAILED}{task.index}.json", isinstance(error, RayEnded)
        refused = getattr(error, "exit_status", 1) == ConfigError.exit_status
        reason = str(error)
        if not isinstance(error, HybridEngineError):
            reason = f"{type(error).__name__}: {reason}"
        with suppress(OutputError):  # the node's own error says more
            meeting.write(file, host=task.host, reason=reason, lacks_ray=lacks_ray, refused=refused)
        raise
    return 0


def _follow(task: NodeTask, meeting: Meeting, stopping: Stopping, say: Callable[[str], None]) -> None:
    """Join the Ray of the first node, and leave it when that node says so."""

    def check() -> None:
        stopping.check()
        meeting.check_running()

    deadline = time.monotonic() + task.start_limit_s
    leader = {HEAD: task.hosts[0]}
    head = meeting.wait(leader, deadline, "the first node", check=stopping.check)[HEAD]
    check_versions(task, head["versions"])
    allowed = own_addresses(task.interface, task.address)
    found = reached(head["addresses"], head["port"], head["secret"])
    ways = {theirs: own for theirs, own in found.items() if own in allowed}
    meeting.write(f"node-{task.index}.json", ways=ways)
    try:
        ray = meeting.wait({RAY: task.hosts[0]}, deadline, "Ray on the first node", check=stopping.check)[RAY]
    except LaunchEnded as end:
        _check_reached(task, _end_of(meeting) or {}, str(end))
        raise
    if ray["node"] not in ways:
        raise WorkerError(
            f"{task.host} does not reach the address {ray['node']} of {task.folder / RAY}, which is that of an earlier"
            " launch; name a new --launch-folder"
        )
    own = ways[ray["node"]]
    with RayNode(
        own,
        ray["address"],
        token_environment(meeting.token_file, own),
        task.log(),
        num_cpus=task.num_cpus,
        num_gpus=task.num_gpus,
        metrics_port=task.metrics_port,
    ) as ray_node:
        ray_node.wait(deadline, check)
        say(f"{task.host} has joined Ray at {ray['address']} from {own}")
        give_up = None
        # Also without the launcher: the run needs this node, and the first one ends it, or Ray ends with that node.
        while (end := _end_of(meeting)) is None:
            ray_node.check()
            if (
                stopping.is_over
            ):  # the next attempt waits for the run's folder, and the first node may not know
                give_up = give_up or time.monotonic() + SAVE_LIMIT_S
                if time.monotonic() > give_up:
                    raise WorkerError(
                        "the launcher has ended this attempt, and the run has not ended by itself"
                    )
            time.sleep(POLL_S)
    _check_reached(task, end, end["reason"])
    say(f"{task.host} is done: {end['reason'] or 'the run has ended'}")


def _check_reached(task: NodeTask, end: Mapping[str, Any], reason: str) -> None:
    """Raise WorkerError if the first node has ended the launch since this one was cut off, and is to be replaced."""
    if task.host in end.get("cut_off", ()):
        raise WorkerError(reason)


def _end_of(meeting: Meeting) -> dict[str, Any] | None:
    """Return how the run has ended; None while it goes on, or while the folder cannot be read."""
    with suppress(OutputError):
        return meeting.read(END)
    return None


def versions() -> dict[str, str]:
    """Return the versions of this node's software that must be those of the other nodes."""
    import ray

    python = ".".join(platform.python_version_tuple()[:2])
    return {"Ray": ray.__version__, "Python": python, "hybridengine": __version__}


def check_versions(task: NodeTask, expected: Mapping[str, str]) -> None:
    """Raise ConfigError if this node's software is not that of the first node, given by name."""
    own = versions()
    differing = [
        f"{name} {own[name]} instead of {expected[name]}" for name in own if own[name] != expected[name]
    ]
    if differing:
        raise ConfigError(
            f"{task.host} has {', '.join(differing)}, which {task.hosts[0]} has; install the same versions on all nodes,"
            " or start them with the same --python"
        )


class Lead:
    """The first node: it starts Ray's head, waits for the other nodes, and carries out the run."""

    def __init__(
        self, task: NodeTask, meeting: Meeting, stopping: Stopping, say: Callable[[str], None]
    ) -> None:
        self._task, self._meeting, self._stopping, self._say = task, meeting, stopping, say
        self._deadline = time.monotonic() + task.start_limit_s
        self._addresses: dict[str, str] = {}
        """Address -> name of each node."""
        self._without_ray = task.host
        """Name of the node whose Ray has ended, if one's has."""
        self._cut_off: list[str] = []
        """Nodes that reach no address of this one, or have left Ray."""
        self._ended = threading.Event()

    def carry_out(self) -> int:
        """Return the exit status of the run, or NODE_LOST; tell the other nodes when it has ended."""
        task, status, reason = self._task, 1, ""
        if self._meeting.read(RAY) is not None:
            raise ConfigError(f"{task.folder} is the folder of an earlier launch; name a new --launch-folder")
        with (
            ExitStack() as output,
            ExitStack() as ends,
        ):  # output is waited for last, when the others and Ray have ended
            ends.callback(self._meeting.close)
            ends.callback(self._ended.set)
            threading.Thread(target=self._listen, daemon=True).start()
            try:
                own = self._meet()
                environment = token_environment(self._meeting.write_token(), own)
                ray_node = ends.enter_context(
                    RayNode(
                        own,
                        None,
                        environment,
                        task.log(),
                        num_cpus=task.num_cpus,
                        num_gpus=task.num_gpus,
                        metrics_port=task.metrics_port,
                    )
                )
                ray_node.wait(self._deadline, self._check)
                self._meeting.write(RAY, address=ray_node.address, node=own)
                environment["RAY_ADDRESS"] = ray_node.address
                self._wait_for_nodes(ray_node, environment)
                status = self._run(ray_node.address, environment, output)
                if status and not self._stopping.asked and (lost := self._lost(environment)):
                    status, reason = NODE_LOST, f"{listed(lost)} left Ray while the run went on"
                    self._say(f"{reason}; the launch may be started again on other nodes")
                    if len(lost) < len(task.hosts):  # else Ray has not answered
                        if self._addresses:  # else several are on one machine, and the names are guesses
                            self._cut_off = lost
                        self._write_lost(lost)
            except RayEnded as error:
                status, reason = NODE_LOST, str(error)
                self._say(f"{reason}\nthe launch may be started again on other nodes")
                self._write_lost([self._without_ray])
            except BaseException as error:
                reason = str(error) or type(error).__name__
                status = error.exit_status if isinstance(error, HybridEngineError) else status
                raise
            finally:
                try:
                    end = {"reason": reason, "asked": self._stopping.asked, "cut_off": self._cut_off}
                    self._meeting.write(END, status=status, **end)
                except OutputError as error:  # the other nodes end with Ray
                    self._say(str(error))
        return status

    def _meet(self) -> str:
        """Return the address of this node that all others reach, once they have said so."""
        task = self._task
        if len(task.hosts) == 1:
            self._addresses = {LOOPBACK: task.host}
            return LOOPBACK
        candidates = own_addresses(task.interface, task.address, task.host)
        secret = secrets.token_hex(16)
        with answering(secret) as port:
            self._meeting.write(HEAD, addresses=candidates, port=port, secret=secret, versions=versions())
            files = {f"node-{index}.json": name for index, name in enumerate(task.hosts) if index}
            said = self._meeting.wait(files, self._deadline, "other nodes", check=self._check)
        found = {files[name]: values["ways"] for name, values in said.items()}
        self._cut_off = [name for name, ways in found.items() if not ways]
        own = common_address(candidates, found)
        self._addresses = {own: task.host} | {ways[own]: name for name, ways in found.items()}
        if len(self._addresses) < len(task.hosts):
            self._addresses = {}  # several on one machine: counted, not named
        return own

    def _wait_for_nodes(self, ray_node: RayNode, environment: Mapping[str, str]) -> None:
        """Wait until Ray has all nodes; raise WorkerError if it does not within the limit."""
        reported, total = 0.0, len(self._task.hosts)
        with LiveNodes(environment) as live:
            while missing := self._missing(live.addresses()):
                self._check()
                ray_node.check()
                state = f"{total - len(missing)} of {total} nodes; waiting for {listed(missing)}"
                now = time.monotonic()
                if now >= self._deadline:
                    raise WorkerError(
                        f"{state} since {self._task.start_limit_s:g} s, which is the limit; see Ray's logs in"
                        f" {self._task.folder}, or raise --start-limit"
                    )
                if now - reported >= REPORT_EVERY_S:
                    self._say(state)
                    reported = now
                time.sleep(POLL_S)
        self._say(f"{total} of {total} nodes; starting the run")

    def _missing(self, alive: Sequence[str] | None) -> list[str]:
        """Return the nodes that are not among those that Ray has, given by address; all if Ray does not answer."""
        if alive is None:
            return list(self._task.hosts)
        if self._addresses:
            return [name for address, name in self._addresses.items() if address not in alive]
        return list(self._task.hosts[len(alive) :])

    def _lost(self, environment: Mapping[str, str]) -> list[str]:
        """Return the nodes that Ray lacks now."""
        with LiveNodes(environment) as live:
            return self._missing(live.wait(ANSWER_LIMIT_S))

    def _write_lost(self, nodes: Sequence[str]) -> None:
        try:
            self._meeting.write_lost(nodes)
        except OutputError as error:  # the launcher starts again all the same, without their names
            self._say(str(error))

    def _run(self, address: str, environment: Mapping[str, str], output: ExitStack) -> int:
        """Carry out the run in a process of its own, and return its exit status; `output` waits for what it writes."""
        self._wait_for_lock()
        command = [sys.executable, "-m", "hybridengine.cli.main", *self._task.run(address)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT} if self._task.attached else {}
        process = fated(command, env=dict(environment), **pipes)
        self._stopping.pass_to(process)
        output.enter_context(passed_on(process.stdout, lambda: self._stopping.is_cut_off))
        give_up = None
        while True:
            try:
                status = process.wait(POLL_S)
            except subprocess.TimeoutExpired:
                if self._stopping.is_cut_off and give_up is None:
                    if not self._stopping.asked:  # a second request would end the run at once
                        process.terminate()
                    give_up = time.monotonic() + SAVE_LIMIT_S
                if give_up is not None and time.monotonic() > give_up:
                    process.kill()
                continue
            return status if status >= 0 else 128 - status

    def _wait_for_lock(self) -> None:
        """Wait until no earlier attempt holds the run's folder; after LOCK_LIMIT_S the run itself says who does."""
        deadline, reported = time.monotonic() + LOCK_LIMIT_S, 0.0
        while is_locked(self._task.lock_file) and (now := time.monotonic()) < deadline:
            self._check()
            if now - reported >= REPORT_EVERY_S:
                rest = f"for {deadline - now:.0f} s at most"
                self._say(
                    f"waiting {rest} until an earlier attempt, or another run, frees {self._task.lock_file}"
                )
                reported = now
            time.sleep(LOCK_POLL_S)

    def _listen(self) -> None:
        """Take the launcher's file for a signal, once; in a thread, as the folder may hang or fail for a while."""
        while not self._ended.wait(POLL_S) and not self._stopping.asked:
            with suppress(OSError):
                if (self._meeting.folder / STOP).exists() and not self._ended.is_set():
                    os.kill(os.getpid(), signal.SIGTERM)
                    return

    def _check(self) -> None:
        """Raise RayEnded, ConfigError or WorkerError if another node has failed; see `Stopping.check` for this one."""
        self._stopping.check()
        for name in sorted(self._meeting.names()):
            if name.startswith(FAILED) and (failed := self._meeting.read(name)) is not None:
                self._without_ray = failed["host"]
                kind = RayEnded if failed["lacks_ray"] else ConfigError if failed["refused"] else WorkerError
                raise kind(f"node {failed['host']}: {failed['reason']}")

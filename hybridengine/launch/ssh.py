"""Launch over ssh: hosts of a list that answer carry out the run, and spare ones take the place of those that fail."""

from __future__ import annotations

import errno
import resource
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from hybridengine.errors import ConfigError, UnreadableError, WorkerError
from hybridengine.files import read_text
from hybridengine.launch.meeting import listed
from hybridengine.launch.node import NODE_LOST
from hybridengine.launch.output import wait_for_output, written
from hybridengine.launch.stopping import LOST_LINE, OVER_LINE, STOP_LINE

ALIVE_INTERVAL_S, ALIVE_COUNT, CONNECT_LIMIT_S = 15, 4, 10
SSH = (
    "ssh",
    *("-o", "BatchMode=yes"),
    *("-o", f"ConnectTimeout={CONNECT_LIMIT_S}"),
    *("-o", f"ServerAliveInterval={ALIVE_INTERVAL_S}"),
    *("-o", f"ServerAliveCountMax={ALIVE_COUNT}"),
)
SSH_FAILED = 255
"""Exit status of ssh that has no connection any more."""
BAD_INPUT = ConfigError.exit_status
FILES_OF_A_NODE, OTHER_FILES = 2, 256
"""Open files of this process for the pipes of each ssh, and for everything else."""
CHECK_LIMIT_S, ENOUGH_LIMIT_S = 60.0, 15.0
"""Time limits for hosts to answer before the launch: while too few have, and once enough have. The latter exceeds
CONNECT_LIMIT_S, so that ssh can say why it does not reach a host."""
SETTLE_LIMIT_S = 30.0
"""Time for the other nodes to end by themselves after the first one has, and so to say which of them have failed, and
for the first one after another has found bad input."""
CLOSE_LIMIT_S = 60.0
"""Time for a node to end after the launcher has closed its input."""
GONE = (errno.EPIPE, errno.EIO)
"""Errors that mean that nobody reads the pipe or terminal any more; a full disk, for example, only loses lines."""


@dataclass(frozen=True)
class SshLaunch:
    """A launch over ssh."""

    hosts: tuple[str, ...]
    """Hosts as ssh takes them, in the order in which they are used; the first ones that answer."""
    num_nodes: int
    folder: str
    """Folder in which hosts start: the same on all of them."""
    setup: str
    """Shell commands that each host carries out first; empty for none."""
    python: str
    """Python of the installation, on every host."""
    options: tuple[str, ...]
    """Further options of ssh."""
    arguments: Callable[[Sequence[str], int, int], Sequence[str]]
    """Arguments of `hybridengine` for all hosts, the index of one, and the number of the attempt."""
    retries: int


def parse_hosts(text: str | None, file: Path | None) -> tuple[str, ...]:
    """Return the hosts of a list with commas or of a file with one host a line; `#` begins a comment.

    Raises:
        ConfigError: there is none, a name is not one word or begins with a dash, or a name occurs twice.
    """
    if text is not None:
        names, source = [name.strip() for name in text.split(",")], "--hosts"
    else:
        assert file is not None, "argparse requires one of the two"
        try:
            text = read_text(file).removeprefix("\ufeff")  # as editors on Windows write it
            lines = [line.partition("#")[0].strip() for line in text.splitlines()]
        except (FileNotFoundError, UnreadableError) as error:
            reason = f"{file} does not exist" if isinstance(error, FileNotFoundError) else error
            raise ConfigError(f"--hostfile {reason}; name a file with one host a line") from None
        names, source = [line for line in lines if line], f"--hostfile {file}"
    for name in names:
        if not name or len(name.split()) > 1 or name.startswith("-"):
            raise ConfigError(
                f"{source}: {name!r} is not the name of a host; write names such as node1 or user@10.0.0.4"
            )
    if not names:
        raise ConfigError(f"{source} names no host; name those of the run")
    machines = [name.rpartition("@")[2] for name in names]
    twice = next((name for name in machines if machines.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(
            f"{source} names {twice} twice; a host is one node, whose ranks are in ranks_per_node"
        )
    return tuple(names)


def launch(plan: SshLaunch, say: Callable[[str], None]) -> int:
    """Carry out the run, again on other hosts while nodes fail and `retries` lasts; return its exit status."""
    _allow_files(FILES_OF_A_NODE * len(plan.hosts) + OTHER_FILES)
    blame = Counter[str]()
    for attempt in range(plan.retries + 1):
        hosts = _answering_hosts(plan, blame, say)
        say(f"attempt {attempt + 1} on {listed(hosts)}")
        nodes = _Nodes(plan, hosts, attempt)
        with nodes:
            nodes.start()
            status = nodes.wait(say)
        if nodes.is_output_closed:
            raise BrokenPipeError
        if nodes.num_lost_lines:
            say(f"{nodes.num_lost_lines} lines of output are lost, which could not be written")
        lost = nodes.lost
        if nodes.was_stopped or nodes.is_refused or (status not in (NODE_LOST, SSH_FAILED) and not lost):
            return status
        if not lost:
            lost = {hosts[0]: status}  # Ray has ended there
        blame.update(dict.fromkeys(lost, 2))
        if {*lost} == {*hosts[1:]} and SSH_FAILED not in lost.values():
            # They may have failed because nothing reaches the first one: less likely if it is one, more if three.
            blame[hosts[0]] += len(lost)
        say(f"attempt {attempt + 1} has lost {listed(lost)}")
    raise WorkerError(
        f"{plan.retries + 1} attempts have lost nodes; see the output above, and start the launch again with other hosts,"
        " or with more --retries"
    )


def _allow_files(needed: int) -> None:
    """Raise this process's limit of open files; ConfigError if the system allows fewer."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ConfigError(
            f"a launch over ssh to as many hosts as are named needs {needed} open files, and this system allows {hard}"
            " (ulimit -Hn); raise this limit, name fewer hosts, or launch through a scheduler"
        )
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _answering_hosts(plan: SshLaunch, blame: Mapping[str, int], say: Callable[[str], None]) -> list[str]:
    """Return as many hosts as the run has nodes: those that answer, of them the first ones with least blame.

    Raises:
        ConfigError: too few answer.
    """
    ordered = sorted(plan.hosts, key=lambda host: blame.get(host, 0))
    if len(ordered) < plan.num_nodes:
        raise ConfigError(
            f"the run needs {plan.num_nodes} hosts, and the list names {len(ordered)}; name more, or choose smaller"
            " parallel sizes"
        )
    problems = _problems(plan, ordered)
    for host, problem in problems.items():
        if problem:
            say(f"{host} cannot be used: {problem}")
    good = [host for host, problem in problems.items() if not problem]
    if len(good) < plan.num_nodes:
        bad = "; ".join(f"{host}: {problem}" for host, problem in problems.items() if problem)
        raise ConfigError(
            f"{len(good)} of {len(ordered)} hosts can be used, and the run needs {plan.num_nodes} ({bad}); see to it that"
            " `ssh -o BatchMode=yes HOST` works and that the installation and the folder are there, or name spare hosts"
        )
    return good[: plan.num_nodes]


def _problems(plan: SshLaunch, hosts: Sequence[str]) -> dict[str, str]:
    """Return why each host cannot be used, or an empty text."""
    command, begin = remote_command(plan, ["--version"]), time.monotonic()
    checks = dict[str, subprocess.Popen[bytes]]()
    with ExitStack() as ends:  # also where the launcher is stopped
        outputs = {host: ends.enter_context(tempfile.TemporaryFile()) for host in hosts}
        for host, output in outputs.items():
            try:
                checks[host] = subprocess.Popen(
                    [*SSH, *plan.options, host, command],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            except FileNotFoundError:
                raise ConfigError("ssh is not installed on this machine; install an OpenSSH client") from None
            ends.callback(checks[host].wait)
            ends.callback(checks[host].kill)
        while None in (statuses := [check.poll() for check in checks.values()]):
            passed = time.monotonic() - begin
            if passed > (ENOUGH_LIMIT_S if statuses.count(0) >= plan.num_nodes else CHECK_LIMIT_S):
                break
            time.sleep(0.05)
        return {
            host: _problem(check, outputs[host], time.monotonic() - begin) for host, check in checks.items()
        }


def _problem(check: subprocess.Popen[bytes], output: IO[bytes], passed: float) -> str:
    if check.returncode == 0:
        return ""
    if check.returncode is None:
        return f"no answer within {passed:.0f} s"
    output.seek(0)
    said = output.read().decode(errors="replace").strip().splitlines()
    return said[-1] if said else f"--setup and the check of the version end with status {check.returncode}"


def remote_command(plan: SshLaunch, arguments: Iterable[str]) -> str:
    """Return the shell command that runs `hybridengine` with arguments on a host."""
    words = [plan.python, "-m", "hybridengine.cli.main", *arguments]
    parts = [
        f"cd {shlex.quote(plan.folder)}",
        *([f"eval {shlex.quote(plan.setup)}"] if plan.setup else []),  # it may end in a comment
        f"exec {shlex.join(words)}",
    ]
    return f"bash -c {shlex.quote(' && '.join(parts))}"


class _Nodes:
    """The processes of ssh of one attempt; a context manager that ends them, and with them the nodes."""

    def __init__(self, plan: SshLaunch, hosts: Sequence[str], attempt: int) -> None:
        self.lost: dict[str, int] = {}
        """Exit statuses of hosts that have failed, by their names."""
        self.is_refused = False
        """True if a node has found bad input, which another attempt would find again."""
        self.is_output_closed = False
        """True if nobody reads what the nodes print."""
        self.num_lost_lines = 0
        """Lines that could not be written."""
        self._plan, self._hosts, self._attempt = plan, hosts, attempt
        self._num_signals, self._num_requests = 0, 0
        self._ended: set[str] = set()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._threads: list[threading.Thread] = []
        self._printing = threading.Lock()
        self._is_given_up = False
        """True if a reader of the output has not been waited for."""

    @property
    def was_stopped(self) -> bool:
        return self._num_wanted > 0

    @property
    def _num_wanted(self) -> int:
        """Requests that the first node should get. A reader that is gone is one only if nobody else has asked: Ctrl-C in
        a pipeline ends the reader too, and a second request ends a run at once."""
        return max(self._num_signals, int(self.is_output_closed))

    def __enter__(self) -> _Nodes:
        """Take signals from now on, before there are nodes that they would leave alone."""
        self._before = {
            number: signal.signal(number, self._count) for number in (signal.SIGTERM, signal.SIGINT)
        }
        return self

    def start(self) -> None:
        for index, host in enumerate(self._hosts):
            command = remote_command(self._plan, self._plan.arguments(self._hosts, index, self._attempt))
            process = subprocess.Popen(
                [*SSH, *self._plan.options, host, command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches the first node as a request
            )
            self._processes.append(process)
            thread = threading.Thread(target=self._print, args=(host, process), daemon=True)
            thread.start()
            self._threads.append(thread)

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            with suppress(OSError):
                assert process.stdin is not None
                process.stdin.write(f"{OVER_LINE}\n".encode())
                process.stdin.close()
        deadline = time.monotonic() + CLOSE_LIMIT_S
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, deadline - time.monotonic()))
            process.kill()
            process.wait()
        before = self._num_signals
        wait_for_output(self._threads, self._printing, lambda: self._num_signals > before)
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def wait(self, say: Callable[[str], None]) -> int:
        """Return the exit status of the first node, which is told of nodes that fail.

        A run ends, or continues if all that it has lost is one of several engines.
        """
        first = self._processes[0]
        give_up = None
        while (status := first.poll()) is None:
            for host, ended in self._newly_failed():
                self._tell(f"{LOST_LINE} {host}")
                say(f"{host} has ended with status {ended}; the run ends, or continues without it")
            if self.is_refused and give_up is None:
                give_up = time.monotonic() + SETTLE_LIMIT_S
            if give_up is not None and time.monotonic() > give_up:
                say("the first node has not ended by itself: it is ended")
                return BAD_INPUT
            self._pass_signals()
            time.sleep(0.2)
        deadline = time.monotonic() + (SETTLE_LIMIT_S if status and not self.was_stopped else 0)
        while time.monotonic() < deadline and any(process.poll() is None for process in self._processes):
            time.sleep(0.2)
        for host, ended in self._newly_failed():
            say(f"{host} has ended with status {ended}")
        if status == SSH_FAILED:
            self.lost[self._hosts[0]] = status
        if status == 0:
            self.lost.clear()  # the run has done without
        elif self.is_refused:
            return BAD_INPUT
        return status if status >= 0 else 128 - status

    def _newly_failed(self) -> list[tuple[str, int]]:
        """Return hosts beside the first one that have failed since the last call, with their statuses."""
        found = list[tuple[str, int]]()
        for host, process in zip(self._hosts[1:], self._processes[1:], strict=True):
            if host not in self._ended and (status := process.poll()):
                found.append((host, status))
                self._ended.add(host)
                if status == BAD_INPUT:
                    self.is_refused = True
                else:
                    self.lost[host] = status
        return found

    def _count(self, *_: object) -> None:
        self._num_signals += 1

    def _pass_signals(self) -> None:
        """Ask the first node to stop its run, once for each new request."""
        while self._num_requests < self._num_wanted:
            self._num_requests += 1
            self._tell(STOP_LINE)

    def _tell(self, text: str) -> None:
        """Send a line to the first node."""
        pipe = self._processes[0].stdin
        assert pipe is not None, "it was asked for"
        with suppress(OSError):
            pipe.write(f"{text}\n".encode())
            pipe.flush()

    def _print(self, host: str, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        for line in process.stdout:  # to the end: a node whose output nobody takes stands still
            with self._printing:
                if not self.is_output_closed:
                    self._write(f"{host}: ".encode() + line.rstrip() + b"\n")

    def _write(self, text: bytes) -> None:
        try:
            if not self._is_given_up and written(text, sys.stdout, lambda: self.was_stopped):
                return
            self._is_given_up = True
        except OSError as error:
            if error.errno in GONE:
                self.is_output_closed = True
                return
        self.num_lost_lines += 1

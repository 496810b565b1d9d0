"""How the nodes of a launch meet: files, versions, Ray, and requests to stop."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from hybridengine.checkpoints.run_lock import is_locked, run_lock
from hybridengine.cli import launch_node
from hybridengine.cli.main import main
from hybridengine.errors import ConfigError, StoppedError, WorkerError
from hybridengine.launch import node, ray_node
from hybridengine.launch.meeting import END, LOST, Meeting, listed
from hybridengine.launch.node import NODE_LOST, NodeTask, run_node, versions
from hybridengine.launch.ray_node import RayEnded, RayNode, token_environment
from hybridengine.launch.shape import Shape
from hybridengine.launch.stopping import Stopping


def test_nobody_else_reads_the_token_of_a_launch(tmp_path: Path):
    meeting = Meeting(tmp_path / "launch", print)
    file = meeting.write_token()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    token = file.read_text()
    assert len(bytes.fromhex(token)) == 32
    assert meeting.write_token().read_text() != token
    meeting.close()
    assert not file.exists()


def test_a_node_waits_for_others_and_says_for_whom(tmp_path: Path):
    said = list[str]()
    meeting = Meeting(tmp_path, said.append)
    names = {f"node-{index}.json": f"host-{index}" for index in range(3)}
    meeting.write("node-1.json", ways={"a": "b"})
    writers = [
        threading.Timer(delay_s, meeting.write, [f"node-{index}.json"], {"ways": {}})
        for index, delay_s in ((0, 0.2), (2, 0.4))
    ]
    for writer in writers:
        writer.start()
    found = meeting.wait(names, time.monotonic() + 30, "other nodes")
    assert found == {
        "node-0.json": {"ways": {}},
        "node-1.json": {"ways": {"a": "b"}},
        "node-2.json": {"ways": {}},
    }
    assert said == [f"other nodes: 1 of 3; waiting for host-0, host-2 in {tmp_path}"]


def test_waiting_for_many_nodes_lists_the_folder_once_a_poll(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A listing for each node would take time that grows with the square of their number."""
    meeting, listings = Meeting(tmp_path, print), list[Path]()
    names = {f"node-{index}.json": f"host-{index}" for index in range(200)}
    for name in list(names)[:100]:
        meeting.write(name, ways={})
    list_folder = os.listdir

    def counted(folder: Path) -> list[str]:
        listings.append(folder)
        return list_folder(folder)

    monkeypatch.setattr(os, "listdir", counted)
    with pytest.raises(WorkerError, match="100 of 200"):
        meeting.wait(names, time.monotonic(), "other nodes")
    assert listings == [tmp_path, tmp_path], "for the nodes, and for the end of the launch"


def test_waiting_ends_with_the_names_of_those_that_are_missing(tmp_path: Path):
    meeting = Meeting(tmp_path, print)
    with pytest.raises(
        WorkerError,
        match=rf"other nodes: 0 of 2; waiting for b, c in {tmp_path} since 0 s, which is the limit; .* and share this"
        r" folder: .* Put run.folder on a file system that all share",
    ):
        meeting.wait({"1": "b", "2": "c"}, time.monotonic(), "other nodes")
    meeting.write(END, status=1, reason="node b: no Ray")
    with pytest.raises(WorkerError, match="the launch has ended: node b: no Ray"):
        meeting.wait({"1": "b"}, time.monotonic() + 30, "other nodes")


def test_a_node_with_other_software_is_named(tmp_path: Path):
    """The first node says what it has; the other ends with the difference before it starts Ray."""
    folder = tmp_path / "launch"
    meeting = Meeting(folder, print)
    expected = versions() | {"Ray": "1.0.0"}
    meeting.write("head.json", addresses=["127.0.0.1"], port=1, secret="a", versions=expected)
    command = ["launch", "node", "configs/arithmetic.yaml", "--hosts", "a,b", "--index", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "hybridengine.cli.main", *command, "--launch-folder", str(folder)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    reason = (
        f"b has Ray {versions()['Ray']} instead of 1.0.0, which a has; install the same versions on all nodes"
    )
    assert reason in done.stderr
    failed = meeting.read("failed-1.json")
    assert failed is not None and failed["host"] == "b" and reason in failed["reason"]


def task_of(folder: Path, index: int, *hosts: str) -> NodeTask:
    return NodeTask(
        hosts=hosts, index=index, folder=folder, num_cpus=1, num_gpus=0, run=lambda address: ["--version"],
        lock_file=folder / "run.lock", start_limit_s=60,
    )  # fmt: skip


@pytest.mark.usefixtures("signals")
def test_a_launch_that_the_first_node_ends_is_no_failure_of_another(tmp_path: Path):
    """A launcher replaces nodes that fail."""
    meeting, said = Meeting(tmp_path, print), list[str]()
    meeting.write(END, status=1, reason="Ray on host a has ended:\n  Traceback")
    assert run_node(task_of(tmp_path, 1, "a", "b"), said.append) == 0
    assert said == ["b is done: the launch has ended: Ray on host a has ended:"]
    assert not list(tmp_path.glob("failed-*"))


@pytest.mark.usefixtures("signals")
def test_a_node_on_which_ray_does_not_start_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The first node says so by its status and names itself, so that another attempt goes without it."""
    monkeypatch.setattr(ray_node, "fated", lambda command, **settings: subprocess.Popen("false", **settings))
    said = list[str]()
    assert run_node(task_of(tmp_path, 0, "a"), said.append) == NODE_LOST
    assert (tmp_path / LOST).read_text() == "a\n"
    assert "has ended with status 1" in said[-1]
    end = Meeting(tmp_path, print).read(END)
    assert end is not None and end["status"] == NODE_LOST


@pytest.mark.usefixtures("signals")
@pytest.mark.parametrize("error", [RayEnded, ConfigError, WorkerError])
def test_another_node_on_which_ray_does_not_start_is_lost(
    error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Bad input of that node, such as other versions, ends the launch as bad input: another attempt would not help."""
    monkeypatch.setattr("hybridengine.launch.node.own_addresses", lambda *_: ["127.0.0.1"])
    kind = {"lacks_ray": error is RayEnded, "refused": error is ConfigError}
    Meeting(tmp_path, print).write("failed-1.json", host="b", reason="no room", **kind)
    task = task_of(tmp_path, 0, "a", "b")
    if error is RayEnded:
        assert run_node(task, print) == NODE_LOST
        assert (tmp_path / LOST).read_text() == "b\n"
        return
    with pytest.raises(error, match="node b: no room"):
        run_node(task, print)
    assert not (tmp_path / LOST).exists()
    end = Meeting(tmp_path, print).read(END)
    assert end is not None and end["status"] == (2 if error is ConfigError else 1)


def test_many_missing_nodes_are_counted():
    assert listed("abc") == "a, b, c"
    assert listed(map(str, range(20))) == "0, 1, 2, 3, 4, 5, 6, 7 and 12 others"


def test_what_a_node_starts_ends_with_it(tmp_path: Path):
    """Also if the node is killed, and what it has started ignores signals."""
    program = f"""
import time
from hybridengine.launch.ray_node import fated
endless = "trap '' TERM HUP; echo ready > {tmp_path}/ready; while :; do sleep 0.1; done"
print(fated(["bash", "-c", endless]).pid, flush=True)
time.sleep(1000)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as node:
        assert node.stdout is not None
        pid = int(node.stdout.readline())
        wait_for(lambda: (tmp_path / "ready").exists())
        assert os.getsid(pid) == pid, "signals for the node's group do not reach it"
        node.send_signal(signal.SIGKILL)
    wait_for(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)


class NoRay:
    """In place of Ray on a node that has joined."""

    address = "10.0.0.1:1"

    def __init__(self, *_: object, **__: object) -> None: ...
    def __enter__(self) -> NoRay:
        return self

    def __exit__(self, *_: object) -> None: ...
    def wait(self, *_: object) -> None: ...
    def check(self) -> None: ...


def joining(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ways: dict[str, str]
) -> tuple[Meeting, NodeTask]:
    """Return the meeting and the task of a second node without a launcher, which reaches the first one in these ways."""
    monkeypatch.setattr(node, "RayNode", NoRay)
    monkeypatch.setattr(node, "own_addresses", lambda *_: ["10.0.0.2"])
    monkeypatch.setattr(node, "reached", lambda *_: ways)
    monkeypatch.setattr(Stopping, "_watch", lambda self: None)
    meeting = Meeting(tmp_path, print)
    meeting.write("head.json", addresses=["10.0.0.1"], port=1, secret="", versions=versions())
    return meeting, replace(task_of(tmp_path, 1, "a", "b"), attached=True)


@pytest.mark.usefixtures("signals")
@pytest.mark.parametrize("ends", ["the run", "Ray", "the attempt"])
def test_a_node_without_a_launcher_stays_until_the_run_or_ray_or_the_attempt_has_ended(
    ends: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The run needs it, and may go on with the first node's launcher, unless that has ended the attempt."""
    meeting, task = joining(tmp_path, monkeypatch, {"10.0.0.1": "10.0.0.2"})
    meeting.write_token()
    meeting.write("ray.json", address="10.0.0.1:1", node="10.0.0.1")
    begun = time.monotonic()
    said = "is_over" if ends == "the attempt" else "is_cut_off"
    monkeypatch.setattr(Stopping, "_watch", lambda self: setattr(self, said, True))
    monkeypatch.setattr(node, "SAVE_LIMIT_S", 2.0 if ends == "the attempt" else 0.5)

    def check(_: NoRay) -> None:
        if ends == "Ray" and time.monotonic() > begun + 2:
            raise RayEnded("Ray has ended on b")

    monkeypatch.setattr(NoRay, "check", check)
    if ends == "the run":
        threading.Timer(2.0, meeting.write, (END,), {"status": 0, "reason": ""}).start()
        assert run_node(task, print) == 0
    else:
        text = {"Ray": "Ray has ended on b", "the attempt": "the launcher has ended this attempt"}[ends]
        with pytest.raises(WorkerError, match=text):
            run_node(task, print)
    assert time.monotonic() - begun > 1.9


@pytest.mark.usefixtures("signals")
@pytest.mark.parametrize("is_cut_off", [False, True])
@pytest.mark.parametrize("has_joined", [False, True])
def test_only_a_node_that_was_cut_off_fails_when_the_launch_ends(
    has_joined: bool, is_cut_off: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Another one may reach nothing because the first node has gone for another reason, and is not to be replaced."""
    meeting, task = joining(tmp_path, monkeypatch, {"10.0.0.1": "10.0.0.2"} if has_joined else {})
    if has_joined:
        meeting.write_token()
        meeting.write("ray.json", address="10.0.0.1:1", node="10.0.0.1")
    meeting.write(END, status=1, reason="no address", cut_off=["b"] if is_cut_off else ["c"])
    if is_cut_off:
        with pytest.raises(WorkerError, match="no address"):
            run_node(task, print)
    else:
        assert run_node(task, print) == 0


@pytest.mark.usefixtures("signals")
def test_the_folder_of_an_earlier_launch_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    meeting = Meeting(tmp_path, print)
    meeting.write("head.json", addresses=["10.0.0.1"], port=1, secret="", versions=versions())
    meeting.write("ray.json", address="192.0.2.2:1", node="192.0.2.2")
    with pytest.raises(ConfigError, match="is the folder of an earlier launch; name a new --launch-folder"):
        run_node(task_of(tmp_path, 0, "a", "b"), print)
    assert not (tmp_path / END).exists()  # how that launch ended is no other's to say
    monkeypatch.setattr(node, "own_addresses", lambda *_: ["10.0.0.2"])
    monkeypatch.setattr(node, "reached", lambda *_: {"10.0.0.1": "10.0.0.2"})
    with pytest.raises(WorkerError, match=r"192\.0\.2\.2 of .*ray\.json, which is that of an earlier"):
        run_node(task_of(tmp_path, 1, "a", "b"), print)


@pytest.mark.usefixtures("signals")
@pytest.mark.parametrize(("number", "error"), [("SIGTERM", StoppedError), ("SIGINT", KeyboardInterrupt)])
def test_a_signal_before_the_run_is_no_failure(number: str, error: type[BaseException], tmp_path: Path):
    """The command ends with 143 or 130, as it does later."""
    task = task_of(tmp_path, 0, "a", "b")
    timer = threading.Timer(0.5, os.kill, (os.getpid(), getattr(signal, number)))
    timer.start()
    with pytest.raises(error, match="stopped before the run began; start the launch again"):
        run_node(task, print)
    assert StoppedError.exit_status == 143
    end = Meeting(tmp_path, print).read(END)
    assert end is not None and end["reason"].startswith("stopped before the run began")


@pytest.mark.parametrize(
    ("there", "wanted", "device", "offered"),
    [(8, 4, "cuda", 4), (2, 4, "cuda", 2), (0, 4, "cuda", 0), (8, 0, "cpu", 0), (8, 0, "auto", None)],
)
def test_ray_is_not_told_of_gpus_that_are_not_there(
    there: int, wanted: int, device: str, offered: int | None, monkeypatch: pytest.MonkeyPatch
):
    """It believes any number, and ranks would start without a device."""
    monkeypatch.setattr(launch_node, "num_gpus", lambda: there)
    assert launch_node.offered_gpus(wanted, device) == offered


@pytest.mark.parametrize(
    ("num_gpus", "given", "offered"), [(0, None, 3), (0, 64, 3), (8, None, 16), (8, 64, 64), (2, None, 16)]
)
def test_ray_offers_no_more_room_on_cpus_than_the_launch_has_counted(
    num_gpus: int, given: int | None, offered: int, monkeypatch: pytest.MonkeyPatch
):
    """Pools would share the cores of some nodes, and leave others without ranks."""
    monkeypatch.setattr(launch_node, "number_of_cpus", lambda: 16)
    assert launch_node.offered_cpus(Shape((3, 1), num_gpus, (3, 3)), given) == offered


def test_a_held_run_folder_is_seen(tmp_path: Path):
    assert not is_locked(tmp_path / "run.lock")
    with run_lock(tmp_path, print):
        assert is_locked(tmp_path / "run.lock")
    assert not is_locked(tmp_path / "run.lock")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--hosts", "a,,b", "--index", "0"], "--hosts 'a,,b' has an empty name"),
        (["--hosts", "a,b", "--index", "2"], "--index 2 must be below 2, the number of --hosts"),
        (["--hosts", "a,b,a", "--index", "0"], "--hosts names a twice; a host is one node"),
        (["--hosts", "a,b"], "--index is missing, and SLURM_NODEID is not set"),
        (
            ["--hosts", "a", "--index", "0", "cluster.ranks_per_node=[2,2]"],
            "--hosts names 1 hosts, and the run needs 2",
        ),
    ],
)
def test_bad_input_is_refused(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.delenv("SLURM_NODEID", raising=False)
    folder = tmp_path / "launch"
    assert (
        main(["launch", "node", "configs/arithmetic.yaml", *arguments, "--launch-folder", str(folder)]) == 2
    )
    assert message in capsys.readouterr().err
    assert not folder.exists()


def wait_for(holds: Callable[[], bool], limit_s: float = 30) -> None:
    deadline = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("address", "port", "exported"),
    [
        ("127.0.0.1", None, (None, None)),  # Ray listens where the node does
        ("10.0.0.5", None, ("0", None)),  # it would listen on all addresses
        ("fd77::5", None, ("0", None)),
        ("10.0.0.5", 9090, (None, "--metrics-export-port=9090")),
    ],
)
def test_metrics_leave_a_node_only_if_a_port_is_given(
    address: str,
    port: int | None,
    exported: tuple[str | None, str | None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    started = list[tuple[list[str], dict[str, str]]]()

    class Ended:
        def __init__(self, command: list[str], env: dict[str, str], **_: object) -> None:
            started.append((command, env))

        def poll(self) -> int:
            return 0

    monkeypatch.setattr(ray_node, "fated", Ended)
    node = RayNode(address, "10.0.0.1:6379", {}, tmp_path / "log", num_cpus=1, num_gpus=0, metrics_port=port)
    node.stop()
    ((command, environment),) = started
    options = [option for option in command if option.startswith("--metrics-export-port")]
    assert (environment.get("RAY_enable_metrics_collection"), next(iter(options), None)) == exported


@pytest.mark.parametrize(("address", "taken"), [("127.0.0.1", "127.0.0.1"), ("10.0.0.5", "10.0.0.5")])
def test_ray_takes_the_address_of_its_node(address: str, taken: str, tmp_path: Path):
    """Also loopback, for which Ray would take another address that the machine has."""
    code = (
        "from ray._private.services import resolve_ip_for_localhost as r; import sys; print(r(sys.argv[1]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, address],
        env=token_environment(tmp_path / "token", address),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [taken]

"""Launches over ssh, with a program in place of ssh that runs the command on this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from hybridengine.cli.main import main
from hybridengine.errors import ConfigError
from hybridengine.launch import ssh
from hybridengine.launch.ssh import SshLaunch, launch, remote_command

SSH = """#!/bin/bash
while [ "${1:0:1}" = - ]; do shift 2; done
host=$1; shift
[ -e "no-$host" ] && { echo "ssh: connect to host $host port 22: No route to host" >&2; exit 255; }
[ -e "hangs-$host" ] && exec sleep 600
HOST_NAME=$host exec bash -c "$*"
"""
PYTHON = """#!/bin/bash
# $1 -m, $2 module, $3 index of the node, $4 number of the attempt, $5 hosts
[ "$3" = --version ] && exit
echo "$HOST_NAME $3 of attempt $4" >> started
case $HOST_NAME in broken) exit ${BROKEN:-75};; esac
if [ "$HOST_NAME" = late ]; then while [ ! -e "end-$4" ]; do sleep 0.05; done; sleep 0.5; exit 1; fi
[[ $3 != 0 && ( $HOST_NAME = alone || $5 = alone,* ) ]] && exit 1
[[ $3 != 0 && $5 = *,alone* ]] && exit 0
echo "hello from $3"
seq ${LINES_OF_OUTPUT:-0}
if [ "$3" = 0 ]; then
  while [ ! -e "end-$4" ]; do
    read -rt 0.05 part; heard=$?; line+=$part
    [ "$heard ${line% *}" = "0 lost" ] && { line=; [ "$RUNS" ] && continue; exit 1; }
    [ $heard = 0 ] && { echo "asked: $line"; echo "$line" >> asked; line=; [ "$SAVES" ] || exit 0; continue; }
    [ $heard -gt 128 ] || exit 1 # no time limit, but the end of the input
  done
  exit $(cat "end-$4")
fi
cat > "input-$3-$4"
"""
"""A node of a launch: the first one ends with the number in end-ATTEMPT, or when asked to or told of a lost host; others
with their input. The host `alone` and the others do not reach each other."""


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SshLaunch:
    for name, text in (("ssh", SSH), ("python", PYTHON)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ssh, "SETTLE_LIMIT_S", 0)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return SshLaunch(
        hosts=("a", "b", "c"),
        num_nodes=2,
        folder=str(tmp_path),
        setup="export SET=up",
        python=str(tmp_path / "python"),
        options=("-o", "Port=2222"),
        arguments=lambda hosts, index, attempt: [str(index), str(attempt)],
        retries=2,
    )


def with_hosts(plan: SshLaunch, *hosts: str) -> SshLaunch:
    return SshLaunch(**{**vars(plan), "hosts": hosts})


def program(plan: SshLaunch, before: str) -> list[str]:
    """Return the command of a process of its own that launches, after some lines of Python."""
    values = {key: value for key, value in vars(plan).items() if key != "arguments"}
    text = f"""
import os, signal, sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from hybridengine.cli import launch_ssh, main
from hybridengine.launch.ssh import SshLaunch, launch
started = lambda index: None
{before}
def arguments(hosts, index, attempt):
    started(index)
    return [str(index), str(attempt)]
launch_ssh.run = lambda options: launch(SshLaunch(**{values!r}, arguments=arguments), launch_ssh.note)
sys.exit(main.main(["launch", "ssh", "run.yaml", "--hosts", "a"]))
"""
    return [sys.executable, "-c", text]


def started() -> list[str]:
    return sorted(Path("started").read_text().splitlines())


def test_the_first_hosts_that_answer_are_used(plan: SshLaunch, capfd: pytest.CaptureFixture[str]):
    Path("no-a").touch()
    Path("end-0").write_text("0")
    said = list[str]()
    assert launch(plan, said.append) == 0
    assert started() == ["b 0 of attempt 0", "c 1 of attempt 0"]
    assert said[0] == "a cannot be used: ssh: connect to host a port 22: No route to host"
    printed = capfd.readouterr().out.splitlines()
    assert "b: hello from 0" in printed


def test_a_host_that_hangs_leaves_the_others_usable(plan: SshLaunch, monkeypatch: pytest.MonkeyPatch):
    Path("hangs-a").touch()
    Path("end-0").write_text("0")
    monkeypatch.setattr(ssh, "ENOUGH_LIMIT_S", 1.0)
    said = list[str]()
    assert launch(plan, said.append) == 0
    assert said[0] == "a cannot be used: no answer within 1 s"
    assert started() == ["b 0 of attempt 0", "c 1 of attempt 0"]
    monkeypatch.setattr(ssh, "CHECK_LIMIT_S", 1.0)
    reason = r"2 of 3 hosts can be used, and the run needs 3 \(a: no answer within \d s\)"
    with pytest.raises(ConfigError, match=reason):
        launch(replace(plan, num_nodes=3), said.append)


def test_the_status_of_the_run_is_that_of_the_launch(plan: SshLaunch):
    Path("end-0").write_text("2")
    assert launch(plan, print) == 2
    assert started() == ["a 0 of attempt 0", "b 1 of attempt 0"]


def test_a_spare_host_takes_the_place_of_one_that_fails(plan: SshLaunch, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("BROKEN", "255")  # the connection to the first node is gone
    Path("end-1").write_text("0")
    said = list[str]()
    assert launch(with_hosts(plan, "broken", "b", "c"), said.append) == 0
    assert started()[-2:] == ["broken 0 of attempt 0", "c 1 of attempt 1"]
    assert "b 0 of attempt 1" in started()


def test_a_host_that_fails_before_the_run_ends_the_attempt(plan: SshLaunch):
    Path("end-1").write_text("0")
    said = list[str]()
    assert launch(with_hosts(plan, "a", "broken", "c"), said.append) == 0
    assert Path("input-1-1").read_text() == "over\n", "a connection that breaks does not say so"
    assert "broken has ended with status 75; the run ends, or continues without it" in said
    assert "attempt 1 has lost broken" in said
    assert {"c 0 of attempt 1", "a 1 of attempt 1"} <= set(started())


@pytest.mark.parametrize(
    ("num_nodes", "hosts", "num_attempts"),
    [
        (2, ["alone", "b", "c", "d"], 2),
        (2, ["a", "alone", "c", "d"], 2),
        (2, ["alone", "b", "c"], 3),
        (2, ["a", "alone", "c"], 2),
        (3, ["alone", "b", "c", "d"], 3),
        (3, ["a", "b", "alone", "d"], 2),
        (4, ["alone", "b", "c", "d", "e"], 2),
    ],
)
def test_a_host_that_no_other_reaches_is_replaced_also_if_it_comes_first(
    num_nodes: int, hosts: list[str], num_attempts: int, plan: SshLaunch, monkeypatch: pytest.MonkeyPatch
):
    """Only the others say that they do not reach it."""
    monkeypatch.setattr(ssh, "SETTLE_LIMIT_S", 30)
    Path(f"end-{num_attempts - 1}").write_text("0")

    def arguments(hosts: Sequence[str], index: int, attempt: int) -> list[str]:
        return [str(index), str(attempt), ",".join(hosts)]

    named = replace(with_hosts(plan, *hosts), num_nodes=num_nodes, arguments=arguments)
    assert launch(named, print) == 0
    last = [line for line in started() if line.endswith(f"attempt {num_attempts - 1}")]
    assert len(last) == num_nodes and not any("alone" in line for line in last)


def test_a_run_may_go_on_without_a_host(plan: SshLaunch, monkeypatch: pytest.MonkeyPatch):
    """As one does that has lost one of several engines."""
    monkeypatch.setenv("RUNS", "yes")
    said = list[str]()

    def say(text: str) -> None:
        said.append(text)
        if "the run ends, or continues" in text:
            threading.Timer(2, Path("end-0").write_text, ["0"]).start()

    assert launch(with_hosts(plan, "a", "broken", "c"), say) == 0
    assert started() == ["a 0 of attempt 0", "broken 1 of attempt 0"]
    assert not any("has lost" in text for text in said)


def test_a_host_that_fails_after_the_first_node_has_ended_is_replaced(
    plan: SshLaunch, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(ssh, "SETTLE_LIMIT_S", 30)
    Path("end-0").write_text("2")
    Path("end-1").write_text("0")
    said = list[str]()
    assert launch(with_hosts(plan, "a", "late", "c"), said.append) == 0
    assert said[-3:-1] == ["late has ended with status 1", "attempt 1 has lost late"]
    assert {"c 0 of attempt 1", "a 1 of attempt 1"} <= set(started())


@pytest.mark.parametrize("first", ["has ended", "runs"])
def test_bad_input_that_a_host_finds_is_not_tried_again(
    first: str, plan: SshLaunch, monkeypatch: pytest.MonkeyPatch
):
    """Such as other versions: spare hosts would not help, and the host has said why."""
    monkeypatch.setattr(ssh, "SETTLE_LIMIT_S", 30 if first == "has ended" else 0.5)
    monkeypatch.setenv("BROKEN", "2")
    monkeypatch.setenv("RUNS", "yes")
    if first == "has ended":
        Path("end-0").write_text("1")
    assert launch(with_hosts(plan, "a", "broken", "c"), print) == 2
    assert started() == ["a 0 of attempt 0", "broken 1 of attempt 0"]


def test_all_output_arrives_however_late_it_is_read(plan: SshLaunch, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LINES_OF_OUTPUT", "12000")
    Path("end-0").write_text("0")
    limit = "from hybridengine.launch import output; output.OUTPUT_LIMIT_S = 0.5"
    with subprocess.Popen(program(plan, limit), stdout=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 60
        while not Path("input-1-0").exists() and time.monotonic() < deadline:
            time.sleep(0.1)  # the nodes have ended
        time.sleep(3)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert output.count("a: ") == 12_001


@pytest.mark.parametrize(
    ("lines", "sign"), [(12_000, "input-1-0"), (60_000, "started")], ids=["at its end", "in mid-run"]
)
def test_a_launch_whose_output_waits_ends_when_asked(
    lines: int, sign: str, plan: SshLaunch, monkeypatch: pytest.MonkeyPatch
):
    """Two pipes hold 128 KiB of it; more keeps the first node."""
    monkeypatch.setenv("LINES_OF_OUTPUT", str(lines))
    Path("end-0").write_text("0")
    limit = "from hybridengine.launch import output; output.OUTPUT_LIMIT_S = 0.5"
    with subprocess.Popen(program(plan, limit), stdout=subprocess.PIPE) as process:
        deadline = time.monotonic() + 60
        while not Path(sign).exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(3)
        assert process.poll() is None, "its output is not read"
        process.send_signal(signal.SIGTERM)
        try:
            assert process.wait(60) == 0
        finally:
            process.kill()
    assert Path("input-1-0").read_text() == "over\n"


def test_a_launch_without_stdout_goes_on(plan: SshLaunch, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LINES_OF_OUTPUT", "100000")
    Path("end-0").write_text("0")
    command = ["bash", "-c", 'exec "$@" >&-', "bash", *program(plan, "")]
    assert subprocess.run(command, timeout=60, check=False).returncode == 0


def test_output_to_a_pipe_that_does_not_block_is_waited_for(plan: SshLaunch, monkeypatch: pytest.MonkeyPatch):
    """A program that shares it may have set this."""
    monkeypatch.setenv("LINES_OF_OUTPUT", "20000")
    Path("end-0").write_text("0")
    end, output = os.pipe()
    os.set_blocking(output, False)
    with subprocess.Popen(program(plan, ""), stdout=output) as process, open(end, "rb") as reader:
        os.close(output)
        time.sleep(3)
        text = reader.read()
    assert (process.returncode, text.count(b"a: ")) == (0, 20_001)


def test_a_launch_whose_output_nobody_reads_stops_the_run(plan: SshLaunch, monkeypatch: pytest.MonkeyPatch):
    """A node that prints more than a pipe holds would stand still, and could save nothing."""
    monkeypatch.setenv("LINES_OF_OUTPUT", "20000")
    with subprocess.Popen(program(plan, ""), stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        try:
            assert process.wait(60) == 141
        finally:
            process.kill()


def test_a_launch_that_is_stopped_with_its_reader_asks_once(plan: SshLaunch, monkeypatch: pytest.MonkeyPatch):
    """As by Ctrl-C in a pipeline; asked twice, a run ends without saving its step."""
    monkeypatch.setenv("SAVES", "yes")
    with subprocess.Popen(program(plan, ""), stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 60
        while not Path("asked").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(2)  # in which the launcher would ask again
        Path("end-0").write_text("0")
        try:
            assert process.wait(60) == 141
        finally:
            process.kill()
    assert Path("asked").read_text() == "stop\n"


@pytest.mark.parametrize("kind", ["a full disk", "a terminal that is gone"])
def test_output_that_cannot_be_written_does_not_keep_nodes_from_going_on(
    kind: str, plan: SshLaunch, monkeypatch: pytest.MonkeyPatch
):
    """More of it than pipes hold."""
    monkeypatch.setenv("LINES_OF_OUTPUT", "100000")
    if kind == "a full disk":
        output = os.open("/dev/full", os.O_WRONLY)
        Path("end-0").write_text("0")
    else:
        other, output = os.openpty()
        os.close(other)
    with subprocess.Popen(program(plan, ""), stdout=output, stderr=subprocess.PIPE) as process:
        os.close(output)
        try:
            assert process.wait(60) == (0 if kind == "a full disk" else 141)
        finally:
            process.kill()
        assert process.stderr is not None
        assert (b" lines of output are lost" in process.stderr.read()) == (kind == "a full disk")
    assert Path("input-1-0").read_text() == "over\n"
    assert len(started()) == 2, "one attempt"


@pytest.mark.parametrize("hard", [1024, 200])
def test_a_launch_on_many_hosts_raises_its_limit_of_open_files(hard: int, plan: SshLaunch):
    plan = with_hosts(plan, *[f"host{number}" for number in range(200)])
    Path("end-0").write_text("0")
    limit = f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (200, {hard}))"
    command = program(SshLaunch(**{**vars(plan), "num_nodes": 200}), limit)
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if hard == 200:
        assert (
            "needs 656 open files, and this system allows 200 (ulimit -Hn); raise this limit" in done.stderr
        )
        assert done.returncode == 2
    else:
        assert done.returncode == 0, done.stderr
        assert len(started()) == 200


def test_attempts_end(plan: SshLaunch):
    for attempt in range(3):
        Path(f"end-{attempt}").write_text("75")
    with pytest.raises(Exception, match="3 attempts have lost nodes"):
        launch(plan, print)
    assert [line for line in started() if " 0 of" in line] == [
        "a 0 of attempt 0",
        "b 0 of attempt 1",
        "c 0 of attempt 2",
    ], "a first node that ends so comes last in the next attempt"


def test_too_few_hosts_that_answer_are_named_with_the_reason(plan: SshLaunch):
    Path("no-a").touch()
    Path("no-c").touch()
    with pytest.raises(
        ConfigError, match=r"1 of 3 hosts can be used, and the run needs 2 \(a: ssh: connect .*; c: ssh"
    ):
        launch(plan, print)
    assert not Path("started").exists(), "nothing is started"
    with pytest.raises(ConfigError, match="the run needs 2 hosts, and the list names 1; name more"):
        launch(with_hosts(plan, "b"), print)


def test_a_folder_that_a_host_lacks_is_found_before_the_start(plan: SshLaunch):
    with pytest.raises(ConfigError, match="/nowhere: No such file or directory"):
        launch(SshLaunch(**{**vars(plan), "folder": "/nowhere"}), print)


@pytest.mark.parametrize("moment", ["between two nodes", "with all nodes"])
def test_a_launch_asks_the_first_node_to_stop(moment: str, plan: SshLaunch):
    signalling = "def started(index):\n    if index == 1: os.kill(os.getpid(), signal.SIGTERM)"
    between = moment == "between two nodes"
    command = program(plan, signalling if between else "")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 60
        while not (Path("started").exists() and len(started()) == 2) and time.monotonic() < deadline:
            time.sleep(0.05)
        if not between:
            process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "a: asked: stop" in output.splitlines()


@pytest.mark.parametrize("setup", ["export SET=up", "export SET='up' # not down"])
def test_the_command_of_a_host_is_quoted(setup: str, plan: SshLaunch, tmp_path: Path):
    plan = SshLaunch(**{**vars(plan), "setup": setup})
    (tmp_path / "python").write_text('#!/bin/bash\nprintf "%s|" "$@" "$SET" "$PWD"\n')
    command = remote_command(plan, ["train", "a b", "c='d'", "$HOME"])
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout == f"-m|hybridengine.cli.main|train|a b|c='d'|$HOME|up|{tmp_path}|"


def test_the_command_tells_bad_input_before_anything_starts(capsys: pytest.CaptureFixture[str]):
    assert main(["launch", "ssh", "configs/llama3-70b-16nodes.yaml", "--hosts", "a,b"]) == 2
    assert "the run needs 16 hosts, and the list names 2; name more" in capsys.readouterr().err
    assert main(["launch", "ssh", "configs/arithmetic.yaml"]) == 2
    assert "one of the arguments --hosts --hostfile is required" in capsys.readouterr().err

"""Batch scripts for SLURM, run by bash with programs in place of SLURM's."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hybridengine.cli.main import main
from hybridengine.launch.meeting import END, Meeting

PROGRAMS = {
    "scontrol": """case "$*" in
          "show hostnames node-[1-2]") printf 'node-1\\nnode-2\\n';;
          "show hostnames "*) tr , '\\n' <<< "$3";;
          *) echo "$*" >> calls;;
        esac""",
    "squeue": """[ -s busy ] && { read -r n < busy; [ "$n" = 0 ] || { echo $((n - 1)) > busy; exit 1; }; }
        case "$4" in
          *%r) cat reason;; *%x) cat excluded;; *%T) cat state;;
          *%f) echo h100;; *%v) echo "(null)";; *%n) echo;; *) echo "its-${4#*%}";;
        esac""",
    "sbatch": """echo "$*${SBATCH_PARTITION+ of another partition}" >> calls; echo 'no such nodes'; exit $(cat full)""",
    "sleep": "exit 0",
    "srun": """echo "$*" > srun-called
        while [ ! -e status ]; do
          [ -e runs/arithmetic/launch/17.0/stop ] && { echo asked >> calls; exit 0; }
          read -rt 0.05 <> <(:)
        done
        exit $(cat status)""",
}
"""Programs that the script calls; the step ends with the number in the file `status`, or when it is asked to stop."""


@pytest.fixture
def job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., subprocess.Popen[str]]:
    """Return a function that starts a script as a job in `tmp_path`."""
    programs = tmp_path / "programs"
    programs.mkdir()
    (tmp_path / "configs").mkdir()
    shutil.copy("configs/arithmetic.yaml", tmp_path / "configs")
    for name, text in PROGRAMS.items():
        (programs / name).write_text(f"#!/bin/bash\n{text}\n")
        (programs / name).chmod(0o755)
    for name, text in {"state": "RUNNING", "reason": "None", "excluded": "(null)"}.items():
        (tmp_path / name).write_text(f"{text}\n")

    def start(*arguments: str, restarts: int = 0) -> subprocess.Popen[str]:
        assert (
            main(["launch", "slurm", "configs/arithmetic.yaml", "--folder", str(tmp_path), *arguments]) == 0
        )
        (tmp_path / "job.sh").write_text(capsys.readouterr().out)
        variables = {
            "PATH": f"{programs}:{os.environ['PATH']}",
            "SLURM_JOB_ID": "17",
            "SLURM_JOB_NODELIST": "node-[1-2]",
            "SBATCH_PARTITION": "another",
        }
        variables |= {"SLURM_RESTART_COUNT": str(restarts)} if restarts else {}
        return subprocess.Popen(
            ["bash", "job.sh"],
            cwd=tmp_path,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    return start


def wait_until_running(folder: Path) -> None:
    """Wait until the script has started its step and set its traps."""
    deadline = time.monotonic() + 30
    while not (folder / "srun-called").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.3)


def calls(folder: Path) -> list[str]:
    file = folder / "calls"
    return file.read_text().splitlines() if file.exists() else []


def test_a_script_asks_for_the_nodes_of_the_configuration(capsys: pytest.CaptureFixture[str]):
    command = [
        "launch",
        "slurm",
        "configs/llama3-70b-16nodes.yaml",
        "--partition",
        "gpu",
        "--cpus-per-node",
        "96",
    ]
    command += ["--time", "2-00:00:00", "--sbatch-option", "reservation=rl", "--signal-before", "600"]
    assert main(command) == 0
    script = capsys.readouterr().out
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0
    lines = script.splitlines()
    directives = [line.removeprefix("#SBATCH --") for line in lines if line.startswith("#SBATCH ")]
    assert lines[0] == "#!/bin/bash"
    assert {name: value for name, _, value in (one.partition("=") for one in directives)} == {
        "job-name": "llama3-70b-16nodes",
        "nodes": "16",
        "ntasks-per-node": "1",
        "cpus-per-task": "96",
        "gpus-per-node": "8",
        "exclusive": "",
        "requeue": "",
        "open-mode": "append",
        "output": "slurm-%x-%j.log",
        "signal": "B:TERM@600",
        "time": "2-00:00:00",
        "partition": "gpu",
        "mem": "0",
        "reservation": "rl",
    }
    first = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    assert all(not line.startswith("#SBATCH") for line in lines[first:]), (
        "sbatch stops reading at the first command"
    )


def test_the_step_is_one_node_of_the_launch_on_each_node(
    job: Callable[..., subprocess.Popen[str]], tmp_path: Path
):
    (tmp_path / "status").write_text("0")
    with job(
        "run.name=my run".replace(" ", "_"), "actor.optimizer.lr=1e-3", "--srun-option", "mpi=none"
    ) as started:
        output, _ = started.communicate(timeout=60)
    assert started.returncode == 0, output
    words = (tmp_path / "srun-called").read_text().split()
    assert words[words.index("--mpi=none") + 1 : words.index("--mpi=none") + 3] == [
        "env",
        f"--chdir={tmp_path}",
    ]
    assert words[words.index("--mpi=none") + 4 : words.index("--hosts")] == [
        *("-m", "hybridengine.cli.main", "launch", "node", "configs/arithmetic.yaml"),
        *("run.name=my_run", "actor.optimizer.lr=1e-3", "--start-limit", "900"),
    ]
    launch = tmp_path / "runs/my_run/launch/17.0"
    assert words[words.index("--hosts") :] == ["--hosts", "node-1,node-2", "--launch-folder", str(launch)]
    assert launch.stat().st_mode & 0o777 == 0o700
    assert calls(tmp_path) == []


def test_a_step_that_starts_in_the_folder_of_an_image_runs_in_that_of_the_job(
    job: Callable[..., subprocess.Popen[str]], tmp_path: Path
):
    """As pyxis does with --srun-option container-image."""
    image = tmp_path / "image"
    image.mkdir()
    (tmp_path / "programs/srun").write_text(
        f"""#!/bin/bash\nwhile [ "${{1:0:1}}" = - ]; do shift; done\ncd {image}; exec "$@"\n"""
    )
    (tmp_path / "programs/python").write_text(
        f"""#!/bin/bash\npwd > {tmp_path}/where\necho "$*" >> {tmp_path}/where\n"""
    )
    (tmp_path / "programs/python").chmod(0o755)
    with job("--python", "python", "--srun-option", "container-image=team/image:1") as started:
        output, _ = started.communicate(timeout=60)
    assert started.returncode == 0, output
    folder, arguments = (tmp_path / "where").read_text().splitlines()
    assert folder == str(tmp_path)
    assert f"--launch-folder {tmp_path}/runs/arithmetic/launch/17.0" in arguments


@pytest.mark.parametrize(
    ("status", "restarts", "state", "requeued"),
    [
        (1, 0, "RUNNING", False),  # the run has failed by itself
        (2, 0, "RUNNING", False),
        (75, 0, "RUNNING", True),  # a node was lost
        (75, 4, "RUNNING", True),
        (75, 0, "SIGNALING", True),
        (75, 5, "RUNNING", False),
        (75, 0, "COMPLETING", False),  # the user has cancelled the job
    ],
)
def test_a_job_that_has_lost_a_node_is_requeued(
    status: int,
    restarts: int,
    state: str,
    requeued: bool,
    job: Callable[..., subprocess.Popen[str]],
    tmp_path: Path,
):
    (tmp_path / "status").write_text(str(status))
    (tmp_path / "state").write_text(state)
    with job(restarts=restarts) as started:
        output, _ = started.communicate(timeout=60)
    assert started.returncode == status, output
    assert calls(tmp_path) == (["requeue 17"] if requeued else [])
    assert (tmp_path / f"runs/arithmetic/launch/17.{restarts}").is_dir()
    used_up = "not requeued: --retries 5 is used up; submit the script again"
    assert (used_up in output) == (restarts == 5)


@pytest.mark.parametrize(("status", "requeued"), [(75, True), (0, False), (1, False)])
def test_the_status_is_that_of_the_run_where_another_node_was_killed(
    status: int, requeued: bool, job: Callable[..., subprocess.Popen[str]], tmp_path: Path
):
    """SLURM 22.05 gives a step the largest status of its tasks: 137 if one of them was killed."""
    (tmp_path / "status").write_text("137")
    Meeting(tmp_path / "runs/arithmetic/launch/17.0", print).write(END, status=status, reason='of "this"')
    with job() as started:
        output, _ = started.communicate(timeout=60)
    assert started.returncode == status, output
    assert calls(tmp_path) == (["requeue 17"] if requeued else [])


@pytest.mark.parametrize(
    ("excluded", "lost", "full", "asked", "update"),
    [
        ("(null)", "node-2", 0, "node-2", "node-2"),
        ("node-7", "node-2", 0, "node-7,node-2", "node-7,node-2"),
        ("(null)", "node-2", 1, "node-2", None),  # the job would wait for ever
        ("(null)", "", 0, None, None),
    ],
)
def test_a_node_that_has_left_ray_is_excluded_if_the_job_can_start_on_others(
    excluded: str,
    lost: str,
    full: int,
    asked: str | None,
    update: str | None,
    job: Callable[..., subprocess.Popen[str]],
    tmp_path: Path,
):
    (tmp_path / "full").write_text(str(full))
    (tmp_path / "excluded").write_text(f"{excluded}\n")
    (tmp_path / "status").write_text("75")
    Meeting(tmp_path / "runs/arithmetic/launch/17.0", print).write_lost(lost.split())
    with job("cluster.ranks_per_node=[2,2]") as started:
        output, _ = started.communicate(timeout=60)
    options = "--account=its-a --constraint=h100 --partition=its-P --qos=its-q --time=its-l"
    asking = [f"--test-only --exclude={asked} {options} job.sh"] if asked else []
    excluding = [f"update JobId=17 ExcNodeList={update}"] if update else []
    assert calls(tmp_path) == ["requeue 17", *asking, *excluding], output
    refused = f"not excluded from the next start: {asked}, as SLURM starts no job without: no such nodes"
    assert (refused in output) == bool(full)


@pytest.mark.parametrize(("fails", "requeued"), [(3, True), (99, False)])
def test_a_controller_that_does_not_answer_is_asked_again(
    fails: int, requeued: bool, job: Callable[..., subprocess.Popen[str]], tmp_path: Path
):
    (tmp_path / "status").write_text("75")
    (tmp_path / "busy").write_text(f"{fails}\n")
    with job() as started:
        output, _ = started.communicate(timeout=60)
    assert calls(tmp_path) == (["requeue 17"] if requeued else []), output
    assert ("not requeued: SLURM ends the job, or does not answer" in output) != requeued


@pytest.mark.parametrize(("asked", "state"), [(True, "RUNNING"), (False, "RUNNING"), (True, "COMPLETING")])
def test_nodes_that_are_asked_to_stop_make_room_and_start_again_later(
    asked: bool, state: str, job: Callable[..., subprocess.Popen[str]], tmp_path: Path
):
    """As before a preemption: the nodes have a signal that the script has not."""
    (tmp_path / "status").write_text("0")
    (tmp_path / "state").write_text(state)
    meeting = Meeting(tmp_path / "runs/arithmetic/launch/17.0", print)
    meeting.write(END, status=0, reason='"asked": true', asked=asked)
    with job() as started:
        output, _ = started.communicate(timeout=60)
    assert calls(tmp_path) == (["requeue 17"] if asked and state == "RUNNING" else []), output


def test_a_run_that_is_late_for_the_time_limit_is_requeued(
    job: Callable[..., subprocess.Popen[str]], tmp_path: Path
):
    """SLURM signals the script again at the limit, and kills it soon; the step goes on until it is killed as well."""
    (tmp_path / "programs/srun").write_text("#!/bin/bash\necho > srun-called\nexec /bin/sleep 10 >&- 2>&-\n")
    with job() as started:
        wait_until_running(tmp_path)
        started.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        assert started.poll() is None and calls(tmp_path) == []
        (token := tmp_path / "runs/arithmetic/launch/17.0/token").touch()
        (tmp_path / "state").write_text("COMPLETING\n")
        (tmp_path / "reason").write_text("TimeLimit\n")
        started.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 30
        while not calls(tmp_path) and time.monotonic() < deadline:
            time.sleep(0.05)
        started.kill()
        output, _ = started.communicate(timeout=60)
    assert calls(tmp_path) == ["requeue 17"], output
    assert not token.exists(), "the first node may be killed before it removes the token"
    assert "the time limit came before the step was saved; raise --signal-before" in output


@pytest.mark.parametrize(
    ("number", "expected"), [(signal.SIGTERM, ["asked", "requeue 17"]), (signal.SIGUSR1, ["asked"])]
)
def test_a_signal_stops_the_run_and_before_the_time_limit_requeues_the_job(
    number: signal.Signals, expected: list[str], job: Callable[..., subprocess.Popen[str]], tmp_path: Path
):
    with job() as started:
        wait_until_running(tmp_path)
        started.send_signal(number)
        output, _ = started.communicate(timeout=60)
    assert started.returncode == 0, output
    assert calls(tmp_path) == expected


def test_a_run_that_is_stopped_at_its_last_time_limit_says_so(
    job: Callable[..., subprocess.Popen[str]], tmp_path: Path
):
    """The run has saved its step, and so the job has status 0."""
    with job("--retries", "0") as started:
        wait_until_running(tmp_path)
        started.send_signal(signal.SIGTERM)
        output, _ = started.communicate(timeout=60)
    assert (started.returncode, calls(tmp_path)) == (0, ["asked"])
    assert "not requeued: --retries 0 is used up" in output


@pytest.mark.parametrize("setup", ["false", "false # a comment"])
def test_setup_that_fails_ends_the_job(setup: str, job: Callable[..., subprocess.Popen[str]], tmp_path: Path):
    with job("--setup", setup) as started:
        started.communicate(timeout=60)
    assert started.returncode == 2
    assert not (tmp_path / "srun-called").exists()

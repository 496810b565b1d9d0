"""Batch scripts for SLURM, run by bash with programs in place of SLURM's."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hybridengine.cli.main import main

PROGRAMS = {
    "scontrol": """[ "$1" = show ] && printf 'node-1\\nnode-2\\n' || echo "$*" >> calls""",
    "squeue": "cat state",
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
    for name, text in PROGRAMS.items():
        (programs / name).write_text(f"#!/bin/bash\n{text}\n")
        (programs / name).chmod(0o755)
    (tmp_path / "state").write_text("RUNNING\n")

    def start(*arguments: str, restarts: int = 0) -> subprocess.Popen[str]:
        assert (
            main(["launch", "slurm", "configs/arithmetic.yaml", "--folder", str(tmp_path), *arguments]) == 0
        )
        (tmp_path / "job.sh").write_text(capsys.readouterr().out)
        variables = {
            "PATH": f"{programs}:{os.environ['PATH']}",
            "SLURM_JOB_ID": "17",
            "SLURM_JOB_NODELIST": "node-[1-2]",
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
    assert words[words.index("--mpi=none") + 2 : words.index("--hosts")] == [
        *("-m", "hybridengine.cli.main", "launch", "node", "configs/arithmetic.yaml"),
        *("run.name=my_run", "actor.optimizer.lr=1e-3", "--start-limit", "900"),
    ]
    launch = "runs/my_run/launch/17.0"
    assert words[words.index("--hosts") :] == ["--hosts", "node-1,node-2", "--launch-folder", launch]
    assert (tmp_path / launch).stat().st_mode & 0o777 == 0o700
    assert calls(tmp_path) == []


@pytest.mark.parametrize(
    ("status", "restarts", "state", "requeued"),
    [
        (1, 0, "RUNNING", False),  # the run has failed by itself
        (2, 0, "RUNNING", False),
        (75, 0, "RUNNING", True),  # a node was lost
        (75, 4, "RUNNING", True),
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


@pytest.mark.parametrize(
    ("number", "expected"), [(signal.SIGTERM, ["asked", "requeue 17"]), (signal.SIGUSR1, ["asked"])]
)
def test_a_signal_stops_the_run_and_before_the_time_limit_requeues_the_job(
    number: signal.Signals, expected: list[str], job: Callable[..., subprocess.Popen[str]], tmp_path: Path
):
    with job() as started:
        deadline = time.monotonic() + 30
        while not (tmp_path / "srun-called").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.3)  # until the trap is set
        started.send_signal(number)
        output, _ = started.communicate(timeout=60)
    assert started.returncode == 0, output
    assert calls(tmp_path) == expected


def test_setup_that_fails_ends_the_job(job: Callable[..., subprocess.Popen[str]], tmp_path: Path):
    with job("--setup", "false") as started:
        started.communicate(timeout=60)
    assert started.returncode == 2
    assert not (tmp_path / "srun-called").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--partition", "a b"], '--partition "a b" has blanks or line breaks, which end an option of SLURM'),
        (["--sbatch-option", "=x"], "--sbatch-option '=x' has no name"),
        (["--gpus-per-node", "2"], "pool 'main' has 4 ranks on a node, and --gpus-per-node 2 allows 2"),
        (["--signal-before", "5"], "'5' must be an integer from 30 to 65535"),
    ],
)
def test_bad_input_is_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    assert main(["launch", "slurm", "configs/arithmetic.yaml", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_submitting_needs_sbatch_that_accepts_the_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PATH", str(tmp_path))
    command = ["launch", "slurm", "configs/arithmetic.yaml", "--submit", "--output", str(tmp_path / "job.sh")]
    assert main(command) == 2
    assert (
        "SLURM's sbatch is not installed on this machine; submit the script where" in capsys.readouterr().err
    )
    assert (tmp_path / "job.sh").read_text().startswith("#!/bin/bash\n"), "it is written all the same"
    (tmp_path / "sbatch").write_text("#!/bin/sh\necho 'invalid partition specified' >&2; exit 1\n")
    (tmp_path / "sbatch").chmod(0o755)
    assert main(command) == 2
    assert "sbatch refuses the job: invalid partition specified" in capsys.readouterr().err
    (tmp_path / "sbatch").write_text(
        f"#!/bin/sh\n/bin/cat > {tmp_path}/submitted; echo Submitted batch job 17\n"
    )
    assert main(command) == 0
    assert "Submitted batch job 17" in capsys.readouterr().err
    assert (tmp_path / "submitted").read_text() == (tmp_path / "job.sh").read_text()


def test_unequal_nodes_are_told(capsys: pytest.CaptureFixture[str]):
    assert main(["launch", "slurm", "configs/arithmetic.yaml", "cluster.ranks_per_node=[3,1]"]) == 0
    said = capsys.readouterr()
    assert "SLURM gives equal nodes: each has room for 3 ranks, also those with fewer" in said.err
    assert "#SBATCH --nodes=2\n" in said.out


@pytest.mark.parametrize("limit", ["5x", "", "1:2", "-5", "24:00:00:00", "soon"])
def test_a_time_limit_that_slurm_does_not_take_is_refused(
    limit: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", "slurm", "configs/arithmetic.yaml", f"--time={limit}"]) == 2
    assert f"{limit!r} is no time limit of SLURM; write minutes" in capsys.readouterr().err

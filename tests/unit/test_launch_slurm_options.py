"""Options of `launch slurm`: what the script asks for, and what is refused before a job waits."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hybridengine.cli.main import main


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--partition", "a b"], '--partition "a b" has blanks, line breaks, quotes, # or'),
        (["--sbatch-option", "comment=a#b"], '--comment "a#b" has blanks, line breaks, quotes, # or'),
        (["--sbatch-option", "=x"], "--sbatch-option '=x' has no name"),
        (["--gpus-per-node", "2"], "pool 'main' has 4 ranks on a node, and --gpus-per-node 2 allows 2"),
        (["--signal-before", "5"], "'5' must be an integer from 30 to 65535"),
        (["--time", "3", "--signal-before", "7200"], "--signal-before 7200 is not less than --time 3, 180 s"),
        (["--shared"], "--shared without --mem would ask for all memory of each node"),
        (
            ["--sbatch-option", "nodes=1"],
            "--sbatch-option nodes is set by this command, from cluster.ranks_per",
        ),
        (["--setup", "if true"], '--setup "if true" is not valid: bash: line '),
        (["--sbatch-option", "N=3"], "--sbatch-option 'N=3' has the short name of an option"),
        (["--sbatch-option=--time=1"], "--sbatch-option time is set by this command, from --time"),
        (["--sbatch-option", "wrap=true"], "--sbatch-option wrap is set by this command, from the run"),
        (["--sbatch-option", "array=1-3"], "--sbatch-option array is set by this command, from the run"),
        (
            ["--srun-option", "ntasks=1"],
            "--srun-option ntasks is set by this command, from cluster.ranks_per",
        ),
        (["--srun-option=--output=x"], "--srun-option output is set by this command, from run.folder"),
        (["--job-name", "a/b"], "--job-name a/b has a slash, and the log is named after it"),
    ],
)
def test_bad_input_is_refused(arguments: list[str], message: str, capfd: pytest.CaptureFixture[str]):
    assert main(["launch", "slurm", "configs/arithmetic.yaml", *arguments]) == 2
    assert message in capfd.readouterr().err


def test_submitting_needs_sbatch_that_accepts_the_job(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PATH", str(tmp_path))
    command = ["launch", "slurm", "configs/arithmetic.yaml", "--submit", "--output", str(tmp_path / "job.sh")]
    assert main(command) == 2
    assert (
        "SLURM's sbatch is not installed on this machine; submit the script where" in capfd.readouterr().err
    )
    assert (tmp_path / "job.sh").read_text().startswith("#!/bin/bash\n"), "it is written all the same"
    (tmp_path / "sbatch").write_text("#!/bin/sh\necho 'invalid partition specified' >&2; exit 1\n")
    (tmp_path / "sbatch").chmod(0o755)
    assert main(command) == 2
    assert "sbatch refuses the job: invalid partition specified" in capfd.readouterr().err
    (tmp_path / "sbatch").write_text(
        f"#!/bin/sh\necho $* > {tmp_path}/options; /bin/cat > {tmp_path}/submitted; echo Submitted batch job 17\n"
    )
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.defpath}")
    assert main([*command, "--setup", "true\n#SBATCH --hold"]) == 0
    assert "Submitted batch job 17" in capfd.readouterr().err
    script = (tmp_path / "submitted").read_text()
    assert script == (tmp_path / "job.sh").read_text()
    directives = [
        line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH")
    ][:-1]
    options = (tmp_path / "options").read_text().split()
    assert options == directives and "--requeue" in options, (
        "variables such as SBATCH_NO_REQUEUE precede directives"
    )


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [
        ("3", 90),  # half of it
        ("3:30", 105),
        ("1:00:00", 1800),
        ("2:00:00", 1800),
        ("0:10:00", 300),
        ("1-0", 1800),
        ("0-0:10", 300),
        ("0-0:10:30", 315),
        ("0", 1800),  # no limit
        ("UNLIMITED", 1800),
    ],
)
def test_the_run_is_asked_to_save_its_step_well_before_the_time_limit(
    limit: str, seconds: int, capfd: pytest.CaptureFixture[str]
):
    assert main(["launch", "slurm", "configs/arithmetic.yaml", "--time", limit]) == 0
    assert f"#SBATCH --signal=B:TERM@{seconds}\n" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("config", "given", "cpus", "memory"),
    [
        ("llama3-70b-16nodes", ["--mem", "500G"], 32, ["mem=500G"]),
        ("llama3-70b-16nodes", ["--mem", "500G", "--cpus-per-node", "96"], 96, ["mem=500G"]),
        ("arithmetic", ["--sbatch-option", "mem-per-cpu=2G"], 4, ["mem-per-cpu=2G"]),
    ],
)
def test_a_job_on_shared_nodes_asks_for_what_it_needs(
    config: str, given: list[str], cpus: int, memory: list[str], capfd: pytest.CaptureFixture[str]
):
    assert main(["launch", "slurm", f"configs/{config}.yaml", "--shared", *given]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert f"#SBATCH --cpus-per-task={cpus}" in lines and "#SBATCH --exclusive" not in lines
    assert [line for line in lines if "--mem" in line] == [f"#SBATCH --{one}" for one in memory]
    (step,) = (line for line in lines if line.startswith("srun "))
    assert f" --cpus-per-task={cpus} " in step


def test_unequal_nodes_are_told(capfd: pytest.CaptureFixture[str]):
    assert main(["launch", "slurm", "configs/arithmetic.yaml", "cluster.ranks_per_node=[3,1]"]) == 0
    said = capfd.readouterr()
    assert "SLURM gives equal nodes: each has room for 3 ranks, also those with fewer" in said.err
    assert "#SBATCH --nodes=2\n" in said.out


@pytest.mark.parametrize("limit", ["5x", "", "1:2", "-5", "24:00:00:00", "soon"])
def test_a_time_limit_that_slurm_does_not_take_is_refused(
    limit: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", "slurm", "configs/arithmetic.yaml", f"--time={limit}"]) == 2
    assert f"{limit!r} is no time limit of SLURM; write minutes" in capfd.readouterr().err


@pytest.mark.parametrize("size", ["lots", "-1", "500 G", "1.5T"])
def test_a_size_of_memory_that_slurm_does_not_take_is_refused(
    size: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", "slurm", "configs/arithmetic.yaml", f"--mem={size}"]) == 2
    assert f"{size!r} is no size of memory of SLURM; write megabytes" in capfd.readouterr().err


def test_a_folder_without_the_configuration_is_refused_before_the_job_waits(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Unless it cannot be known here: nodes may have another folder of this name, and commands may write the file."""
    config, missing = Path("configs/arithmetic.yaml"), tmp_path / "nodes-only"
    command = ["launch", "slurm", str(config), "--folder"]
    assert main([*command, str(tmp_path)]) == 2
    said = capfd.readouterr()
    assert f"--folder {tmp_path} does not have {config}, which nodes read there; write" in said.err
    assert said.out == ""
    for given, folder in (([str(missing)], missing), ([str(tmp_path), "--setup", "git clone x ."], tmp_path)):
        assert main([*command, *given]) == 0
        assert (
            f"{folder / config}, which the nodes will read, is not on this machine" in capfd.readouterr().err
        )
    assert main(["launch", "slurm", str(config.resolve()), "--folder", str(tmp_path)]) == 0
    assert "which the nodes will read" not in capfd.readouterr().err

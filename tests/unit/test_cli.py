"""The command line: help, exit codes, and one clear message for bad input before anything starts or is written."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from hybridengine import __version__
from hybridengine.cli import train
from hybridengine.cli.main import main
from hybridengine.cli.train import EPILOG
from hybridengine.config import load_config
from hybridengine.controller.failures import failure_of, rank_failed
from hybridengine.errors import CheckpointError, ConfigError, OutputError, StorageError
from tests.unit.run_bench import Bench, Reached

ROOT = Path(__file__).parents[2]
CONFIGS = sorted(file for file in ROOT.glob("configs/*.yaml") if file.stem != "serve")
CLUSTER = str(ROOT / "configs/clusters/a100-80gb-16x8.yaml")
HEAVY = ("torch", "ray", "megatron", "vllm", "transformers", "tensordict")


def run_python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=280
    )


# ---- Help and dry runs ---------------------------------------------------------------------------------------------


def test_help_names_the_commands_with_examples(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as exit_info:
        main(["--help"])
    assert exit_info.value.code == 0
    text = capsys.readouterr().out
    for part in ("usage: hybridengine", "train", "--version", "configs/arithmetic.yaml", "--dry-run"):
        assert part in text


def test_help_of_train_explains_its_arguments_and_what_it_writes(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as exit_info:
        main(["train", "--help"])
    assert exit_info.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for part in ("CONFIG", "KEY=VALUE", "p-t-d", "p_g-t_g", "--dry-run", "metrics.jsonl", "tensorboard/"):
        assert part in text


def test_help_shows_defaults_as_they_are_written(capsys: pytest.CaptureFixture[str]):
    for command in (["simulate"], ["bench", "dispatch"], ["reshard", "bench"], ["launch", "kuberay"]):
        with pytest.raises(SystemExit):
            main([*command, "--help"])
    text = " ".join(capsys.readouterr().out.split())
    found = re.findall(r"(--\S+) [^-]*?\(default ([^)]*)\)", text)
    wanted = {
        "--seed": "0",
        "--bytes": "1000000000",
        "--methods": "all",
        "--timeout": "120",
    }
    assert wanted.items() <= dict(found).items() and "--fix" not in dict(found)
    assert "(default )" not in text


def test_examples_of_the_help_are_accepted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(
        "hybridengine.training.dry_run.print_dry_run", lambda config: print(config.num_ranks, "ranks")
    )
    examples = [line.split("  ") for line in EPILOG.splitlines() if "hybridengine train" in line]
    assert len(examples) == 4
    for words in examples:
        _, *arguments = next(word for word in words if word).split()
        assert main([*dict.fromkeys([*arguments, "--dry-run"])]) == 0, arguments
        assert capsys.readouterr().out in ("4 ranks\n", "128 ranks\n")


@pytest.mark.parametrize("arguments", [[], ["fly"], ["train"], ["train", "a.yaml", "--fast"]])
def test_unknown_arguments_exit_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]):
    assert main(arguments) == 2
    assert re.fullmatch(r"hybridengine: .*; see hybridengine.* --help\n", capsys.readouterr().err)


@pytest.mark.parametrize("first", range(3))
def test_dry_runs_of_all_configurations_import_nothing_heavy(tmp_path: Path, first: int):
    """In three processes, since plans of the deepest models take a minute."""
    configs = CONFIGS[first::3]
    code = (
        "import sys\n"
        "from hybridengine.cli.main import main\n"
        "for config in sys.argv[2:]:\n"
        "    code = main(['train', config, sys.argv[1], '--dry-run'])\n"
        f"    print('status', code, 'heavy:', sorted(set({HEAVY}) & set(sys.modules)))\n"
    )
    done = run_python(code, f"run.folder={tmp_path / 'runs'}", *map(str, configs))
    assert done.stderr == ""
    *outputs, rest = done.stdout.split("status 0 heavy: []\n")
    assert (len(outputs), rest) == (len(configs), "")
    parts = [
        "model:",
        "ranks:",
        "roles:",
        "groups",
        "groups cross nodes",
        "plan",
        "digest",
        "memory per rank",
    ]
    of_switches = {"groups cross nodes", "plan", "digest"}
    for config, output in zip(configs, outputs, strict=True):
        if not load_config(config, dry_run=True).algorithm.generates:
            assert not any(part in output for part in (*of_switches, "push:", "switch:")), config
            continue
        missing = [part for part in parts if part not in output]
        assert not missing, config
        # Weights reach engines by a switch in place, or are pushed to those on ranks of their own.
        assert ("push:" in output) != ("switch:" in output), config
    assert not (tmp_path / "runs").exists()


def test_the_demo_is_the_main_job(capsys: pytest.CaptureFixture[str]):
    """From a configuration inside the package, which an installed one has too."""
    outputs = []
    for command in (["demo"], ["train", str(ROOT / "configs/arithmetic.yaml")]):
        assert main([*command, "cluster.device=cpu", "actor.generate=1-2", "--dry-run"]) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1] != ""


def test_the_version_is_that_of_the_package():
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == __version__


def test_the_demo_needs_no_gpu(monkeypatch: pytest.MonkeyPatch):
    found = list[list[str]]()
    monkeypatch.setattr("hybridengine.cli.train.run", lambda options: found.append(options.overrides) or 0)
    assert main(["demo", "run.steps=3"]) == 0
    assert found == [["cluster.device=cpu", "run.steps=3"]]


def test_dry_run_shows_the_papers_example(capsys: pytest.CaptureFixture[str]):
    """1-4-2 -> 1-2: a rank receives 1/4 of the model (table 2), and the groups are those of figure 8."""
    sizes = (
        "cluster.ranks_per_node=[8]",
        "actor.parallel=1-4-2",
        "actor.generate=1-2",
        "critic.parallel=1-4-2",
    )
    model = ("reference.parallel=1-4-2", "model.build.num_kv_heads=4", "model.build.vocab_size=64")
    assert main(["train", str(ROOT / "configs/arithmetic.yaml"), *sizes, *model, "--dry-run"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "generation tensor [0,2] [1,3] [4,6] [5,7]" in text
    assert "generation micro-DP [0,1] [2,3] [4,5] [6,7]" in text
    share = float(text.partition("% of the model)")[0].rpartition("(")[2])
    assert 24.9 < share < 25.2  # norms are whole on every rank, so slightly less than 1/4 moves


@pytest.mark.parametrize(
    ("overrides", "is_said"),
    [
        (["cluster.device=cuda", "actor.generate=2-1"], True),
        (["cluster.device=cuda", "actor.generate=1-2"], False),
        (["cluster.device=cpu", "actor.generate=2-1"], False),
    ],
)
def test_dry_run_says_that_an_engine_with_stages_draws_rows_in_turn(
    overrides: list[str], is_said: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(ROOT / "configs/arithmetic.yaml"), *overrides, "--dry-run"]) == 0
    found = [line for line in capsys.readouterr().out.splitlines() if line.startswith("draws: ")]
    assert [line[:13] for line in found] == (["draws: p_g=2 "] if is_said else [])


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["cluster.device=cuda"],
            "decoding: CUDA graphs (the default on GPUs)",
        ),
        (["cluster.device=cuda", "rollout.cuda_graphs=false"], "decoding: eager (rollout.cuda_graphs=false)"),
        (["cluster.device=cpu"], "decoding: eager (on a CPU)"),
        (
            ["cluster.device=auto", "rollout.cuda_graphs=true"],
            "decoding: CUDA graphs (rollout.cuda_graphs=true), eager where ranks have no GPUs",
        ),
    ],
)
def test_dry_run_says_how_it_decodes(
    overrides: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(ROOT / "configs/arithmetic.yaml"), *overrides, "--dry-run"]) == 0
    assert expected in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(
    ("arguments", "status", "out", "error"),
    [
        (["--version"], 0, rf"hybridengine {__version__}\n", ""),
        (["demo"], 2, "", r"hybridengine: the package \w+ is not installed in .*; install the lock .*\n"),
    ],
)
def test_the_installed_command_without_its_dependencies(
    arguments: list[str], status: int, out: str, error: str
):
    """-S hides what is installed."""
    code = "import sys; from hybridengine.cli.start import main; sys.exit(main())"
    command = [sys.executable, "-S", "-c", code, *arguments]
    done = subprocess.run(
        command, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == status
    assert re.fullmatch(out, done.stdout) and re.fullmatch(error, done.stderr), done.stderr


def test_the_installed_command_reports_bad_input(tmp_path: Path):
    code = "import sys; from hybridengine.cli.start import main; sys.exit(main())"
    done = run_python(code, "train", str(tmp_path / "missing.yaml"))
    assert done.returncode == 2
    assert done.stderr == (
        f"hybridengine: {tmp_path / 'missing.yaml'} does not exist; name a run configuration such as"
        " configs/arithmetic.yaml\n"
    )
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (ConfigError("bad value"), 2, "hybridengine: bad value\n"),
        (StorageError("no weights"), 1, "hybridengine: StorageError: no weights\n"),
        (
            rank_failed(failure_of(3, CheckpointError("x.safetensors: NaN")), []),
            2,
            "hybridengine: x.safetensors: NaN\n",
        ),
        (
            rank_failed(failure_of(3, OutputError("/full/a cannot be written")), []),
            1,
            "hybridengine: OutputError: /full/a cannot be written\n",
        ),
        (KeyboardInterrupt(), 130, "hybridengine: interrupted; what has been written so far is kept\n"),
    ],
)
def test_exit_codes(
    error: BaseException, code: int, text: str, bench: Bench, monkeypatch: pytest.MonkeyPatch
):
    def fail(config: Any) -> None:
        raise error

    monkeypatch.setattr("hybridengine.training.run.train", fail)
    assert bench.train() == (code, text)


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", str(ROOT / "configs/grpo.yaml"), "--dry-run"],
        ["plan", str(ROOT / "configs/grpo.yaml"), "--cluster", CLUSTER],
        ["simulate", str(ROOT / "configs/grpo.yaml"), "--cluster", CLUSTER],
    ],
    ids=lambda arguments: arguments[0],
)
def test_an_algorithm_of_ones_own_is_found_in_the_working_directory(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    module = f"own_{arguments[0]}"
    (tmp_path / f"{module}.py").write_text(
        "from hybridengine.drivers.grpo import Grpo\nclass Own(Grpo):\n    'GRPO.'\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    status = main([*arguments, f"algorithm.name={module}:Own"])
    assert status == 0, capsys.readouterr().err


@pytest.mark.parametrize("method", ["step", "conflicts"])
def test_sys_exit_in_an_algorithm_of_ones_own_does_not_pass_for_success(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    module = f"leaves_in_{method}"
    (tmp_path / f"{module}.py").write_text(
        "import sys\nfrom hybridengine.drivers.grpo import Grpo\nclass Own(Grpo):\n    'GRPO.'\n"
        f"    def {method}(self, *_):\n        sys.exit(0)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    overrides = [f"algorithm.name={module}:Own"]
    assert main(["plan", str(ROOT / "configs/grpo.yaml"), "--cluster", CLUSTER, *overrides]) == 2
    assert f"{module}.py, line 6: {method} has called sys.exit(0)" in capsys.readouterr().err


def test_sigterm_is_told_even_if_tidying_up_raises_another_exit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """A call to a rank that ends meanwhile raises the SystemExit of that rank."""

    def terminated(options: object) -> int:
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            sys.exit(1)

    monkeypatch.setattr(train, "run", terminated)
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit) as ended:
            main(["train", "any.yaml"])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended.value.code == 128 + signal.SIGTERM
    assert "SIGTERM; what has been written so far is kept" in capsys.readouterr().err


# ---- Bad input -----------------------------------------------------------------------------------------------------


def test_the_unbroken_run_gets_as_far_as_starting_processes(bench: Bench):
    with pytest.raises(Reached):
        bench.train()


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["actor.paralel=2-2-1"], ["unknown key actor.paralel", "did you mean actor.parallel?"]),
        (["actor.parallel"], ["override 'actor.parallel' is not key=value"]),
        (
            ["actor.parallel=2-2-2"],
            ["actor.parallel=2-2-2 takes p·t·d = 2·2·2 = 8 ranks", "the 4 of", "choose 2-2-1"],
        ),
        (
            ["actor.parallel=1-4-1", "actor.generate=1-3"],
            [
                "actor.generate=1-3: an engine's p_g·t_g = 1·3 = 3 ranks do not divide the 4 ranks of training 1-4-1",
                "; choose p_g·t_g from 1, 2, 4",
            ],
        ),
        (
            ["actor.generate=2-4"],
            [
                "actor.generate=2-4",
                "2·4 = 8 ranks",
                "the 4 ranks of training 2-2-1",
                "; choose p_g·t_g from 1, 2, 4",
            ],
        ),
        (
            ["critic.parallel=8-1-1", "cluster.ranks_per_node=[8]", "actor.parallel=8-1-1"],
            ["actor.parallel=8-1-1: p=8 pipeline stages need as many layers", "num_layers=3"],
        ),
        (["model.path=/nowhere/model"], ["model.path=/nowhere/model is not a folder"]),
        (["data.train_file=/nowhere/rows.jsonl"], ["data.train_file=/nowhere/rows.jsonl is not a file"]),
        (
            ["reward.function=hybridengine.nothing:score"],
            ["reward.function=hybridengine.nothing:score", "cannot be"],
        ),
        (["reward.function=json:__name__"], ["reward.function=json:__name__ is a str; name a function"]),
        (["run.steps=many"], ["run.steps", "many", "integer"]),
        (["data.batch_size=64"], ["16 prompts", "data.batch_size=64", "lower it"]),
        (["data.batch_size=9"], ["data.batch_size=9", "choose a multiple of"]),
        (["rollout.max_prompt_tokens=5"], ["max_prompt_tokens=5", "train.jsonl, line 1", "raise the limit"]),
        (["rollout.max_response_tokens=500"], ["max_positions=128", "fewer"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_bad_values(bench: Bench, overrides: list[str], parts: list[str]):
    message = bench.refusal(*overrides)
    for part in parts:
        assert part in message


def test_several_problems_come_in_one_message(bench: Bench):
    message = bench.refusal(
        "actor.paralel=2-2-1", "critic.parallel=3-1-1", "model.path=/nowhere", "run.steps=0"
    )
    assert message.startswith("hybridengine: 4 problems:\n  1. ")
    for part in (
        "did you mean actor.parallel?",
        "critic.parallel=3-1-1",
        "model.path=/nowhere",
        "run.steps=0",
    ):
        assert part in message

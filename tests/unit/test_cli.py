"""The command line: help, exit codes, one clear message for bad input before anything starts or is written."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import PreTrainedTokenizerFast

from hybridengine.cli import main as command_line
from hybridengine.cli.main import main
from hybridengine.controller.failures import failure_of, rank_failed
from hybridengine.data.tokenizer import build_arithmetic_tokenizer
from hybridengine.errors import CheckpointError, ConfigError, StorageError
from hybridengine.training.files import stop_token_ids
from tests.gloo.tiny_models import write_model

ROOT = Path(__file__).parents[2]
CONFIGS = sorted(ROOT.glob("configs/*.yaml"))
HEAVY = ("torch", "ray", "megatron", "vllm", "transformers", "tensordict", "safetensors")

ROWS = [{"prompt": f"{number} + 2 =", "answer": str(number + 2)} for number in range(16)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small checkpoint with a tokenizer. Tests that break it copy what they break."""
    folder = tmp_path_factory.mktemp("checkpoint")
    write_model(folder, "qwen3", tied=True, head_dim=32)
    build_arithmetic_tokenizer().save_pretrained(folder)
    return folder


class Bench:
    """A run that is in order until a test changes it, and the commands that start it."""

    def __init__(self, folder: Path, checkpoint: Path, capture: pytest.CaptureFixture[str]) -> None:
        self.folder, self._capture = folder, capture
        self.data = folder / "train.jsonl"
        self.write_rows(ROWS)
        self.config = folder / "run.yaml"
        self.sections: dict[str, Any] = {
            "run": {"steps": 2, "folder": str(folder / "runs")},
            "cluster": {"ranks_per_node": [4]},
            "model": {"path": str(checkpoint)},
            "data": {"train_file": str(self.data), "batch_size": 8},
            "actor": {"parallel": "2-2-1", "generate": "1-1"},
            "critic": {"parallel": "1-2-2"},
            "rollout": {"max_prompt_tokens": 16, "max_response_tokens": 8},
        }

    def write_rows(self, rows: list[Any]) -> None:
        self.data.write_text(
            "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
        )

    def train(self, *overrides: str) -> tuple[int, str]:
        """(exit code, what came on stderr)."""
        self.config.write_text(yaml.safe_dump(self.sections))
        self._capture.readouterr()
        code = main(["train", str(self.config), *overrides])
        return code, self._capture.readouterr().err

    def refusal(self, *overrides: str) -> str:
        """The one message with which the run is refused: exit code 2, and nothing written."""
        before = sorted(self.folder.rglob("*"))
        code, message = self.train(*overrides)
        assert code == 2, message
        assert message.startswith("hybridengine: ")
        assert message.count("hybridengine: ") == 1
        assert "Traceback" not in message
        assert [path for path in sorted(self.folder.rglob("*")) if path != self.config] == [
            path for path in before if path != self.config
        ]
        return message


class Reached(BaseException):
    """The command got as far as starting processes."""


@pytest.fixture
def bench(
    tmp_path: Path,
    checkpoint: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Bench:
    def start(*_: Any, **__: Any) -> None:
        raise Reached

    monkeypatch.setattr("hybridengine.training.launch.start_ray", start)
    return Bench(tmp_path, checkpoint, capfd)


def run_python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120
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


def test_examples_of_the_help_are_accepted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(
        "hybridengine.training.dry_run.print_dry_run", lambda config: print(config.num_ranks, "ranks")
    )
    examples = [
        line.split("  ") for line in command_line.EXAMPLES.splitlines() if "hybridengine train" in line
    ]
    assert len(examples) == 5
    for words in examples:
        _, *arguments = next(word for word in words if word).split()
        assert main([*dict.fromkeys([*arguments, "--dry-run"])]) == 0, arguments
        assert capsys.readouterr().out in ("4 ranks\n", "128 ranks\n")


@pytest.mark.parametrize("arguments", [[], ["fly"], ["train"], ["train", "a.yaml", "--fast"]])
def test_unknown_arguments_exit_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as exit_info:
        main(arguments)
    assert exit_info.value.code == 2
    assert "usage: hybridengine" in capsys.readouterr().err


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_dry_run_of_every_configuration_imports_nothing_heavy(config: Path, tmp_path: Path):
    code = (
        "import sys\n"
        "from hybridengine.cli.main import main\n"
        "code = main(['train', *sys.argv[1:], '--dry-run'])\n"
        f"print('heavy:', sorted(set({HEAVY}) & set(sys.modules)))\n"
        "sys.exit(code)"
    )
    done = run_python(code, str(config), f"run.folder={tmp_path / 'runs'}")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "heavy: []" in done.stdout
    for part in (
        "model:",
        "ranks:",
        "roles:",
        "switch:",
        "groups",
        "micro-DP",
        "plan",
        "digest",
        "memory per rank",
    ):
        assert part in done.stdout
    assert not (tmp_path / "runs").exists()


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
    assert 24.9 < share < 25.2  # norms are whole on every rank, so that a little less than 1/4 moves


def test_the_installed_command_reports_bad_input(tmp_path: Path):
    code = "import sys; from hybridengine.cli.main import main; sys.exit(main(sys.argv[1:]))"
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
                "; choose p_g-t_g from 1-2, ",
            ],
        ),
        (
            ["actor.generate=2-4"],
            [
                "actor.generate=2-4",
                "2·4 = 8 ranks",
                "the 4 ranks of training 2-2-1",
                "; choose p_g-t_g from 1-4, 2-2",
            ],
        ),
        (["critic.parallel=4-1-1", "cluster.ranks_per_node=[8]", "actor.parallel=8-1-1"], ["8", "5"]),
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
        (["rollout.max_response_tokens=500"], ["max_positions=128", "lower them"]),
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


def copy_checkpoint(bench: Bench, checkpoint: Path) -> Path:
    """A copy that the run uses."""
    copy = bench.folder / "model"
    copy.mkdir()
    for file in checkpoint.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    bench.sections["model"]["path"] = str(copy)
    return copy


def test_truncated_checkpoint(bench: Bench, checkpoint: Path):
    weights = copy_checkpoint(bench, checkpoint) / "model.safetensors"
    size = weights.stat().st_size
    weights.write_bytes(weights.read_bytes()[:-100])
    message = bench.refusal()
    assert f"{weights} is truncated" in message
    assert f"{size} bytes, the file has {size - 100}" in message


def test_checkpoint_without_weights(bench: Bench, checkpoint: Path):
    (copy_checkpoint(bench, checkpoint) / "model.safetensors").unlink()
    assert "has neither model.safetensors nor model.safetensors.index.json" in bench.refusal()


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, ["GPT2LMHeadModel", "LlamaForCausalLM"]),
        ({"num_hidden_layers": 6}, ["11 tensors (", "described by", "not stored"]),
        (
            {"intermediate_size": 100},
            ["shapes differ from", "mlp.down_proj.weight is [64, 96], not [64, 100]"],
        ),
    ],
)
def test_config_that_disagrees_with_the_checkpoint(
    bench: Bench, checkpoint: Path, changes: dict[str, Any], parts: list[str]
):
    config = copy_checkpoint(bench, checkpoint) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    message = bench.refusal()
    for part in parts:
        assert part in message


@pytest.mark.parametrize(("named", "more"), [(None, []), (5, [5]), ([5, 6, 5], [5, 6]), ([], [])])
def test_a_response_ends_where_the_checkpoint_says(
    tmp_path: Path, named: int | list[int] | None, more: list[int]
):
    tokenizer = build_arithmetic_tokenizer()
    if named is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": named}))
    assert stop_token_ids(tmp_path, tokenizer, 57) == (tokenizer.eos_token_id, *more)


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("[1]", "holds list, not an object"),
        ("[" * 100_000, "is not valid JSON (nested too deeply)"),
        ("{broken", "is not valid JSON"),
        (
            '{"eos_token_id": "abc"}',
            'eos_token_id has "abc", which is no token of the model\'s vocabulary (0 to 130)',
        ),
        ('{"eos_token_id": [3, 131]}', "eos_token_id has 131, which is no token"),
        ('{"eos_token_id": -1}', "eos_token_id has -1, which is no token"),
        ('{"eos_token_id": true}', "eos_token_id has true, which is no token"),
    ],
)
def test_a_generation_config_that_names_no_tokens(bench: Bench, checkpoint: Path, content: str, part: str):
    file = copy_checkpoint(bench, checkpoint) / "generation_config.json"
    file.write_text(content)
    message = bench.refusal()
    assert f"hybridengine: {file}" in message
    assert part in message
    assert message.endswith("; restore the model's original file, or remove it\n")


@pytest.mark.parametrize("named", ["abc", 131, [1, -1]])
def test_a_config_that_names_no_end_token(bench: Bench, checkpoint: Path, named: Any):
    file = copy_checkpoint(bench, checkpoint) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": named}))
    assert f"hybridengine: {file}: eos_token_id has " in bench.refusal()


@pytest.mark.parametrize(
    ("rows", "parts"),
    [
        ([*ROWS[:2], "{broken", *ROWS], ["train.jsonl, line 3", "is not JSON"]),
        ([*ROWS, {"prompt": "1 + 1 ="}], ["train.jsonl, line 17", "'answer'"]),
        ([*ROWS, {"prompt": 5, "answer": "5"}, '"text"'], ["2 problems", "line 17", "line 18", "a JSON str"]),
        ([], ["train.jsonl has no rows"]),
        (
            [*ROWS, {"prompt": "1 + " * 9 + "1 =", "answer": "10"}],
            ["line 17: the prompt has", "max_prompt_tokens=16"],
        ),
        ([*ROWS, {"prompt": "1 § 2 =", "answer": "3"}], ["line 17", "unknown to the tokenizer"]),
    ],
    ids=["not-json", "key-missing", "wrong-types", "empty", "too-long", "unknown-characters"],
)
def test_malformed_data(bench: Bench, rows: list[Any], parts: list[str]):
    bench.write_rows(rows)
    message = bench.refusal()
    for part in parts:
        assert part in message


def test_tokenizer_without_special_tokens(bench: Bench):
    whole = build_arithmetic_tokenizer()
    folder = bench.folder / "tokenizer"
    PreTrainedTokenizerFast(tokenizer_object=whole.backend_tokenizer).save_pretrained(folder)
    message = bench.refusal(f"model.tokenizer={folder}")
    for part in ("eos_token=None", "no chat template", "tokenizer_config.json"):
        assert part in message


def test_tokenizer_larger_than_the_models_vocabulary(bench: Bench, tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("narrow")
    write_model(folder, "qwen3", tied=True, head_dim=32, vocab_size=40)
    build_arithmetic_tokenizer().save_pretrained(folder)
    message = bench.refusal(f"model.path={folder}")
    assert "vocab_size=40 is smaller" in message

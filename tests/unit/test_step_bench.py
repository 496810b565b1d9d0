"""`hybridengine bench step`: options that it accepts and refuses, the variants that it tries, and its report."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from hybridengine.bench.step import trl_side
from hybridengine.bench.step.spec import (
    OwnWay,
    Side,
    StepSpec,
    StepTime,
    TrlWay,
    own_ways,
    step_figures,
    trl_ways,
)
from hybridengine.bench.step.trl_process import Clock, arguments, digit_share
from hybridengine.cli.main import main, parse
from hybridengine.cli.step_bench import chosen_own_ways, result_lines
from hybridengine.errors import ConfigError
from hybridengine.topology.sizes import GenSizes, TrainSizes

CONFIG = "configs/arithmetic.yaml"
SPEC = StepSpec(16, 8, 32, "float32", 3, 900.0)


@pytest.fixture
def refusal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return a function that runs the command with bad input and returns the error message."""

    def nothing(*_: object) -> None:
        raise AssertionError("something was prepared")

    monkeypatch.setattr("hybridengine.bench.step.measure.measure_steps", nothing)

    def run(*arguments: str) -> str:
        code = main(["bench", "step", CONFIG, *arguments])
        out, err = capsys.readouterr()
        assert (code, out) == (2, "")
        assert "Traceback" not in err
        return err

    return run


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompts", "0"], "--prompts: '0' must be an integer from 1 to 65536"),
        (["--samples", "1"], "--samples: '1' must be an integer from 2 to 1024"),
        (["--dtype", "float16"], "--dtype: invalid choice: 'float16'"),
        (["--timeout", "nan"], "--timeout: 'nan' must be a number from 10 to 86400"),
        (["--only", "trl"], "--only: invalid choice: 'trl'"),
        (["--generate", "1-1"], "--generate needs the training sizes; add --parallel"),
        (["--parallel", "1-1"], "1-1"),
        (["--only", "hybridengine", "--trl-precision", "float32"], "--only hybridengine measures"),
        (["--parallel", "1-1-2", "--generate", "1-4"], "--generate 1-4"),
        (["--parallel", "1-1-3"], "--parallel 1-1-3: 16 prompts and 128 rows do not split over its 3 ranks"),
        (["--trl-precision", "half"], "--trl-precision: invalid choice: 'half'"),
        (["--json", "/no/such/folder/step.json"], "--json /no/such/folder/step.json cannot be written"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(
    refusal: Callable[..., str], arguments: list[str], message: str
) -> None:
    assert message in refusal(*arguments)


def test_our_ways_share_the_cores_and_divide_the_prompts() -> None:
    ways = own_ways(SPEC, num_cores=8)
    assert [(str(way.train), way.threads_per_rank, way.rows_per_micro_batch) for way in ways] == [
        ("1-1-1", 8, 128),
        ("1-1-1", 8, 32),
        ("1-1-2", 4, 64),
        ("1-1-2", 4, 16),
        ("1-1-4", 2, 32),
        ("1-1-4", 2, 8),
        ("1-1-8", 1, 16),
        ("1-1-8", 1, 4),
    ]
    few = StepSpec(2, 3, 32, "float32", 3, 900.0)
    assert [(str(way.train), way.rows_per_micro_batch) for way in own_ways(few, 8)] == [
        ("1-1-1", 6),
        ("1-1-2", 3),
    ]


def test_sizes_that_are_named_are_the_only_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    options = parse(["bench", "step", CONFIG, "--parallel", "1-2-2", "--generate", "1-2"])
    sizes = TrainSizes(1, 2, 2), GenSizes(1, 2)
    assert chosen_own_ways(options, SPEC) == [OwnWay(*sizes, 1, 64), OwnWay(*sizes, 1, 16)]


@pytest.mark.parametrize("command", [[], ["--only", "hybridengine"]])
def test_on_gpus_trl_is_compared_on_one(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no GPU: the number of them is given."""
    monkeypatch.setattr("hybridengine.cli.step_bench.num_gpus", lambda: 2)
    ways = chosen_own_ways(parse(["bench", "step", CONFIG, *command]), SPEC)
    assert {str(way.train) for way in ways} == ({"1-1-1", "1-1-2"} if command else {"1-1-1"})
    named = parse(["bench", "step", CONFIG, *command, "--parallel", "1-2-1"])
    if command:
        assert {way.train for way in chosen_own_ways(named, SPEC)} == {TrainSizes(1, 2, 1)}
    else:
        with pytest.raises(ConfigError, match=r"--parallel 1-2-1 takes 2 GPUs, and TRL's process takes one"):
            chosen_own_ways(named, SPEC)


def test_trl_has_the_first_gpu_that_is_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no GPU: the number of them is given."""
    monkeypatch.setattr(trl_side, "num_gpus", lambda: 2)
    assert trl_side.one_gpu({"CUDA_VISIBLE_DEVICES": "3,5"}) == {"CUDA_VISIBLE_DEVICES": "3"}
    assert trl_side.one_gpu({}) == {"CUDA_VISIBLE_DEVICES": "0"}
    monkeypatch.setattr(trl_side, "num_gpus", lambda: 0)
    assert trl_side.one_gpu({}) == {}


def test_trl_tries_batches_and_with_bfloat16_precisions() -> None:
    assert trl_ways(SPEC) == [TrlWay(128), TrlWay(32)]
    mixed = replace(SPEC, dtype="bfloat16")
    assert trl_ways(mixed) == [TrlWay(rows, name) for name in ("float32", "autocast") for rows in (128, 32)]
    assert trl_ways(mixed, "weights") == [TrlWay(128, "weights"), TrlWay(32, "weights")]


def made_up(times: list[float], tokens: int, phases: list[dict[str, float]]) -> list[StepTime]:
    return [StepTime(seconds, tokens, phase) for seconds, phase in zip(times, phases, strict=True)]


@pytest.fixture
def sides() -> tuple[Side, Side]:
    own = made_up(
        [0.5, 0.2, 0.25],
        6144,
        [
            {"generate": 0.1, "update_actor": 0.3, "controller": 0.005},
            {"generate": 0.09, "update_actor": 0.1, "controller": 0.01},
            {"generate": 0.08, "update_actor": 0.12, "controller": 0.005},
        ],
    )
    trl = made_up([0.5, 0.4, 1.0], 6144, [{"generate": 0.2, "update": 0.3}] * 3)
    way = OwnWay(TrainSizes(1, 1, 2), GenSizes(1, 1), 1, 64)
    return Side(way, own), Side(TrlWay(128), trl)


def test_json_has_medians_ratio_and_the_controllers_share(sides: tuple[Side, Side]) -> None:
    report = json.loads(json.dumps(step_figures(SPEC, CONFIG, *sides)))
    assert report["tokens_per_s"] == 6144 / 0.25
    assert report["trl_tokens_per_s"] == 6144 / 0.5
    assert report["ratio"] == 2.0
    assert report["phases_s"] == {"update_actor": 0.12, "generate": 0.09, "controller": 0.005}
    assert list(report["phases_s"]) == ["update_actor", "generate", "controller"]
    assert report["trl"]["phases_s"] == {"update": 0.3, "generate": 0.2}
    assert report["controller_overhead_share"] == 0.005 / 0.25  # of 1 %, 5 % and 2 %
    assert report["hybridengine"]["way"] == "1-1-2 / 1-1, 1 thread a rank, micro-batches of 64"
    assert report["hybridengine"]["samples_step_s"] == [0.5, 0.2, 0.25]
    assert report["trl"]["way"] == "batches of 128, float32"
    assert report["tokens_per_step"] == 6144


def test_without_trl_there_is_no_ratio(sides: tuple[Side, Side]) -> None:
    report = step_figures(SPEC, CONFIG, sides[0], None)
    assert (report["ratio"], report["trl_tokens_per_s"], report["trl"]) == (None, None, None)
    assert report["tokens_per_s"] == 6144 / 0.25


def test_what_is_printed(sides: tuple[Side, Side]) -> None:
    printed = "\n".join(result_lines(SPEC, step_figures(SPEC, CONFIG, *sides)))
    assert "128 responses of 32 tokens in float32, medians of 3 steps" in printed
    assert "24,576" in printed
    assert "12,288" in printed
    assert "update_actor 0.12 s, generate 90 ms, controller 5 ms" in printed
    assert "controller: 2.0% of our step" in printed
    assert "ratio: 2.00 of TRL's tokens per second" in printed


def test_trl_does_the_same_work(tmp_path: Path) -> None:
    settings = {
        "folder": str(tmp_path),
        "on_cpu": True,
        "precision": "autocast",
        "rows_per_batch": 32,
        "samples_per_prompt": 8,
        "prompts": [["a"] * 16],
        "response_tokens": 32,
        "lr": 1e-6,
        "kl_coef": 0.02,
    }
    found = arguments(settings)
    assert found["per_device_train_batch_size"] * found["gradient_accumulation_steps"] == 128
    assert found["generation_kwargs"]["min_new_tokens"] == found["max_completion_length"] == 32
    assert (found["bf16"], found["beta"], found["num_iterations"]) == (True, 0.02, 1)
    assert not found["gradient_checkpointing"]
    weights = arguments(settings | {"precision": "weights"})
    assert (weights["bf16"], weights["model_init_kwargs"]) == (False, {"dtype": "bfloat16"})


def test_reward_is_the_share_of_digits() -> None:
    assert digit_share(["12ab", "", "7"], ["", "", ""]) == [0.5, 0.0, 1.0]


def test_the_clock_separates_phases_and_counts_tokens() -> None:
    class Trainer:
        def rollout(self, rows: int) -> list[list[int]]:
            return self.generate([[1, 2], [3]])

        def generate(self, prompts: list[list[int]]) -> list[list[int]]:
            return [[4, 5, 6], [7]]

    clock, trainer = Clock(time.perf_counter), Trainer()
    clock.around(trainer, "rollout", "rollout", lambda *_: 0)
    clock.around(trainer, "generate", "generate", lambda prompts, result: sum(map(len, [*prompts, *result])))
    assert trainer.rollout(2) == [[4, 5, 6], [7]]
    taken = clock.take()
    assert taken["tokens"] == 7
    assert taken["phases"]["generate"] > 0
    assert taken["phases"]["reference and rewards"] > 0
    assert clock.take() == {"phases": {"generate": 0.0, "reference and rewards": 0.0}, "tokens": 0}

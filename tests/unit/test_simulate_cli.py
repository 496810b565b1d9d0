"""`hybridengine simulate`: its output, drawings and files, properties of its figures, and its error messages."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from hybridengine.cli.main import main

ROOT = Path(__file__).parents[2]
A100 = str(ROOT / "configs" / "clusters" / "a100-80gb-16x8.yaml")
CONFIG = str(ROOT / "configs" / "llama3-70b-16nodes.yaml")
SMALL = (
    "model.hf_config=llama2-7b",
    "data.batch_size=256",
    "--nodes",
    "4",
    "--steps",
    "6",
    "--lengths",
    "lognormal:mean=300,cv=0.8",
)

Simulated = Callable[..., tuple[int, str, str]]


@cache
def figures(*arguments: str) -> dict[str, Any]:
    """Return the figures of a small run; equal arguments are simulated once."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(["simulate", CONFIG, "--cluster", A100, *SMALL, *arguments, "--json"]) == 0
    return json.loads(out.getvalue())


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any], Path]:
    """Return the text, the figures and the picture of a sweep."""
    folder = tmp_path_factory.mktemp("sweep")
    file, picture = folder / "sweep.json", folder / "sweep.png"
    options = ["--sweep", "--json", str(file), "--plot", str(picture)]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(["simulate", CONFIG, "--cluster", A100, *SMALL, *options]) == 0
    return out.getvalue(), json.loads(file.read_text()), picture


@pytest.fixture
def simulated(capsys: pytest.CaptureFixture[str]) -> Simulated:
    """Return a function that runs the command and returns (exit code, stdout, stderr)."""

    def run(*arguments: str) -> tuple[int, str, str]:
        code = main(["simulate", CONFIG, "--cluster", A100, *arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_a_sweep_shows_every_division_beside_the_analytical_model(
    swept: tuple[str, dict[str, Any], Path],
) -> None:
    text, found, picture = swept
    for part in ("synchronous", "asynchronous", "times synchronous", "beside the analytical model"):
        assert part in text
    assert picture.stat().st_size > 10_000
    divisions = [one["num_training"] for one in found["sweep"]]
    assert divisions == sorted(set(divisions)) and len(divisions) > 1
    for one in (found["synchronous"], *found["sweep"]):
        assert sum(one["staleness_tokens"].values()) > 0
        assert 0 <= one["train_idle_share"] <= 1
        assert 0 <= one["generate_idle_share"] <= 1
        assert one["tokens_per_s"] == pytest.approx(sum(one["staleness_tokens"].values()) / one["seconds"])
    assert found["synchronous"]["staleness_max"] == 0
    for one in found["sweep"]:
        assert one["num_training"] + one["num_generating"] == 32
        # If the trainer never waits in the steady state, the whole run is about as fast.
        if one["train_idle_share"] < 0.1:
            assert one["tokens_per_s"] == pytest.approx(one["model_tokens_per_s"], rel=0.25)


def test_equal_commands_are_equal_runs_and_seeds_are_not() -> None:
    divided = ("--train-devices", "16", "--staleness", "2")
    one, again, other = figures(*divided), figures.__wrapped__(*divided), figures(*divided, "--seed", "4")
    assert one | {"simulation_s": 0} == again | {"simulation_s": 0}
    assert one["synchronous"] != other["synchronous"] and one["sweep"] != other["sweep"]


def test_a_tight_bound_keeps_the_data_young() -> None:
    ages = [
        figures("--train-devices", "16", "--staleness", bound)["asynchronous"]["staleness_mean"]
        for bound in ("0", "2", "inf")
    ]
    assert ages == sorted(ages)


def test_without_a_batch_ahead_the_two_sides_alternate() -> None:
    """The analytical model is close for every division, and so its choice is about the best one."""
    sweep = figures("--sweep", "--staleness", "0")["sweep"]
    for one in sweep:
        assert one["staleness_max"] == 0
        assert one["tokens_per_s"] == pytest.approx(one["model_tokens_per_s"], rel=0.1)
    chosen = max(sweep, key=lambda one: one["model_tokens_per_s"])
    assert chosen["tokens_per_s"] >= 0.97 * max(one["tokens_per_s"] for one in sweep)


def test_without_a_bound_engines_stop_at_what_the_run_trains_on() -> None:
    found = figures("--train-devices", "4", "--staleness", "inf")["asynchronous"]
    running = found["num_engines"] * found["max_running"]
    assert found["queue_max"] <= 6 * 256 + running
    assert found["generate_idle_share"] > 0.5


def test_the_analytical_model_chooses_the_division() -> None:
    chosen = figures("--staleness", "0")["asynchronous"]["num_training"]
    sweep = figures("--sweep", "--staleness", "0")["sweep"]
    assert chosen == max(sweep, key=lambda one: one["model_tokens_per_s"])["num_training"]


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("--steps", "0"), "--steps: '0' must be an integer from 1 to"),
        (("--staleness", "-1"), "--staleness: '-1' must be a number from 0 to inf"),
        (("--staleness", "nan"), "--staleness: 'nan' must be a number from 0"),
        (("--seed", "-1"), "--seed: '-1' must be an integer from 0"),
        (("--train-devices", "31"), "leave whole engines"),
        (("--train-devices", "8", "--sweep"), "leave one of them out"),
        (("--devices", "1"), "one device cannot be divided"),
        (("algorithm.name=remax",), "generates twice"),
    ],
)
def test_what_cannot_be_is_said_in_one_message(
    simulated: Simulated, arguments: tuple[str, ...], part: str
) -> None:
    kept = SMALL if "--steps" not in arguments else tuple(one for one in SMALL if one not in ("--steps", "6"))
    kept = kept if "--devices" not in arguments else tuple(one for one in kept if one not in ("--nodes", "4"))
    code, out, err = simulated(*kept, *arguments)
    assert (code, out) == (2, "")
    assert part in " ".join(err.split())

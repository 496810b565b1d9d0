"""Recipes with expected curves: their files, and the comparison of a new run with a curve."""

from __future__ import annotations

import json
import math
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from hybridengine.config import RunConfig, load_config, model_shape
from hybridengine.errors import DataError
from scripts import check_recipes
from scripts.recipe_curves import (
    SeedRun,
    compare,
    draw,
    page_table,
    read_curve,
    read_run,
    with_run,
    write_curve,
)

ROOT = Path(__file__).parents[2]
NAMES = check_recipes.recipe_names()
CURVES = sorted(check_recipes.CURVES.glob("*.json"))
STEPS = 24
SEEDS = ([0.20, 0.40, 0.60, 0.80], [0.22, 0.44, 0.56, 0.78], [0.24, 0.36, 0.58, 0.82])
"""Means of each quarter of three runs, chosen so that the pooled variance is easily written down."""
VARIANCE = (0.0008 + 0.0032 + 0.0008 + 0.0008) / 8
QUANTILE = 4.33355
"""Quantile of Student's t with 8 degrees of freedom at 1 - 0.01 / 8, found by integrating its density numerically."""


def run_of(quarters: list[float], seed: int = 0) -> SeedRun:
    rewards = tuple(mean for mean in quarters for _ in range(STEPS // 4))
    return SeedRun(seed, rewards, (0.1, 0.8), 32, "abc", "2 cores", 300, 500)


CURVE = [run_of(quarters, seed) for seed, quarters in enumerate(SEEDS)]


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def recipe(name: str) -> RunConfig:
    """Return a recipe's configuration; the files of Gemma are fetched by `make nightly` alone."""
    return load_config(f"configs/recipes/{name}.yaml", dry_run=True)


@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_loads_and_fits_two_cores(name: str) -> None:
    config = recipe(name)
    assert (config.run.name, config.num_ranks, config.run.eval_every) == (name, 2, 0)
    num_parameters = 268_098_176 if name.startswith("gemma") else 134_515_008
    assert model_shape(config).num_parameters == num_parameters
    assert config.data.environment is not None and config.checkpoint.every == 0


def test_three_tasks_of_reasoning_gym_and_one_of_several_turns_for_each_model() -> None:
    first = [name for name in NAMES if not name.startswith("gemma")]
    assert sorted(NAMES) == sorted([*first, *(f"gemma-{name}" for name in first)])
    environments = [recipe(name).data.environment for name in first]
    assert environments == [recipe(f"gemma-{name}").data.environment for name in first]
    names = [one.name.partition("/")[0] for one in environments if one is not None]
    assert sorted(names) == ["gymnasium", *["reasoning_gym"] * 3]


@pytest.mark.parametrize("file", CURVES, ids=lambda file: file.stem)
def test_committed_curves_are_of_their_recipes(file: Path) -> None:
    assert file.stem in NAMES
    config, runs = recipe(file.stem), read_curve(file)
    assert [run.seed for run in runs] == [*range(len(runs))]
    content = json.loads(file.read_text())
    for run in runs:
        assert len(run.rewards) == config.run.steps and run.rows_per_step == config.rows_per_step
        assert all(
            low <= reward <= high
            for low, reward, high in zip(content["lowest"], run.rewards, content["highest"], strict=True)
        )
    if len(runs) > 1:
        for run in runs:
            assert all(part.fits for part in compare(run.rewards, runs)), "a curve contains its own runs"


def test_the_page_has_the_curves_that_are_committed() -> None:
    page = (ROOT / "docs/how-to/recipes.md").read_text()
    table = page_table({file.stem: read_curve(file) for file in CURVES})
    assert table in page, f"replace the table of docs/how-to/recipes.md by:\n{table}"
    assert all(f"`{name}`" in page for name in NAMES)


def test_the_tolerance_is_half_of_the_prediction_interval() -> None:
    parts = compare(run_of([0.22, 0.40, 0.58, 0.80]).rewards, CURVE)
    assert [(part.first, part.last) for part in parts] == [(1, 6), (7, 12), (13, 18), (19, 24)]
    assert [part.expected for part in parts] == pytest.approx([0.22, 0.40, 0.58, 0.80])
    assert [part.found for part in parts] == pytest.approx([0.22, 0.40, 0.58, 0.80])
    # The noise of 192 independent responses, sqrt(0.25 / 192) at most, is the larger one for these three runs.
    chances = [mean * (1 - mean) / 192 for mean in (0.22, 0.40, 0.58, 0.80)]
    deviations = [math.sqrt(max(VARIANCE, chance) * 4 / 3) for chance in chances]
    assert deviations[1] > math.sqrt(VARIANCE * 4 / 3)
    assert [part.tolerance for part in parts] == pytest.approx(
        [QUANTILE * one for one in deviations], rel=1e-4
    )


@pytest.mark.parametrize(
    ("quarters", "misses"),
    [
        ([0.20, 0.42, 0.60, 0.79], []),
        ([0.20, 0.42, 0.60, 0.40], [(19, 24, "below")]),
        ([0.20, 0.20, 0.20, 0.20], [(7, 12, "below"), (13, 18, "below"), (19, 24, "below")]),
        ([0.70, 0.42, 0.60, 0.79], [(1, 6, "above")]),
    ],
)
def test_runs_beside_the_curve(quarters: list[float], misses: list[tuple[int, int, str]]) -> None:
    parts = compare(run_of(quarters).rewards, CURVE)
    found = [line.split() for line in check_recipes.table(parts).splitlines()[1:]]
    assert [(part.first, part.last) for part in parts if not part.fits] == [miss[:2] for miss in misses]
    assert [(words[0], words[-1]) for words in found if words[-1] in ("below", "above")] == [
        (f"{first}-{last}", verdict) for first, last, verdict in misses
    ]


def test_equal_runs_are_rarely_said_to_differ() -> None:
    """Four runs of one distribution: the fourth misses the curve of the others in about one case of a hundred."""
    random.seed(0)
    missed = 0
    for _ in range(2000):
        noisy = [
            run_of([mean + random.gauss(0, 0.06) for mean in (0.3, 0.4, 0.5, 0.6)], seed) for seed in range(4)
        ]
        missed += not all(part.fits for part in compare(noisy[3].rewards, noisy[:3]))
    assert 4 <= missed <= 40


def test_curves_that_cannot_be_compared() -> None:
    with pytest.raises(DataError, match=r"has 1 run\(s\), and a spread takes two; record more with --update"):
        compare(CURVE[0].rewards, CURVE[:1])
    with pytest.raises(DataError, match="the run has 23 steps and the curve 24"):
        compare(CURVE[0].rewards[1:], CURVE)
    with pytest.raises(DataError, match="the run has 23 steps and the curve 24; remove"):
        with_run(CURVE, replace(CURVE[0], seed=7, rewards=CURVE[0].rewards[1:]))


def write_rows(folder: Path, rows: list[dict[str, float | None]]) -> None:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_rewards_of_a_run(tmp_path: Path) -> None:
    rows: list[dict[str, float | None]] = [{"step": 0, "eval/score_mean": 0.1}]
    rows += [{"step": step, "reward/mean": step / 10} for step in range(1, 4)]
    rows[-1]["eval/score_mean"] = 0.5
    write_rows(tmp_path, rows)
    assert read_run(tmp_path, 3) == ((0.1, 0.2, 0.3), (0.1, 0.5))
    with pytest.raises(DataError, match=r"has no row of step 4 of 4; the run ended early: see .*log"):
        read_run(tmp_path, 4)
    write_rows(tmp_path, [*rows[:2], {"step": 2, "reward/mean": None}, rows[3]])
    with pytest.raises(DataError, match="reward/mean of step 2 is not a number"):
        read_run(tmp_path, 3)
    write_rows(tmp_path, [{"step": 0}, *rows[1:]])
    with pytest.raises(DataError, match="eval/score_mean of step 0 is not a number"):
        read_run(tmp_path, 3)


def test_a_curve_is_read_as_it_was_written(tmp_path: Path) -> None:
    file = tmp_path / "curves" / "one.json"
    assert read_curve(file) == []
    write_curve(file, CURVE[::-1])
    assert read_curve(file) == CURVE
    content = json.loads(file.read_text())
    assert (content["mean"][0], content["lowest"][0], content["highest"][0]) == (0.22, 0.2, 0.24)
    again = replace(CURVE[1], commit="def")
    assert [run.commit for run in with_run(CURVE, again)] == ["abc", "abc", "def"]
    draw({"one": CURVE, "two": CURVE[:1]}, tmp_path / "one.svg")
    draw({"one": CURVE, "two": CURVE[:1]}, tmp_path / "two.svg")
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()


def test_each_model_is_converted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of runs holds recipes of several models."""

    def convert(config: RunConfig) -> None:
        config.model_folder.mkdir()
        (config.model_folder / "model.safetensors").write_text(str(config.model.gguf))

    monkeypatch.setattr("hybridengine.training.files.convert_gguf", convert)
    monkeypatch.setattr(check_recipes, "RECIPES", tmp_path)
    for number, model in enumerate(("one", "two", "one")):
        (tmp_path / f"{model}.gguf").touch()
        shutil.copyfile("configs/models/smollm2-135m-instruct.json", tmp_path / f"{model}.json")
        named = {"gguf": str(tmp_path / f"{model}.gguf"), "hf_config": str(tmp_path / f"{model}.json")}
        described = {"base": str(ROOT / "configs/recipes/letters.yaml"), "model": named}
        (tmp_path / f"{number}.yaml").write_text(json.dumps(described))
    paths = [check_recipes._converted(str(number), tmp_path)[-1] for number in range(3)]
    weights = [Path(path.removeprefix("model.path=")) / "model.safetensors" for path in paths]
    assert [Path(file.read_text()).stem for file in weights] == ["one", "two", "one"]
    assert weights[0] == weights[2]


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check_recipes, "CURVES", tmp_path)
    monkeypatch.setattr(check_recipes, "PICTURE", tmp_path / "recipes.svg")
    quarters = {name: [0.2, 0.4, 0.6, 0.8] for name in NAMES}
    monkeypatch.setattr(check_recipes, "train", lambda name, seed, folder: run_of(quarters[name], seed))
    for seed in range(3):
        assert check_recipes.main([NAMES[0], "--seed", str(seed), "--update"]) == 0
    assert len(read_curve(tmp_path / f"{NAMES[0]}.json")) == 3 and (tmp_path / "recipes.svg").exists()
    assert check_recipes.main([NAMES[0]]) == 0
    quarters[NAMES[0]] = [0.2, 0.2, 0.2, 0.2]
    capsys.readouterr()
    assert check_recipes.main([NAMES[0]]) == 1
    assert "19-24   0.200     0.800" in capsys.readouterr().out
    assert check_recipes.main([NAMES[1]]) == 1, "without a curve"
    with pytest.raises(SystemExit) as ended:
        check_recipes.main(["none"])
    assert ended.value.code == 2 and "'none' is not a recipe; recipes are" in capsys.readouterr().err
    for wrong, said in (
        ("--seed=-1", "--seed -1 must be at least 0"),
        (f"--folder={__file__}", "is not a folder"),
    ):
        with pytest.raises(SystemExit) as ended:
            check_recipes.main([wrong])
        assert ended.value.code == 2 and said in capsys.readouterr().err
    for content in ("", "{}", '{"runs": [{"seed": 0}]}', '{"runs": [3]}'):
        (tmp_path / f"{NAMES[0]}.json").write_text(content)
        assert check_recipes.main([NAMES[0]]) == 1
        assert f"{NAMES[0]}.json is not an expected curve (" in capsys.readouterr().out


def test_a_run_is_compared_with_runs_of_other_seeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check_recipes, "CURVES", tmp_path)
    monkeypatch.setattr(
        check_recipes, "train", lambda name, seed, folder: run_of([0.25, 0.25, 0.25, 0.75], seed)
    )
    runs = [run_of([0.25, 0.25, 0.25, last], seed) for seed, last in enumerate((0.25, 0.35, 0.75))]
    write_curve(tmp_path / f"{NAMES[0]}.json", runs)
    assert check_recipes.main([NAMES[0], "--seed", "2"]) == 1
    assert "19-24   0.750     0.300" in capsys.readouterr().out
    write_curve(tmp_path / f"{NAMES[0]}.json", runs[1:])
    assert check_recipes.main([NAMES[0], "--seed", "2"]) == 1
    assert "the curve has 1 run(s), and a spread takes two" in capsys.readouterr().out

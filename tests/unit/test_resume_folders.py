"""The choice of the folder that a run resumes in, and what stays in it if the run cannot even begin."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from hybridengine.checkpoints.folders import Best, Checkpoint, DataState, RunState, checkpoints_in
from hybridengine.checkpoints.making import begin_checkpoint, complete_checkpoint, end_role
from hybridengine.cli.main import main
from hybridengine.config import load_config
from hybridengine.config.run_config import TRAINED
from hybridengine.machine import package_versions
from hybridengine.training.files import build_model
from hybridengine.training.saving import Progress, changes_since

SMALL = {
    "run": {"steps": 4},
    "model": {
        "build": {
            "num_layers": 1,
            "hidden_size": 32,
            "ffn_hidden_size": 32,
            "num_heads": 2,
            "num_kv_heads": 1,
        }
    },
    "data": {"batch_size": 4, "task": {"train_rows": 16, "eval_rows": 4}},
}

GRPO = ("algorithm.name=grpo", "rollout.samples_per_prompt=2")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    found = tmp_path / "own.yaml"
    sections = SMALL | {"run": {"steps": 4, "folder": str(tmp_path / "runs")}}
    found.write_text(yaml.safe_dump(sections))
    return found


def save(file: Path, step: int, *overrides: str) -> Path:
    """Write a checkpoint that records its run's configuration; return its folder."""
    config = load_config(file, overrides)
    config.run_folder.mkdir(parents=True, exist_ok=True)
    (config.run_folder / "config.yaml").write_text(yaml.safe_dump(config.described()))
    roles = tuple(role for role in TRAINED if role in config.algorithm.roles)
    data = DataState(prompts_drawn=4 * step)
    state = RunState(step=step, roles=roles, data=data, config=config.described())
    partial = begin_checkpoint(config.run_folder, state)
    for role in roles:
        end_role(partial / role, {})
    return complete_checkpoint(partial).folder


@pytest.fixture
def trained(file: Path, tmp_path: Path) -> Path:
    """Return a folder with the model of a completed run of 4 steps, and no checkpoint."""
    config = load_config(file)
    final = config.run_folder / "final"
    build_model(config)
    config.model_folder.rename(final)
    (config.run_folder / "final.json").write_text('{"step": 4}')
    return final


def test_a_folder_that_was_there_stays(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "runs" / "own"
    folder.mkdir(parents=True)
    (folder / "thesis.txt").write_text("precious")
    save(file, 2)
    (folder / "config.yaml").unlink()  # somebody has copied the checkpoint there
    assert main(["train", str(file), "resume=auto", "data.batch_size=17"]) == 2
    assert "data.batch_size=17 wants more" in capsys.readouterr().err
    assert (folder / "thesis.txt").read_text() == "precious"
    assert [one.step for one in checkpoints_in(folder)] == [2]


def test_a_folder_of_its_own_making_goes(file: Path, tmp_path: Path) -> None:
    assert main(["train", str(file), "resume=auto", "data.batch_size=17"]) == 2
    assert not (tmp_path / "runs").exists()


def test_checkpoints_count_also_where_the_configuration_beside_them_is_gone(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (save(file, 4).parents[1] / "config.yaml").unlink()
    assert main(["train", str(file), "resume=auto", "data.batch_size=17"]) == 2
    assert "resuming after step 4" in capsys.readouterr().out


@pytest.mark.parametrize("change", ["model.build.hidden_size=64", "data.task.train_rows=20"])
def test_what_was_settled_when_the_run_began_cannot_change(
    change: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(file, 2)
    assert main(["train", str(file), "resume=auto", change]) == 2
    key, _, value = change.partition("=")
    error = capsys.readouterr().err
    assert f"resume=auto: {key}: " in error and f" -> {value}, which was settled when" in error


def test_a_run_that_began_from_a_checkpoint_and_has_none_of_its_own_yet_begins_there_again(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    origin = save(file, 2, "run.name=other")
    shutil.rmtree(save(file, 3).parent)
    kept = tmp_path / "runs" / "own" / "config.yaml"
    kept.write_text(yaml.safe_dump(yaml.safe_load(kept.read_text()) | {"resume": str(origin)}))
    assert main(["train", str(file), "resume=auto", "data.batch_size=17"]) == 2
    assert "resuming after step 2: " in capsys.readouterr().out
    flip = save(file, 3) / "run.json"  # a damaged one of its own makes no difference
    flip.write_text(flip.read_text().replace("3", "4"))
    kept.write_text(yaml.safe_dump(yaml.safe_load(kept.read_text()) | {"resume": str(origin)}))
    assert main(["train", str(file), "resume=auto", "data.batch_size=17"]) == 2
    told = capsys.readouterr().out
    assert "step-00000003 is damaged" in told and "resuming after step 2: " in told


def test_of_a_converted_checkpoint_what_it_lacks_is_told_and_no_configuration_is_compared(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    partial = begin_checkpoint(tmp_path / "made", RunState(step=0, roles=("actor",)))
    end_role(partial / "actor", {})
    start = complete_checkpoint(partial).folder
    assert main(["train", str(file), f"resume={start}", "data.batch_size=17"]) == 2
    told = capsys.readouterr().out
    assert "resuming after step 0: " in told and "has changed" not in told
    assert "not in it, and initialised as in a new run: critic\n" in told
    assert main(["train", str(file), f"resume={start}", "data.batch_size=17", *GRPO]) == 2
    assert "not in it" not in capsys.readouterr().out


@pytest.mark.parametrize("kept", [b"resume: [", b"text", b"\xff\xfe\x80", 1000 * b"[\n", None])
def test_a_kept_configuration_that_is_none(
    kept: bytes | None, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "runs" / "own" / "config.yaml"
    place.parent.mkdir(parents=True)
    if kept is None:
        place.mkdir()
    else:
        place.write_bytes(kept)
    assert main(["train", str(file), "resume=auto"]) == 2
    assert "is not a configuration" in capsys.readouterr().err


def test_a_trained_model_without_checkpoints_is_not_trained_anew(
    trained: Path, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """This happens with checkpoint.every=0 and a command that always passes resume=auto."""
    before = (trained / "model.safetensors").read_bytes()
    assert main(["train", str(file), "resume=auto"]) == 0
    assert "all 4 steps are done, and nothing is left to do" in capsys.readouterr().out
    assert main(["train", str(file), "resume=auto", "run.steps=6"]) == 2
    assert (
        "has a trained model and no whole checkpoint of its step to resume from; choose"
        in capsys.readouterr().err
    )
    origin = save(file, 2, "run.name=other")
    kept = trained.parent / "config.yaml"
    kept.write_text(yaml.safe_dump(load_config(file).described() | {"resume": str(origin)}))
    assert main(["train", str(file), "resume=auto"]) == 0  # does not start again from its origin
    assert main(["train", str(file), "resume=auto", "run.steps=6"]) == 2
    assert "has a trained model and no whole checkpoint" in capsys.readouterr().err
    shutil.rmtree(origin)
    assert main(["train", str(file), "resume=auto"]) == 0
    save(file, 3)  # the last one could not be written
    assert main(["train", str(file), "resume=auto"]) == 0
    assert main(["train", str(file), "resume=auto", "run.steps=6"]) == 2
    assert "no whole checkpoint of its step to resume from" in capsys.readouterr().err
    assert (trained / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize("damage", ["truncated", "empty"])
def test_a_damaged_trained_model_is_not_taken_for_one(
    damage: str, trained: Path, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if damage == "empty":
        shutil.rmtree(trained)
        trained.mkdir()
    else:
        (trained / "model.safetensors").write_bytes(b"")
    assert main(["train", str(file), "resume=auto"]) == 2
    assert "no whole checkpoint of its step to resume from" in capsys.readouterr().err
    save(file, 4)
    assert main(["train", str(file), "resume=auto", "data.batch_size=17"]) == 2
    assert "is damaged, and will be written again: " in capsys.readouterr().out


def checkpoint_that_says(file: Path, **state: Any) -> Checkpoint:
    config = load_config(file)
    config.run_folder.mkdir(parents=True, exist_ok=True)
    every = {"step": 2, "state": {"beta": 1}, "data": {"prompts_drawn": 8}}
    return complete_checkpoint(begin_checkpoint(config.run_folder, RunState(**(every | state))))


def test_other_prompts_and_packages_are_told(file: Path) -> None:
    config = load_config(file)
    config.train_file.parent.mkdir(parents=True)
    config.train_file.write_text("{}")
    same = {"sha256": hashlib.sha256(b"{}").hexdigest()}
    versions = dict(package_versions())
    assert changes_since(config, checkpoint_that_says(file, data=same, versions=versions)) == []
    assert changes_since(config, checkpoint_that_says(file)) == []  # it has no configuration
    other = checkpoint_that_says(file, data={"sha256": "0"}, versions=versions | {"torch": "1.0"})
    assert changes_since(config, other) == [
        f"{config.train_file} has other contents: prompts may come twice, or not at all",
        f'version of torch: "1.0" -> "{versions["torch"]}"',
    ]


def test_damaged_rows_are_told_before_anything_starts(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = save(file, 2).parents[1] / "metrics.jsonl"
    rows.write_text('{"step": 0}\n{"step": 1, "rew\n')
    assert main(["train", str(file), "resume=auto"]) == 2
    assert f"{rows}:2: " in capsys.readouterr().err


def test_the_best_by_another_metric_is_forgotten(file: Path) -> None:
    found = checkpoint_that_says(file, best={"step": 1, "value": 50.0, "metric": "reward/mean"})
    assert Progress.at(found, "reward/mean") == Progress(
        2, {"beta": 1.0}, Best(step=1, value=50.0, metric="reward/mean"), 8
    )
    assert Progress.at(found, "eval/score_mean").best == Best()


def test_what_a_checkpoint_lacks_and_what_is_left_behind_is_told_before_anything_starts(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(file, 5)
    assert main(["train", str(file), "resume=auto", *GRPO, "data.batch_size=17"]) == 2
    told = capsys.readouterr().out
    assert "critic will not be in later checkpoints: algorithm.name=grpo trains none" in told
    assert "run.steps=4 is less than the 5 that are done: nothing more is trained" in told
    save(file, 6, *GRPO)
    assert main(["train", str(file), "resume=auto"]) == 2
    assert (
        "step-00000006 has no critic, which algorithm.name=ppo trains; resume with" in capsys.readouterr().err
    )

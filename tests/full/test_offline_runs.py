"""A run of DPO on preferences of the data, after a warm-up, without an engine; resumed in the middle of an epoch."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

from hybridengine.config import RunConfig, load_config
from hybridengine.report.step_rows import read_rows
from hybridengine.training.run import train
from tests.full.tiny_runs import SECTIONS, computed, value

pytestmark = pytest.mark.timeout(600)

STEPS, EVERY = 4, 2
CHANGES: dict[str, Any] = {
    "run": {"steps": STEPS, "eval_every": 0, "seed": 7},
    "cluster": {"ranks_per_node": [2]},
    "data": {"batch_size": 10, "max_tokens": 32, "task": {"train_rows": 16, "eval_rows": 1}},
    "actor": {"parallel": "1-1-2", "mini_batches": 1, "optimizer": {"lr": 1e-3}},
    "reference": {"parallel": "2-1-1"},
    "checkpoint": {"every": EVERY},
    "algorithm": {"name": "dpo"},
}


def config_of(folder: Path, *overrides: str) -> RunConfig:
    file = folder / "dpo.yaml"
    file.write_text(yaml.safe_dump({"model": SECTIONS["model"], "warmup": SECTIONS["warmup"], **CHANGES}))
    return load_config(file, [f"run.folder={folder / 'runs'}", *overrides])


def test_a_resumed_run_is_bitwise_the_same(
    tmp_path: Path, ray_cluster: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """A step reads 10 of 16 rows; ranks are as many as the one held-out row has sequences."""
    config = config_of(tmp_path)
    train(config)
    shown = capsys.readouterr().out
    assert "data: 16 preferences; 4 steps of 10 read 2.5 epochs" in shown
    assert "switch" not in shown and "engine" not in shown
    rows = read_rows(config.run_folder)
    losses = [value(row, "actor/dpo_loss") for row in rows[1:]]
    assert losses[0] == pytest.approx(0.693147, abs=1e-5), "the actor is the reference, log 2"
    assert (value(rows[0], "eval/loss"), value(rows[0], "eval/accuracy")) == (
        pytest.approx(0.693147, abs=1e-5),
        0,
    )
    assert value(rows[-1], "eval/loss") < 0.69

    again = config_of(tmp_path, "run.name=again", "resume=auto")
    shutil.copytree(config.run_folder, again.run_folder)
    shutil.rmtree(again.run_folder / "checkpoints" / f"step-{STEPS:08d}")
    shutil.rmtree(again.run_folder / "final")
    (again.run_folder / "final.json").unlink()
    train(again)
    assert "resuming after step 2" in capsys.readouterr().out
    assert computed(read_rows(again.run_folder))[-STEPS + EVERY :] == computed(rows)[-STEPS + EVERY :]
    first, second = (load_file(one.run_folder / "final" / "model.safetensors") for one in (config, again))
    assert first.keys() == second.keys()
    assert all(first[name].equal(second[name]) for name in first)

"""`hybridengine bench step` for this project alone: real ranks, a tiny model, all its tokens in every response."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from hybridengine.cli.main import main
from tests.full.tiny_runs import SECTIONS

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]


def test_our_side_alone_measures_whole_steps(
    tmp_path: Path, ray_cluster: int, capsys: pytest.CaptureFixture[str]
) -> None:
    config, report = tmp_path / "tiny.yaml", tmp_path / "step.json"
    config.write_text(
        yaml.safe_dump(
            {
                name: SECTIONS[name]
                for name in ("model", "data", "cluster", "actor", "critic", "reference", "rollout")
            }
        )
    )
    sizes = {
        "prompts": 2,
        "samples": 3,
        "response-tokens": 5,
        "repetitions": 2,
        "parallel": "1-1-2",
    }
    work = [part for name, value in sizes.items() for part in (f"--{name}", str(value))]
    code = main(["bench", "step", str(config), "--only", "hybridengine", *work, "--json", str(report)])
    _, err = capsys.readouterr()
    assert code == 0, err
    found = json.loads(report.read_text())
    seconds = found["hybridengine"]["samples_step_s"]
    tokens = found["hybridengine"]["samples_tokens"]
    assert len(seconds) == len(tokens) == 2
    # Six responses of five tokens, and each of the two prompts three times.
    prompts = [(number - 6 * 5) / 3 for number in tokens]
    assert all(length.is_integer() and 2 <= length <= 64 for length in prompts)
    assert found["tokens_per_s"] == pytest.approx(
        sum(t / s for t, s in zip(tokens, seconds, strict=True)) / 2
    )
    phases = found["phases_s"]
    assert {"generate", "ref_log_probs", "update_actor", "controller"} <= phases.keys()
    assert "log_probs" not in phases  # the engine's log-probs are used
    assert 0 < sum(phases.values()) < 2 * max(seconds)
    assert found["trl"] is None
    assert "2 of 2: ours" in err

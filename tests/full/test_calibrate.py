"""`hybridengine calibrate` on real ranks, with one small case; lengths in the metrics of a real run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from hybridengine.bench import calibration
from hybridengine.cli.main import main
from hybridengine.metrics import keys
from hybridengine.metrics.measured_run import run_lengths
from hybridengine.planning.clusters import load_planned_cluster
from tests.full.tiny_runs import Run, value

pytestmark = pytest.mark.timeout(600)


def test_a_machine_is_measured_fitted_and_planned_for(
    ray_cluster: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = replace(calibration.CPU_CASES[0], actor=(1, 2), reference=(1, 1), batch_sizes=(8, 24))
    monkeypatch.setattr(calibration, "CPU_CASES", (small,))
    monkeypatch.setattr(calibration, "SINGLE_CASES", ())
    monkeypatch.setattr(calibration, "STEPS_PER_SIZE", 2)
    file, figures = tmp_path / "here.yaml", tmp_path / "fit.json"
    assert main(["calibrate", "--ranks", "2", "--out", str(file), "--json", str(figures)]) == 0
    text = "".join(capsys.readouterr())  # results and progress
    for part in (
        "measuring 2 ranks",
        "case 1 of 1",
        "actor 1-2-1 and 1-1",
        "8 rows",
        "24 rows",
        "error of the fit",
    ):
        assert part in text
    cluster = load_planned_cluster(file, "float32")
    assert (cluster.num_devices, cluster.nodes) == (2, 1)
    links, compute = cluster.links, cluster.compute
    assert compute is not None and compute.flops_per_s.float32 is not None
    assert 1e9 < compute.flops_per_s.float32 < 1e14
    assert 1e8 < links.same_node.bytes_per_s < 1e12
    assert 1e-6 < links.same_node.latency_s < 0.1
    assert compute.process_bytes is not None and compute.process_bytes > 2**27
    found = json.loads(figures.read_text())
    steps = {step["observation"]: step["measured_s"] for step in found["steps"]}
    assert len(steps) == 2
    for name, step_s in steps.items():
        phases = {one["phase"]: one["measured_s"] for one in found["phases"] if one["observation"] == name}
        assert set(phases) >= {"generate", "switch_to_generate", "log_probs", "update_critic", "update_actor"}
        assert all(seconds > 0 for seconds in phases.values())
        assert sum(phases.values()) < 1.05 * step_s, "what ranks spend in calls is a part of the step"
    config = tmp_path / "run.yaml"
    config.write_text(
        yaml.safe_dump(
            {
                "cluster": {"ranks_per_node": [2]},
                "model": {"build": {"num_layers": 2, "hidden_size": 64}},
                "data": {"batch_size": 8, "task": {}},
                "actor": {"parallel": "1-2-1"},
            }
        )
    )
    assert main(["plan", str(config), "--cluster", str(file), "--json"]) == 0
    plans = json.loads(capsys.readouterr().out)["plans"]
    assert plans and all(plan["step_s"] > 0 for plan in plans)


def test_metrics_have_the_quantiles_of_lengths(run: Run) -> None:
    longest = run.config.rollout.max_response_tokens
    for row in run.steps:
        quantiles = [value(row, keys.response_tokens_key(percent)) for percent in keys.LENGTH_SHARES]
        assert quantiles == sorted(quantiles)
        assert quantiles[0] >= 1 and quantiles[-1] <= longest
        assert quantiles[0] <= value(row, keys.RESPONSE_TOKENS_MEAN) <= quantiles[-1]
    means = [value(row, keys.RESPONSE_TOKENS_MEAN) for row in run.steps if keys.SCORE_MEAN not in row]
    lengths = run_lengths(run.folder, longest)
    assert lengths.mean == pytest.approx(sum(means) / len(means), rel=0.15)

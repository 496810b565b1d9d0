"""`hybridengine calibrate` on real ranks with one small case, and lengths in the metrics of a real run."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from hybridengine.bench.calibration import cases as calibration
from hybridengine.bench.calibration.measured_run import call_seconds, run_lengths
from hybridengine.cli.main import main
from hybridengine.planning.costs.clusters import load_planned_cluster
from hybridengine.planning.costs.lengths import Lengths
from hybridengine.planning.costs.workload import workload_of
from hybridengine.report import keys
from hybridengine.report.timeline import TIMELINE_FILE, read_timeline
from tests.full.tiny_runs import Run, value

pytestmark = pytest.mark.timeout(600)


def test_a_machine_is_measured_fitted_and_planned_for(
    ray_cluster: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = replace(calibration.CPU_CASES[0], actor=(1, 2), reference=(1, 1), batch_sizes=(4, 8, 12))
    short = calibration.RUN.replace("max_response_tokens: 48", "max_response_tokens: 12")
    monkeypatch.setattr(calibration, "RUN", short)
    monkeypatch.setattr(calibration, "CPU_CASES", (small,))
    monkeypatch.setattr(calibration, "SINGLE_CASES", ())
    file = tmp_path / "here.yaml"
    assert main(["calibrate", "--ranks", "2", "--out", str(file)]) == 0
    text, progress = capsys.readouterr()
    for part in ("measuring 2 ranks", "case 1 of 1", "fitting coefficients to 3 runs"):
        assert part in progress
    text = text[text.rindex("\ncluster: ") :]  # after the output of the runs themselves
    for part in ("4 rows a step, actor 1-2-1 and 1-1", "12 rows a step"):
        assert part in text
    for phase in ("generate", "switch_to_generate", "log_probs", "update_critic", "update_actor", "step"):
        assert len(re.findall(rf"^{phase} ", text, re.MULTILINE)) == 3
    assert "within 25% (phases) and 15% (steps)" in text
    cluster = load_planned_cluster(file, "float32")
    assert (cluster.num_devices, cluster.nodes) == (2, 1)
    links, compute = cluster.links, cluster.compute
    assert compute is not None and compute.rate("float32") > 0
    assert links.same_node.bytes_per_s > 0
    assert links.same_node.latency_s > 0
    assert compute.process_bytes is not None and compute.process_bytes > 2**27
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


def test_seconds_of_calls_are_a_part_of_the_step(run: Run) -> None:
    lengths = Lengths.of("constant:4", run.config.rollout.max_response_tokens)
    calls, spans = workload_of(run.config, lengths).calls, read_timeline(run.folder / TIMELINE_FILE).spans
    for row in run.steps:
        seconds = call_seconds(calls, [span for span in spans if span.step == row[keys.STEP]])
        made = [one for one in seconds if one is not None and one > 0]
        assert len(made) == len(calls)
        assert 0.5 * value(row, keys.STEP_S) < sum(made) < 1.05 * value(row, keys.STEP_S)

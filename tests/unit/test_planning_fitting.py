"""Fitted coefficients, compared with a machine whose coefficients are known, and runs read back from their files."""

from __future__ import annotations

import json
import re
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml

from hybridengine.bench.calibration import fitting
from hybridengine.bench.calibration.cases import case_configs, cases_for
from hybridengine.bench.calibration.check import check_run
from hybridengine.bench.calibration.fitting import RANGES, MeasuredRun, fit
from hybridengine.bench.calibration.measured_run import call_seconds, read_run
from hybridengine.cli.main import main
from hybridengine.config import RunConfig
from hybridengine.errors import ConfigError, DataError
from hybridengine.planning.costs.clusters import Cluster
from hybridengine.planning.costs.dataflows import Work
from hybridengine.planning.costs.lengths import Lengths
from hybridengine.planning.costs.workload import workload_of
from hybridengine.planning.search.plan import given_plan
from hybridengine.report import keys
from hybridengine.report.timeline import Span, TimelineWriter

MACHINE = Cluster.model_validate(
    {
        "name": "a machine",
        "source": "made up",
        "nodes": 1,
        "devices_per_node": 4,
        "device_memory_bytes": 2**32,
        "links": {
            "same_device": {"bytes_per_s": 15e9, "node_bytes_per_s": 25e9, "latency_s": 1e-5},
            "same_node": {"bytes_per_s": 2e9, "node_bytes_per_s": 3e9, "latency_s": 5e-5},
        },
        "compute": {
            "flops_per_s": {"float32": 150e9},
            "efficiency": 0.7,
            "half_tokens": 150.0,
            "attention_efficiency": 0.2,
            "activation_passes": 40.0,
            "layer_s": 4e-4,
            "micro_batch_s": 4e-3,
            "decode_efficiency": 0.3,
            "decode_step_s": 2e-3,
            "decode_row_s": 3e-5,
            "decode_layer_s": 5e-4,
            "parameter_s": 8e-5,
            "optimizer_step_s": 4e-3,
            "exchange_s": 7e-4,
            "collective_s": 3e-4,
            "devices_at_once": 2,
            "kv_block_tokens": 128,
            "call_s": 1e-3,
            "process_bytes": 10**9,
        },
    }
)
UNFITTED = Cluster.model_validate(
    MACHINE.model_dump()
    | {
        "compute": {
            "flops_per_s": {"float32": 150e9},
            "devices_at_once": 2,
            "kv_block_tokens": 128,
            "call_s": 1e-3,
        }
    }
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[MeasuredRun]:
    """Return the times of calibration runs on that machine."""
    folder = tmp_path_factory.mktemp("cases")
    return [
        measured(config, config.run.name)
        for case in cases_for(4, on_gpus=False)
        for config in case_configs(case, 4, "float32", folder)
    ]


def measured(config: RunConfig, name: str, lengths: str = "uniform:1-48") -> MeasuredRun:
    workload = workload_of(config, Lengths.of(lengths, config.rollout.max_response_tokens))
    plan = given_plan(config, workload, MACHINE)
    engine = plan.option("actor").engine
    assert engine is not None
    resident = max(pool.peak_bytes for pool in plan.pools)
    return MeasuredRun(
        name, config, workload, plan.phases_s, plan.step_s, resident, engine.switch.peak_bytes, num_steps=4
    )


def test_coefficients_are_found_that_predict_other_runs(
    runs: list[MeasuredRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measurements have a little noise; the predicted runs have layouts, sizes and lengths that are new to the fit."""
    monkeypatch.setattr(fitting, "MOST_EVALUATIONS", 5)  # enough to be close, at a fifth of the time
    generator = np.random.default_rng(0)
    noisy = [
        replace(
            run,
            phases_s={
                phase: seconds * float(np.exp(generator.normal(0, 0.03)))
                for phase, seconds in run.phases_s.items()
            },
        )
        for run in runs
    ]
    found = fit(UNFITTED, noisy)
    assert found.compute is not None and MACHINE.compute is not None
    assert found.compute.process_bytes == pytest.approx(MACHINE.compute.process_bytes, rel=0.01)
    case = replace(
        cases_for(4, on_gpus=False)[0],
        actor=(1, 2),
        critic=(1, 4),
        reference=(2, 1),
        layers=6,
        hidden_size=256,
        batch_sizes=(96,),
    )
    (config,) = case_configs(case, 4, "float32", tmp_path)
    *phases, step = check_run(measured(config, "other", "constant:40"), found)["phases"]
    assert step["phase"] == "step" and abs(step["deviation_share"]) < 0.08
    for phase in phases:
        if phase["tolerance"] is not None:
            assert abs(phase["deviation_share"]) < 0.15, phase


def test_too_few_runs_cannot_decide(runs: list[MeasuredRun]) -> None:
    with pytest.raises(
        ConfigError, match="6 measured phases cannot decide 15 coefficients; measure more runs"
    ):
        fit(UNFITTED, runs[:1])


# ---- Runs read back --------------------------------------------------------------------------------------------------


def test_calls_end_with_their_last_rank_and_begin_when_their_ranks_and_rows_are_ready(
    written: RunConfig,
) -> None:
    calls = measured(written, "written").workload.calls
    spans = [Span("actor.generate_sequences", "", rank, "", "actor", 1.0, 2.0 + rank) for rank in range(3)]
    spans += [Span("reference.compute_log_probs", "", 0, "", "reference", 2.0, 4.5, "other")]
    spans += [Span("compute.map", "", rank, "", "compute", 2.0 + rank, 5.0) for rank in range(3)]
    spans += [Span("actor.generate_sequences", "", 0, "", "actor", 9.0, 99.0)]  # an evaluation
    found = dict(zip(map(str, calls), call_seconds(calls, spans), strict=True))
    assert found["actor.generate_sequences"] == 3.0
    assert found["reference.compute_log_probs"] == 0.5, "of 2.5 seconds it waits 2 for the last responses"
    assert found["compute.map"] == 0.5, "its rows are ready at 4.5 seconds"
    assert found["critic.update"] is None


def write_run(folder: Path, config: RunConfig, num_steps: int, factor: float = 1.0) -> None:
    """Write a run's files with the times of that machine."""
    one = measured(config, "written")
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    lengths = one.workload.lengths
    rows, spans = [], []
    for step in range(1, num_steps + 1):
        quantiles = lengths.quantiles(np.array([percent / 100 for percent in keys.LENGTH_SHARES]))
        quantiles[0] = 1
        row = {
            "step": step,
            keys.STEP_S: one.step_s * factor,
            keys.RESPONSE_TOKENS_MEAN: lengths.mean,
            keys.TOKENS: config.rows_per_step * (lengths.mean + 16),
            keys.PEAK_WEIGHT_BYTES: one.peak_weight_bytes,
            keys.memory_key("resident_bytes"): one.resident_bytes,
        }
        row |= {
            keys.response_tokens_key(percent): float(length)
            for percent, length in zip(keys.LENGTH_SHARES, quantiles, strict=True)
        }
        rows.append(row)
        now = 1000.0 * step
        for call in one.workload.calls:
            seconds = one.phases_s[call.phase] * factor
            spans += [
                Span(str(call), "other", rank, "node", call.role, now, now + seconds, step=step)
                for rank in range(4)
            ]
            now += seconds
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with closing(TimelineWriter(folder / "timeline.json")) as timeline:
        timeline.write(spans, [])


@pytest.fixture
def written(tmp_path: Path) -> RunConfig:
    return case_configs(cases_for(4, on_gpus=False)[1], 4, "float32", tmp_path)[1]


def test_a_run_is_read_as_it_was(written: RunConfig, tmp_path: Path) -> None:
    write_run(tmp_path / "run", written, num_steps=6)
    expected, found = measured(written, "written"), read_run(tmp_path / "run")
    assert found.phases_s == pytest.approx(expected.phases_s, abs=2e-6)
    assert (found.step_s, found.num_steps) == (pytest.approx(expected.step_s), 4)
    assert found.workload.prompt_tokens == pytest.approx(16)
    assert found.workload.lengths.mean == pytest.approx(expected.workload.lengths.mean, rel=0.02)
    assert found.resident_bytes == expected.resident_bytes
    assert found.peak_weight_bytes == expected.peak_weight_bytes
    plan = given_plan(found.config, found.workload, MACHINE)
    assert plan.step_s == pytest.approx(expected.step_s, rel=0.02)


def test_a_check_says_whether_the_model_is_close(
    written: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = tmp_path / "machine.yaml"
    cluster.write_text(yaml.safe_dump(MACHINE.model_dump(mode="json", exclude_none=True)))
    write_run(tmp_path / "run", written, num_steps=6)
    write_run(tmp_path / "slow", written, num_steps=6, factor=1.5)
    check = ["plan", "--cluster", str(cluster), "--check", str(tmp_path / "run")]
    assert main(check) == 0
    text = capsys.readouterr().out
    for part in ("generate", "update_actor", "step", "within 25% (phases) and 15% (steps)", "not judged"):
        assert part in text
    assert "BEYOND" not in text
    assert main([*check, str(tmp_path / "slow")]) == 1
    assert "BEYOND 15%" in capsys.readouterr().out
    assert main([*check, "--json"]) == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert run["within"] is True
    assert run["peak_weight_bytes"]["measured"] == run["peak_weight_bytes"]["predicted"]
    assert run["memory_bytes"]["measured"] == pytest.approx(run["memory_bytes"]["predicted"], rel=0.01)
    assert {one["phase"] for one in run["phases"]} >= {
        "generate",
        "switch_to_generate",
        "update_critic",
        "step",
    }


def test_lengths_come_from_a_run(
    written: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "run", written, num_steps=6)
    cluster = tmp_path / "machine.yaml"
    cluster.write_text(yaml.safe_dump(MACHINE.model_dump(mode="json", exclude_none=True)))
    arguments = ["plan", str(tmp_path / "run" / "config.yaml"), "--cluster", str(cluster), "--top", "1"]
    assert main([*arguments, "--lengths", str(tmp_path / "run")]) == 0
    shown = re.search(r"\(mean (\d+),", capsys.readouterr().out)
    assert shown is not None
    assert int(shown[1]) == pytest.approx(measured(written, "written").workload.lengths.mean, abs=1)


def test_folders_that_are_no_runs(
    written: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--check", str(tmp_path / "none")]) == 2
    assert "has no config.yaml; name the folder of a run" in " ".join(capsys.readouterr().err.split())
    write_run(tmp_path / "short", written, num_steps=4)
    with pytest.raises(DataError, match="has 2 steps that count, and 3 are needed"):
        read_run(tmp_path / "short")
    assert main(["plan", "config.yaml", "--check", str(tmp_path / "short")]) == 2
    assert "--check takes runs as they were; leave out CONFIG" in capsys.readouterr().err
    file = tmp_path / "short" / "metrics.jsonl"
    write_run(tmp_path / "old", written, num_steps=6)
    file = tmp_path / "old" / "metrics.jsonl"
    file.write_text(file.read_text().replace("response_tokens_p50", "median"))
    with pytest.raises(DataError, match="they are of an older version: run it again"):
        read_run(tmp_path / "old")


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8, 16])
def test_every_number_of_ranks_has_runs_to_calibrate_with(num_ranks: int, tmp_path: Path) -> None:
    cases = cases_for(num_ranks, on_gpus=False)
    assert len({(case.actor, case.critic, case.hidden_size) for case in cases}) == len(cases) >= 3
    configs = [
        (case, config) for case in cases for config in case_configs(case, num_ranks, "float32", tmp_path)
    ]
    for case, config in configs:
        assert config.num_ranks == num_ranks // case.share
    assert ({case.share for case in cases} == {1, 2}) == (num_ranks % 4 == 0)
    calls = workload_of(configs[0][1], Lengths.of("constant:8", 48)).calls
    num_phases = len({call.phase for call in calls if call.work in (Work.GENERATE, Work.INFER, Work.UPDATE)})
    assert len(configs) * num_phases >= len(RANGES)

"""Whole runs through Ray with real workers: files, metrics, checkpoints, repeatability, and a cluster too small."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from hybridengine.cli.main import main
from hybridengine.config import model_shape
from hybridengine.planning.switch.switch_cost import SwitchPricer
from hybridengine.report import keys
from hybridengine.report.figures import FIGURES, draw_figure
from hybridengine.report.page import read_run
from hybridengine.report.timeline import TIMELINE_FILE, read_timeline
from hybridengine.topology.links import NodeMap
from hybridengine.training.files import claim_run
from tests.full.tiny_runs import SECTIONS, STEPS, Run, value

pytestmark = pytest.mark.timeout(900)

PROMISED_KEYS = """step reward/mean kl/mean time/generate_s time/switch_to_generate_s time/switch_to_train_s
    time/update_actor_s time/update_critic_s time/step_s switch/received_bytes switch/peak_weight_bytes
    switch/redundant_bytes rollout/log_prob_abs_diff_max transfer/bytes controller/payload_bytes
    controller/overhead_s controller/records_s"""
"""Metrics in every row of a training step."""


def test_every_step_has_a_row_with_all_keys(run: Run):
    assert [row[keys.STEP] for row in run.rows] == [0, 1, 2, 3]
    assert [keys.EXACT_MATCH in row for row in run.rows] == [
        True,
        False,
        True,
        True,
    ]  # every 2 steps, and the last one
    for row in run.steps:
        assert set(PROMISED_KEYS.split()) <= row.keys()
        assert None not in row.values()  # null stands for a value that is not finite
    for row in run.rows:
        if keys.EXACT_MATCH in row:
            assert float(row[keys.EXACT_MATCH] or 0) * 6 == pytest.approx(
                round(float(row[keys.EXACT_MATCH] or 0) * 6)
            )


def test_engine_and_trainer_agree_and_nothing_is_held_twice(run: Run):
    for row in run.steps:
        assert 0 < value(row, keys.LOG_PROB_ABS_DIFF_MAX) < 1e-3
        assert row[keys.REDUNDANT_BYTES] == 0
        assert row["switch/received_bytes_back"] == 0


def test_bytes_of_a_switch_are_those_of_the_plan(run: Run):
    config = run.config
    pricer = SwitchPricer(model_shape(config), config.model.dtype, config.actor.bucket_bytes)
    cost = pricer.price(config.generation_grid, NodeMap(config.cluster.ranks_per_node))
    for row in run.steps:
        assert row[keys.RECEIVED_BYTES] == cost.received_bytes_max
        peak = value(row, keys.PEAK_WEIGHT_BYTES)
        assert peak <= max(cost.train_shard_bytes_max, cost.gen_shard_bytes_max) + cost.bucket_bytes_max
        # Megatron pads parameters, which the plan does not know: small ones, at the end, to twice their size.
        assert cost.peak_weight_bytes_max <= peak <= 1.01 * cost.peak_weight_bytes_max


def test_the_first_step_starts_from_the_reference(run: Run):
    first = run.steps[0]
    assert abs(value(first, keys.KL_MEAN)) < 1e-5
    assert any(abs(value(row, keys.KL_MEAN)) > 1e-6 for row in run.steps[1:])


def test_times_of_phases_fit_into_their_step(run: Run):
    for row in run.steps:
        phases = [float(row[key] or 0) for key in row if keys.phase_of(key) and key != keys.STEP_S]
        assert all(seconds > 0 for seconds in phases)
        assert not any("take_metrics" in key for key in row), (
            "what is asked between two steps is part of neither"
        )
        assert max(phases) < value(row, keys.STEP_S)


def test_rows_that_ranks_read_from_each_other_are_counted(run: Run):
    """A step has at least 16 rows of [32 + 12] tokens. The edges add up to the bytes that were transferred.

    The rows are so small that all of them travel inside Ray's messages, also to ranks that read only some of the columns.
    """
    for row in run.steps:
        assert value(row, keys.PAYLOAD_BYTES) > value(row, keys.TRANSFER_BYTES)
        edges = {key: value(row, key) for key in row if key.startswith("transfer/") and "->" in key}
        assert value(row, keys.TRANSFER_BYTES) == sum(edges.values()) >= 16 * (32 + 12) * 8
        assert edges["transfer/critic.compute_values->compute.map_bytes"] == 16 * 12 * 4 / 2
        assert 0 <= value(row, keys.OVERHEAD_S) < value(row, keys.STEP_S)


def test_the_timeline_has_a_row_per_rank_and_a_bar_per_phase(run: Run):
    spans = read_timeline(run.folder / TIMELINE_FILE).spans
    assert {span.rank for span in spans} == {0, 1, 2, 3}
    phases = {
        "prompts",
        "generate",
        "switch",
        "log-probs",
        "values",
        "scores",
        "advantages",
        "updates",
        "transfers",
    }
    for step in range(1, STEPS + 1):
        for rank in range(4):
            bars = [span for span in spans if (span.step, span.rank) == (step, rank)]
            assert phases <= {span.phase for span in bars}
            calls = sorted((span.start_s, span.end_s) for span in bars if span.phase != "transfers")
            assert all(end <= begin + 1e-6 for (_, end), (begin, _) in pairwise(calls))  # one after the other
    total = sum(span.end_s - span.start_s for span in spans if span.rank == 0 and span.name == "actor.update")
    slowest = sum(value(row, keys.time_key("update_actor")) for row in run.steps)
    assert 0.5 * slowest < total <= slowest + 1e-3


def test_memory_of_every_rank_over_time(run: Run):
    """Read after every call; the report shows each step's maximum. A rank with torch and vLLM uses some hundred MiB."""
    timeline = read_timeline(run.folder / TIMELINE_FILE)
    readings = [reading for reading in timeline.readings if reading.name == keys.memory_key("resident_bytes")]
    calls = [span for span in timeline.spans if span.phase != "transfers"]
    ends = {(span.rank, round(span.end_s, 5)) for span in calls}
    assert {(reading.rank, round(reading.time_s, 5)) for reading in readings} == ends
    assert all(2**27 < reading.value < 2**33 for reading in readings)
    for row in run.steps:
        assert row[keys.memory_key("resident_bytes")] in {reading.value for reading in readings}
    memory = next(figure for figure in FIGURES if figure.has(keys.memory_key("resident_bytes")))
    drawing = draw_figure(memory, read_run(run.folder).rows)
    assert drawing is not None
    assert "memory/resident_bytes: first " in drawing.description


def test_tensorboard_has_the_same_scalars(run: Run):
    events = EventAccumulator(str(run.folder / "tensorboard"))
    events.Reload()
    for key in (keys.REWARD_MEAN, keys.LOG_PROB_ABS_DIFF_MAX, keys.RECEIVED_BYTES):
        scalars = [(event.step, event.value) for event in events.Scalars(key)]
        assert scalars == [(row[keys.STEP], pytest.approx(row[key], rel=1e-5)) for row in run.steps]


def test_the_console_has_a_line_per_step_and_the_summary(run: Run):
    for step in range(STEPS + 1):
        assert f"step {step}/{STEPS}" in run.console
    for text in (
        "exact match before",
        "exact match after",
        "received bytes",
        "peak weight bytes",
        "redundant bytes",
    ):
        assert text in run.console
    assert "Traceback" not in run.console


def test_checkpoints_load_in_transformers_and_differ_by_the_training(run: Run):
    tokenizer = AutoTokenizer.from_pretrained(run.folder / "final")
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "3 + 8 - 5 ="}], tokenize=False, add_generation_prompt=True
    )
    tokens = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
    built, warm, final = (log_probs(load(run.folder / name), tokens) for name in ("model", "warmup", "final"))
    assert (warm - built).abs().max() > 0.1
    assert (final - warm).abs().max() > 1e-3
    assert final.isfinite().all()


def test_a_second_run_takes_a_folder_of_its_own(run: Run):
    """It would repeat the first run bit for bit, as tests/full/test_faults.py shows with two ranks."""
    assert run.folder.name == "tiny"
    second, is_made_here = claim_run(run.config)
    assert second.run_folder == run.folder.with_name("tiny-2") and is_made_here
    second.run_folder.rmdir()


def test_more_ranks_than_the_cluster_has(
    tmp_path: Path, ray_cluster: int, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(SECTIONS))
    sizes = (
        "cluster.ranks_per_node=[16]",
        "actor.parallel=2-2-4",
        "critic.parallel=1-2-8",
        "reference.parallel=2-2-4",
    )
    rows = ("data.batch_size=32",)
    assert main(["train", str(tmp_path / "tiny.yaml"), f"run.folder={tmp_path}", *sizes, *rows]) == 2
    message = capsys.readouterr().err
    assert "ranks_per_node=[16] needs 16 ranks" in message
    assert f"with {ray_cluster} CPUs" in message
    assert "Traceback" not in message


def load(folder: Path) -> PreTrainedModel:
    assert json.loads((folder / "config.json").read_text())["model_type"] == "qwen3"
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def log_probs(model: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens).logits.log_softmax(-1)

"""SFT and offline DPO: their rules, calls, rows of a step and metrics (updates: tests/gloo/test_offline_updates.py)."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from hybridengine.algorithms.across import ONE_PROCESS, Across
from hybridengine.cli.main import main
from hybridengine.config import RunConfig, check_run, load_config
from hybridengine.data.datasets import rows_after
from hybridengine.data.responses import ResponseDataset
from hybridengine.data.tokenizer import build_arithmetic_tokenizer
from hybridengine.drivers.dpo import Dpo
from hybridengine.drivers.offline_metrics import batch_metrics, held_out_loss, held_out_preferences
from hybridengine.planning.budget import budget_of
from hybridengine.planning.costs.dataflows import calls_of
from hybridengine.rows.protocols import ROW_NUMBERS, GroupTopology, RankContext
from hybridengine.training.dry_run import cost_of
from hybridengine.training.saving import Progress, RunSaver
from tests.unit.test_config import ROOT, problems_of
from workers import prompts as prompts_module
from workers.prompts import PromptWorker

SFT, DPO = ROOT / "configs/sft.yaml", ROOT / "configs/dpo.yaml"


@pytest.mark.parametrize(
    ("file", "overrides", "messages"),
    [
        (SFT, ["warmup.steps=3"], ["warmup trains on demonstrations before algorithm.name=sft, which does that itself"]),
        (
            SFT,
            ["actor.kl_loss_coef=0.1"],
            ["actor.kl_loss_coef=0.1 is not read by algorithm.loss=hybridengine.algorithms.losses.supervised:"],
        ),
        (
            SFT,
            ["data.batch_size=5"],
            ["data.batch_size=5 · 1 of algorithm.name=sft = 5 rows must split evenly over the d = 2 replicas"],
        ),
        (
            SFT,
            ["actor.micro_batch_tokens=20"],
            ["actor.micro_batch_tokens=20 must hold one row of 24 tokens (data.max_tokens); raise it to at least 24"],
        ),
        (
            SFT,
            ["data.batch_size=2", "cluster.ranks_per_node=[4]", "actor.parallel=1-2-2"],
            ["each of the 4 ranks of cluster.ranks_per_node=[4] computes on rows of its own, and data.batch_size=2 · 1"],
        ),
        (SFT, ["algorithm.correction.name=icepop"], ["algorithm.correction is not read by algorithm.name=sft, which"]),
        (SFT, ["algorithm.kl_estimator=k3"], ["algorithm.kl_estimator=k3 is not read by algorithm.name=sft, which"]),
        (SFT, ["generation.parallel=1-2"], ["generation.parallel=1-2 is not read by algorithm.name=sft"]),
        (
            DPO,
            ["actor.micro_batch_tokens=40"],
            ["actor.micro_batch_tokens=40 must hold 2 rows, which stay together, of 24 tokens (data.max_tokens)"],
        ),
        (DPO, ["data.batch_size=7"], ["data.batch_size=7 pairs of algorithm.name=dpo must split evenly over"]),
        (
            DPO,
            ["algorithm.label_smoothing=0.1", "algorithm.loss=hybridengine.algorithms.losses.dpo:ipo_loss"],
            ["algorithm.label_smoothing=0.1 is not read by algorithm.loss=hybridengine.algorithms.losses.dpo:ipo_loss"],
        ),
        (
            DPO,
            ["data.task=null", "data.environment.name=reasoning_gym/leg_counting", "warmup=null"],
            ["data.environment=reasoning_gym/leg_counting has prompts without responses, which algorithm.name=dpo"],
        ),
        (
            DPO,
            ["data.task=null", "data.train_file=/no/rows.jsonl", "warmup=null"],
            ["data.train_file=/no/rows.jsonl is not a file"],
        ),
        (DPO, ["data.too_long=skip"], ["data.too_long=\"skip\" must be 'error', 'truncate' or 'drop'"]),
    ],
)  # fmt: skip
def test_rules_of_offline_algorithms(file: Path, overrides: list[str], messages: list[str]) -> None:
    found = problems_of(file, *overrides)
    for start in messages:
        assert any(text.startswith(start) for text in found), found


def test_what_draws_responses_is_not_read() -> None:
    """Sizes of engines, widths and the temperature of a base file are ignored, and no memory is planned for them."""
    overrides = ["actor.generate=3-5", "rollout.max_response_tokens=1", "rollout.temperature=0.3"]
    config = load_config(DPO, [*overrides, "rollout.kv_cache_bytes=64GiB", "rollout.samples_per_prompt=5"])
    assert check_run(config) == []
    assert (config.max_tokens, config.max_response_tokens, config.temperature) == (24, 24, 1.0)
    assert config.rows_per_step == 128
    assert config.engine_sizes == {}
    online = load_config(ROOT / "configs/online-dpo.yaml")
    assert (online.max_tokens, online.max_response_tokens, online.rows_per_step) == (24, 8, 256)
    plain = load_config(SFT)
    budget = budget_of(plain, "main", cost_of(plain), on_gpus=True)
    assert list(budget.device_bytes) == ["load", "training step", "save"]


@pytest.mark.parametrize("file", [SFT, DPO])
def test_a_dry_run_has_no_engine_and_plans_are_refused(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(file), "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "training step" in shown
    assert not [
        word for word in ("generation", "switch", "KV", "decoding", "micro-DP", "digest") if word in shown
    ]
    cluster = str(ROOT / "configs/clusters/h100-80gb.yaml")
    for command in (["rehearse", str(file)], ["plan", str(file), "--cluster", cluster]):
        assert main(command) == 2
        refused = f"algorithm.name={file.stem} draws no responses, and hybridengine {command[0]}"
        assert refused in capsys.readouterr().err


def test_the_calls_of_a_step() -> None:
    sft, dpo = (load_config(file).algorithm for file in (SFT, DPO))
    assert [(str(call), call.num_rows) for call in calls_of(sft, 8, 1)] == [
        ("prompts.training_prompts", 8),
        ("actor.update_supervised", 8),
        ("compute.measure", 8),
    ]
    calls = calls_of(dpo, 8, 1, has_adapters=True)
    assert [(str(call), call.num_rows, call.reads) for call in calls] == [
        ("prompts.training_prompts", 16, ()),
        ("actor.compute_base_log_probs", 16, (0,)),
        ("actor.update_preferences", 16, (0, 1)),
        ("compute.measure", 16, (0, 1)),
    ]


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    """The configuration of preferences in a file of 5 rows."""
    monkeypatch.setattr(prompts_module, "image_reader", lambda run: None)  # which reads the model's folder
    rows = [{"prompt": str(n), "chosen": f"{n} 1", "rejected": f"{n} 2"} for n in range(5)]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    build_arithmetic_tokenizer().save_pretrained(tmp_path / "tokenizer")
    files = [f"data.train_file={file}", f"data.eval_file={file}", f"model.tokenizer={tmp_path / 'tokenizer'}"]
    return load_config(DPO, ["data.task=null", "warmup=null", "data.batch_size=4", *files])


def reader(config: RunConfig) -> PromptWorker:
    topology = GroupTopology.parse("1-1-1")
    context = RankContext("prompts", 0, 1, topology, topology.grid.coordinate(0), "127.0.0.1")
    return PromptWorker(context, config)


def numbered(numbers: range) -> TensorDict:
    return TensorDict({ROW_NUMBERS: torch.tensor(list(numbers))}, batch_size=[len(numbers)])


def test_pairs_stay_together_on_every_rank_and_a_resumed_run_reads_the_same(written: RunConfig) -> None:
    """Two ranks have the first and the second half of a step; the stream continues in the middle of an epoch."""
    worker, tokenizer = reader(written), build_arithmetic_tokenizer()
    data = ResponseDataset(written.train_file, tokenizer, "preferences", 24)
    for step in (1, 2, 3):
        parts = [worker.training_prompts(numbered(part), step) for part in (range(4), range(4, 8))]
        rows = rows_after(5, 4, written.run.seed, 4 * (step - 1))
        expected = data.rows([2 * row + side for row in rows for side in (0, 1)])
        assert torch.cat([part["tokens"] for part in parts]).equal(expected["tokens"])
        resumed = reader(written)
        resumed.go_on_after(step - 1, 4 * (step - 1))
        assert resumed.training_prompts(numbered(range(8)), step)["tokens"].equal(expected["tokens"])
    held_out = worker.held_out_prompts(numbered(range(8, 14)))  # the rows 4, 0 and 1 again
    assert held_out["tokens"].equal(data.rows([8, 9, 0, 1, 2, 3])["tokens"])


class TwoParts(Across):
    """Sums over this part and another, whose sums are computed first."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []
        self.other: list[torch.Tensor] | None = None

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        self.seen.append(values)
        return values if self.other is None else values + self.other[len(self.seen) - 1]


def over_two_parts(function: Any, rows: TensorDict, cut: int, *arguments: Any) -> dict[str, float]:
    """Return a function's metrics on the second of two ranks."""
    first, second = TwoParts(), TwoParts()
    function(rows[:cut], first, *arguments)
    second.other = first.seen
    return function(rows[cut:], second, *arguments)


WIDTH, LENGTHS, COUNTED = 6, [4, 6, 1, 3, 2, 5, 6, 4], 6


def scored_rows() -> TensorDict:
    generator = torch.Generator().manual_seed(1)
    mask = torch.rand(8, WIDTH, generator=generator) < 0.8
    mask[:, 0] = True
    columns: dict[str, Any] = {
        "log_probs": -2 * torch.rand(8, WIDTH, generator=generator),
        "ref_log_probs": -2 * torch.rand(8, WIDTH, generator=generator),
        "prompt_lengths": torch.arange(1, 9),
        "response_lengths": torch.tensor(LENGTHS),
        "response_mask": mask,
        ROW_NUMBERS: torch.arange(8),
    }
    return TensorDict(columns, batch_size=[8])


def test_metrics_of_a_batch_and_of_held_out_rows_against_loops() -> None:
    rows = scored_rows()
    trained = [[bool(rows["response_mask"][row, place]) for place in range(LENGTHS[row])] for row in range(8)]
    tokens = sum(map(sum, trained))
    expected = {
        "rollout/tokens": sum(range(1, 9)) + sum(LENGTHS),
        "rollout/trained_tokens": tokens,
        "rollout/response_tokens_mean": sum(LENGTHS) / 8,
    }
    assert batch_metrics(rows, ONE_PROCESS) == expected
    assert over_two_parts(batch_metrics, rows, 3) == expected

    kept = [
        float(rows["log_probs"][row, place])
        for row in range(COUNTED)
        for place in range(LENGTHS[row])
        if trained[row][place]
    ]
    loss = -math.fsum(kept) / len(kept)
    told = {
        "eval/loss": pytest.approx(loss, rel=1e-6),
        "eval/perplexity": pytest.approx(math.exp(loss), rel=1e-6),
    }
    assert held_out_loss(rows, ONE_PROCESS, COUNTED) == told
    assert over_two_parts(held_out_loss, rows, 4, COUNTED) == told


@pytest.mark.parametrize("loss", ["preference_loss", "ipo_loss"])
def test_held_out_preferences_against_loops(loss: str) -> None:
    rows, beta = scored_rows(), 0.4
    algorithm = Dpo(beta=beta, loss=f"hybridengine.algorithms.losses.dpo:{loss}")

    def gain(row: int) -> float:
        places = [place for place in range(LENGTHS[row]) if rows["response_mask"][row, place]]
        return beta * math.fsum(
            float(rows["log_probs"][row, place]) - float(rows["ref_log_probs"][row, place])
            for place in places
        )

    pairs = [(gain(row), gain(row + 1)) for row in range(0, COUNTED, 2)]
    margins = [better - worse for better, worse in pairs]
    plain = {
        "preference_loss": lambda margin: math.log(1 + math.exp(-margin)),
        "ipo_loss": lambda margin: (margin / beta - 1 / (2 * beta)) ** 2,
    }[loss]
    expected = {
        "eval/loss": math.fsum(map(plain, margins)) / 3,
        "eval/accuracy": sum(margin > 0 for margin in margins) / 3,
        "eval/margin": math.fsum(margins) / 3,
        "eval/chosen_reward": math.fsum(better for better, _ in pairs) / 3,
        "eval/rejected_reward": math.fsum(worse for _, worse in pairs) / 3,
    }
    for found in (
        held_out_preferences(rows, ONE_PROCESS, algorithm, COUNTED),
        over_two_parts(held_out_preferences, rows, 4, algorithm, COUNTED),
    ):
        assert found == pytest.approx(expected, rel=1e-5)


def test_the_best_checkpoint_has_the_lowest_loss(tmp_path: Path) -> None:
    assert load_config(ROOT / "configs/grpo.yaml").checkpoint.best == "eval/score_mean"
    assert load_config(SFT, ["checkpoint.best=eval/perplexity"]).checkpoint.best == "eval/perplexity"
    config = load_config(SFT)
    assert config.checkpoint.best == "eval/loss"
    assert load_config(SFT, ["checkpoint.keep=3"]).checkpoint.best == "eval/loss"
    said: list[str] = []
    progress = Progress()
    roles: Any = type("Roles", (), {"actor": None})()
    saver = RunSaver(config, roles, progress, said.append)
    for step, loss in enumerate([2.0, 1.5, 1.7], start=1):
        progress.step = step
        saver._rate({"eval/loss": loss})
    assert (progress.best.step, progress.best.value, said) == (2, 1.5, [])

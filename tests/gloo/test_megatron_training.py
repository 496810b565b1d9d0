"""Training with the distributed optimizer on every layout, compared with plain PyTorch in one process."""

from __future__ import annotations

import dataclasses
import math
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from hybridengine.backends.megatron import compat
from hybridengine.backends.megatron.weights import load_weights, save_weights
from hybridengine.backends.predictions import Predictions
from hybridengine.config.role_sections import MegatronSettings, OptimizerSection
from hybridengine.models.shapes import ModelShape
from hybridengine.topology.grid import Grid, RankOrder
from hybridengine.topology.sizes import TrainSizes
from hybridengine.weights.process_groups import ProcessGroups
from tests.gloo import training_reference as reference
from tests.gloo.checkpoint_ranks import differing, state_of
from tests.gloo.megatron_training import copy_weights, loss_of, make_trainer, mean_loss, same_weights, step
from tests.gloo.ranks import RankLauncher
from tests.gloo.tiny_models import write_model

NUM_STEPS = 3
LAYOUTS_BY_NUM_RANKS = {
    1: [("1-1-1", RankOrder.PAPER)],
    4: [
        ("2-2-1", RankOrder.PAPER),
        ("1-1-4", RankOrder.PAPER),
        ("1-2-2", RankOrder.PAPER),
        ("2-1-2", RankOrder.MEGATRON),
        ("1-1-1 c=4", RankOrder.PAPER),
        ("1-2-1 c=2", RankOrder.MEGATRON),
        ("2-1-1 c=2", RankOrder.PAPER),
        ("2-2-1 v=2", RankOrder.PAPER),
        ("2-1-1 c=2 v=2", RankOrder.MEGATRON),
    ],
}
"""One rank, every pair of axes, and the largest number of replicas."""
CUT = {4: LAYOUTS_BY_NUM_RANKS[4][::3]}
"""Layouts that cut layers, for a model's first and last stage."""
MODELS = {
    "qwen2-untied": {"family": "qwen2", "tied": False},
    "qwen3-tied": {"family": "qwen3", "tied": True},
    "llama-value-head": {"family": "llama", "num_labels": 1},
    "gemma3-tied": {"family": "gemma3_text", "tied": True},
    "glm4-untied": {"family": "glm4", "tied": False},
    "granite-tied": {"family": "granite", "tied": True},
}

Records = list[tuple[float, float, list[tuple[float, int]]]]


def train_and_export(
    rank: int, folder: Path, layouts: list[tuple[str, RankOrder]], exports: Path
) -> list[tuple[int, int, Records]]:
    """Return for every layout (data-parallel rank, tensor-parallel rank, records of its steps)."""
    registry = ProcessGroups()
    shape = ModelShape.from_folder(folder)
    outcomes = []
    for sizes, order in layouts:
        grid = Grid(TrainSizes.parse(sizes), order)
        trainer = make_trainer(shape, grid, rank, registry, folder)
        records = [step(trainer, index) for index in range(NUM_STEPS)]
        place = grid.coordinate(rank)
        outcomes.append((place.dp_rank, place.tp_rank, records))
        save_weights(trainer, registry, exports / f"{sizes}-{order.name}")
    return outcomes


def assert_steps(
    label: str, expected: list[reference.Step], outcomes: list[tuple[int, int, Records]]
) -> None:
    for index, figures in enumerate(expected):
        collected: dict[int, list[tuple[float, int]]] = {}
        for dp_rank, tp_rank, records in outcomes:
            grad_norm, lr, losses = records[index]
            assert grad_norm == pytest.approx(figures.grad_norm, rel=1e-4), f"{label}, step {index}"
            assert lr == pytest.approx(figures.lr, rel=1e-9)
            if losses and tp_rank == 0:
                collected[dp_rank] = losses
        total = sum(loss for losses in collected.values() for loss, _ in losses)
        count = sum(count for losses in collected.values() for _, count in losses)
        assert total / count == pytest.approx(figures.loss, rel=1e-5), f"{label}, step {index}"


@pytest.mark.parametrize("model_name", MODELS)
def test_three_steps_equal_plain_pytorch(model_name: str, tmp_path: Path, run_ranks: RankLauncher):
    folder = tmp_path / "source"
    model = write_model(folder, **MODELS[model_name], num_hidden_layers=5)  # type: ignore[arg-type]
    before = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
    loss = reference.value_loss if "num_labels" in MODELS[model_name] else reference.language_loss
    expected = reference.train(model, loss, NUM_STEPS)
    assert all(figures.grad_norm > reference.CLIP_GRAD for figures in expected), "clipping takes part"
    weights = model.state_dict()
    windowed = bool(ModelShape.from_folder(folder).windows)
    for num_ranks, layouts in (LAYOUTS_BY_NUM_RANKS if model_name == "qwen2-untied" else CUT).items():
        layouts = [(sizes, order) for sizes, order in layouts if not windowed or "c=" not in sizes]
        by_rank = run_ranks(num_ranks, train_and_export, folder, layouts, tmp_path)
        for index, (sizes, order) in enumerate(layouts):
            label = f"{sizes}-{order.name}"
            assert_steps(label, expected, [outcomes[index] for outcomes in by_rank])
            trained = load_file(tmp_path / label / "model.safetensors")
            assert trained.keys() == before.keys()
            for name, tensor in trained.items():
                worst = (tensor - weights[name]).abs().max().item()
                assert worst < 3e-5, f"{label}: {name} differs by {worst}"
                assert (tensor - before[name]).abs().max() > 3e-3, f"{name} was trained"


FEATURES = (
    MegatronSettings(sequence_parallel=False, overlap_reduction=False),
    MegatronSettings(recompute="selective"),
    MegatronSettings(recompute="full"),
)


SIZES = ("1-2-1 c=2", "2-2-1 v=2", "2-1-2 v=2")


def train_with_features(rank: int, folder: Path) -> list[tuple[Records, list[tuple[int, int]]]]:
    """Return for each size and features the records of steps, and (reductions that the backward pass started, all)."""
    registry, shape, found = ProcessGroups(), ModelShape.from_folder(folder), []
    compat.REDUCTION_ELEMENTS = 10_000
    start, started = compat.start_reductions, list[tuple[int, int]]()

    def start_and_count(replicated: list[Any]) -> None:
        groups = [group for chunk in replicated for group in chunk.bucket_groups]
        started.append((sum(group.grad_reduce_handle is not None for group in groups), len(groups)))
        start(replicated)

    compat.start_reductions = start_and_count  # type: ignore[assignment]
    for sizes in SIZES:
        for features in FEATURES:
            grid = Grid(TrainSizes.parse(sizes))
            trainer = make_trainer(shape, grid, rank, registry, folder, features=features)
            found.append(([step(trainer, index) for index in range(NUM_STEPS)], started[-NUM_STEPS:]))
    return found


@pytest.mark.parametrize("model_name", ["qwen3-tied", "llama-value-head"])
def test_no_feature_changes_the_steps(model_name: str, tmp_path: Path, run_ranks: RankLauncher):
    model = write_model(tmp_path, **MODELS[model_name], num_hidden_layers=4)  # type: ignore[arg-type]
    loss = reference.value_loss if "num_labels" in MODELS[model_name] else reference.language_loss
    expected = reference.train(model, loss, NUM_STEPS)
    for outcomes in run_ranks(4, train_with_features, tmp_path):
        for (sizes, features), (records, started) in zip(product(SIZES, FEATURES), outcomes, strict=True):
            for (norm, _, losses), figures in zip(records, expected, strict=True):
                assert norm == pytest.approx(figures.grad_norm, rel=1e-4), (sizes, features)
                if losses and TrainSizes.parse(sizes).dp_size == 1:
                    assert mean_loss(losses) == pytest.approx(figures.loss, rel=1e-5)
            overlaps = features.overlap_reduction and sizes != "2-2-1 v=2"
            assert min(total for _, total in started) > 2
            # Megatron-core learns in the first step which gradients to wait for.
            assert [count for count, _ in started] == [
                0,
                *[total if overlaps else 0 for _, total in started[1:]],
            ]


def train_new_value_head(rank: int, folder: Path) -> list[float]:
    """Return the mean losses of a few steps on one batch, with a score head that the checkpoint lacks."""
    shape = dataclasses.replace(ModelShape.from_folder(folder), tied_embeddings=False, num_labels=1)
    settings = OptimizerSection(lr=5e-3)
    trainer = make_trainer(shape, Grid(TrainSizes(2, 2, 1)), rank, ProcessGroups(), folder, settings=settings)
    return [mean_loss(step(trainer, 0)[2]) for _ in range(8)]


def test_a_value_head_starts_at_zero_on_a_language_model_and_learns(tmp_path: Path, run_ranks: RankLauncher):
    write_model(tmp_path, "qwen3", tied=True)
    losses = run_ranks(4, train_new_value_head, tmp_path)[-1]
    batch = reference.make_batch(0)
    targets = batch["targets"][reference.token_mask(batch, 0)]
    assert losses[0] == pytest.approx(targets.square().mean().item(), rel=1e-5)  # all values are zero
    assert losses[-1] < 0.7 * losses[0]


def train_in_bfloat16(rank: int, folder: Path) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Return the losses, and the weights before and after, of steps that are smaller than bfloat16 can resolve."""
    settings = OptimizerSection(lr=5e-4)
    grid = Grid(TrainSizes(2, 2, 1))
    shape = ModelShape.from_folder(folder)
    trainer = make_trainer(shape, grid, rank, ProcessGroups(), folder, "bfloat16", settings)
    before = copy_weights(trainer)
    losses = [mean_loss(step(trainer, 0)[2]) for _ in range(12)]
    return losses, before, copy_weights(trainer)


def test_bfloat16_trains_with_float32_master_weights(tmp_path: Path, run_ranks: RankLauncher):
    write_model(tmp_path, "qwen2", tied=False, dtype="bfloat16")
    by_rank = run_ranks(4, train_in_bfloat16, tmp_path)
    losses = by_rank[-1][0]
    assert losses[-1] < losses[0] - 0.1
    # A step of 5e-4 is less than half of the distance between bfloat16 numbers above 0.5: weights there can only move
    # because their float32 copies accumulate many steps.
    moved = 0
    for _, before, after in by_rank:
        for name, tensor in before.items():
            assert after[name].dtype == torch.bfloat16
            moved += int(((tensor.abs() > 0.5) & (tensor != after[name])).sum())
    assert moved > 100


def train_on_schedules(rank: int, folder: Path, schedules: list[OptimizerSection]) -> list[list[float]]:
    shape, registry, grid = ModelShape.from_folder(folder), ProcessGroups(), Grid(TrainSizes(1, 1, 1))
    trainer = make_trainer(shape, grid, rank, registry, folder)
    rates = []
    for settings in schedules:
        trainer.start_optimizer(settings, decay_steps=6)
        rates.append([step(trainer, 0)[1] for _ in range(7)])
    return rates


def test_learning_rate_schedules(tmp_path: Path, run_ranks: RankLauncher):
    write_model(tmp_path, "llama", num_hidden_layers=1)
    shape = {"lr": 1e-3, "min_lr": 1e-4, "warmup_steps": 2}
    schedules = [OptimizerSection(schedule=name, **shape) for name in ("constant", "linear", "cosine")]  # type: ignore[arg-type]
    constant, linear, cosine = run_ranks(1, train_on_schedules, tmp_path, schedules)[0]
    left = [1.0, 0.75, 0.5, 0.25, 0.0]  # of the decay, after the warm-up
    assert constant == pytest.approx([0.0, 5e-4] + [1e-3] * 5)
    assert linear == pytest.approx([0.0, 5e-4] + [1e-4 + 9e-4 * part for part in left])
    assert cosine == pytest.approx(
        [0.0, 5e-4] + [1e-4 + 4.5e-4 * (1 + math.cos(math.pi * (1 - part))) for part in left]
    )


def train_on_a_bad_row(rank: int, folder: Path, clip_grad: float) -> tuple[bool, float, list[str], bool]:
    """Return (skipped, its gradient norm, differences from before, True if the next steps equal those without it)."""
    shape, grid, registry = ModelShape.from_folder(folder), Grid(TrainSizes(2, 1, 2)), ProcessGroups()
    settings = OptimizerSection(lr=1e-2, clip_grad=clip_grad, schedule="linear")
    trainer, undisturbed = (
        make_trainer(shape, grid, rank, registry, folder, settings=settings, decay_steps=5) for _ in "12"
    )
    for one in (trainer, undisturbed):
        step(one, 0)
    before = state_of(trainer)
    good = loss_of(trainer)
    is_bad = grid.coordinate(rank).dp_rank == 1

    def bad(predictions: Predictions, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, object]:
        loss, count, collected = good(predictions, batch)
        return loss * (float("nan") if is_bad else 1.0), count, collected

    result = trainer.train_step(reference.micro_batches(0, grid.coordinate(rank).dp_rank, 2), bad)
    different = differing(before, state_of(trainer))
    for one in (trainer, undisturbed):
        step(one, 1)
    same_afterwards = not differing(state_of(undisturbed), state_of(trainer))
    return result.skipped, result.grad_norm, different, same_afterwards


@pytest.mark.parametrize("clip_grad", [1.0, 0.0])
def test_a_gradient_that_is_not_finite_is_skipped_by_all_ranks(
    clip_grad: float, tmp_path: Path, run_ranks: RankLauncher
):
    """Weights, moments and schedule are untouched, even on ranks whose own gradient is finite."""
    write_model(tmp_path, "qwen2", num_hidden_layers=2)
    for skipped, norm, different, same_afterwards in run_ranks(4, train_on_a_bad_row, tmp_path, clip_grad):
        assert skipped
        assert math.isnan(norm)
        assert not different
        assert same_afterwards


def restart_training(rank: int, folder: Path) -> list[tuple[float, float]]:
    """Return (gradient norm, learning rate) of a step after weights and optimizer were reset, and in a new trainer."""
    shape, registry, grid = ModelShape.from_folder(folder), ProcessGroups(), Grid(TrainSizes(1, 2, 1))
    reused = make_trainer(shape, grid, rank, registry, folder)
    step(reused, 0)
    load_weights(reused, folder)
    reused.start_optimizer(OptimizerSection(lr=1e-3))
    fresh = make_trainer(shape, grid, rank, registry, folder, settings=OptimizerSection(lr=1e-3))
    figures = [step(trainer, index)[:2] for index in (1, 2) for trainer in (reused, fresh)]
    assert same_weights(copy_weights(reused), copy_weights(fresh))
    return figures


def test_a_new_optimizer_starts_fresh(tmp_path: Path, run_ranks: RankLauncher):
    write_model(tmp_path, "qwen2")
    for figures in run_ranks(2, restart_training, tmp_path):
        assert figures[0] == figures[1]
        assert figures[2] == figures[3]

"""A policy's passes and steps: gradients are kept until their optimizer step, even while an engine generates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hybridengine.backends.megatron.weights import load_weights, save_weights
from hybridengine.config.role_sections import OptimizerSection
from hybridengine.errors import DataError, StorageError
from hybridengine.models.shapes import ModelShape
from hybridengine.topology.grid import Grid
from hybridengine.topology.sizes import TrainSizes
from hybridengine.weights.process_groups import ProcessGroups
from tests.gloo import training_reference as reference
from tests.gloo.megatron_training import loss_of, make_trainer
from tests.gloo.plain_generation import make_engine
from tests.gloo.ranks import RankLauncher
from tests.gloo.tiny_models import write_model

NUM_STEPS = 2
STEP_SETTINGS = [
    OptimizerSection(lr=2e-3, betas=(0.8, 0.9), eps=3e-4, weight_decay=0.5, clip_grad=0.3),
    OptimizerSection(lr=6e-3, betas=(0.6, 0.99), eps=3e-2, weight_decay=2.0, clip_grad=0.0),
    None,
]
"""Settings of consecutive steps: one that clips, one that does not, and the optimizer's own."""


def step_by_passes(rank: int, folder: Path, grid: Grid) -> list[tuple[float, list[tuple[float, int]]]]:
    """Return (gradient norm, collected losses) of steps with a pass for each micro-batch and a switch after each pass."""
    trainer = make_trainer(ModelShape.from_folder(folder), grid, rank, ProcessGroups(), folder)
    engine, _ = make_engine(trainer, "1-1", ProcessGroups(), 40_000)
    whole, records = sum(trainer._gradient_bytes), []
    dp_rank, dp_size = grid.coordinate(rank).dp_rank, grid.sizes.dp_size
    for index in range(NUM_STEPS):
        with pytest.raises(DataError, match="no micro-batches; give every replica"):
            trainer.forward_backward([], loss_of(trainer))
        with pytest.raises(StorageError, match="call forward_backward before"):
            trainer.optimizer_step()
        with engine.generating() as report:
            assert report.gradient_bytes == trainer.gradient_bytes == 0
        collected = []
        for batch in reference.micro_batches(index, dp_rank, dp_size):
            collected += trainer.forward_backward([batch], loss_of(trainer))
            with engine.generating() as report:
                assert report.gradient_bytes == trainer.gradient_bytes == whole > 0
        assert trainer.version == index
        result = trainer.optimizer_step()
        records.append((result.grad_norm, collected))
    return records


def step_after_a_failure(rank: int, folder: Path) -> tuple[float, float]:
    """Return the gradient norms of the same pass, alone and after passes of which one has raised."""
    trainer = make_trainer(
        ModelShape.from_folder(folder), Grid(TrainSizes(1, 1, 1)), rank, ProcessGroups(), folder
    )
    first, second, third, *_ = reference.micro_batches(0, 0, 1)
    loss, num_calls = loss_of(trainer), 0

    def failing(output: Any, batch: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 2:
            raise ValueError("a loss of somebody's own")
        return loss(output, batch)

    trainer.forward_backward([first], loss)
    with pytest.raises(ValueError, match="somebody's own"):
        trainer.forward_backward([second, third], failing)
    with pytest.raises(StorageError, match="call forward_backward before"):
        trainer.optimizer_step()
    trainer.leave_training()
    assert trainer.gradient_bytes == 0
    trainer.forward_backward([third], loss)  # which enters training
    after = trainer.optimizer_step().grad_norm
    load_weights(trainer, folder)
    trainer.restart_optimizer()
    trainer.forward_backward([third], loss)
    alone = trainer.optimizer_step().grad_norm
    engine, _ = make_engine(trainer, "1-1", ProcessGroups(), 40_000)
    with engine.generating(), pytest.raises(StorageError, match="no weights in generation mode"):
        load_weights(trainer, folder)
    return after, alone


def test_a_pass_that_raises_leaves_nothing_behind(tmp_path: Path, run_ranks: RankLauncher):
    write_model(tmp_path, "qwen3", tied=True)
    ((after, alone),) = run_ranks(1, step_after_a_failure, tmp_path)
    assert after == alone > 0


@pytest.mark.parametrize("sizes", ["2-1-2", "1-2-2"])
def test_passes_add_up_to_the_step_of_plain_pytorch(sizes: str, tmp_path: Path, run_ranks: RankLauncher):
    """Replicas take two and three passes; gradient norms and losses equal those of one process on the whole batch."""
    model = write_model(tmp_path, "qwen3", tied=True)
    expected = reference.train(model, reference.language_loss, NUM_STEPS)
    grid = Grid(TrainSizes.parse(sizes))
    by_rank = run_ranks(4, step_by_passes, tmp_path, grid)
    last = grid.sizes.pp_size - 1
    for index, figures in enumerate(expected):
        losses = []
        for place, records in zip(grid.coordinates(), by_rank, strict=True):
            grad_norm, collected = records[index]
            assert grad_norm == pytest.approx(figures.grad_norm, rel=1e-4)
            if (place.pp_rank, place.tp_rank) == (last, 0):
                losses += collected
        assert sum(loss for loss, _ in losses) / sum(count for _, count in losses) == pytest.approx(
            figures.loss, rel=1e-5
        )


def step_with_settings(rank: int, folder: Path, layouts: list[str], exports: Path) -> list[list[float]]:
    """Return (gradient norm, learning rate) of each of `STEP_SETTINGS` on every layout, flat."""
    records = []
    for sizes in layouts:
        registry, grid = ProcessGroups(), Grid(TrainSizes.parse(sizes))
        trainer = make_trainer(ModelShape.from_folder(folder), grid, rank, registry, folder)
        figures: list[float] = []
        for index, settings in enumerate(STEP_SETTINGS):
            batches = reference.micro_batches(index, grid.coordinate(rank).dp_rank, grid.sizes.dp_size)
            trainer.forward_backward(batches[:1], loss_of(trainer))
            trainer.drop_gradients()
            trainer.forward_backward(batches, loss_of(trainer))
            result = trainer.optimizer_step(settings, summed=settings is not None)
            figures += [result.grad_norm, result.lr]
        assert trainer.counters() == {"adam_steps": 3, "schedule_steps": 1, "version": 3}
        save_weights(trainer, registry, exports / sizes)
        records.append(figures)
    return records


def plain_steps_with_settings(model: torch.nn.Module) -> list[float]:
    """Take the steps of `step_with_settings` with torch's AdamW; vectors have no weight decay, as in Megatron-core."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    optimizer = torch.optim.AdamW([{"params": matrices}, {"params": vectors}])
    own = OptimizerSection(
        lr=reference.LR,
        betas=reference.BETAS,
        eps=reference.EPS,
        weight_decay=reference.WEIGHT_DECAY,
        clip_grad=reference.CLIP_GRAD,
    )
    figures = []
    for index, settings in enumerate(STEP_SETTINGS):
        used = settings or own
        for group, decay in zip(optimizer.param_groups, (used.weight_decay, 0.0), strict=True):
            group |= {"lr": used.lr, "betas": used.betas, "eps": used.eps, "weight_decay": decay}
        optimizer.zero_grad()
        loss, count = reference.language_loss(model, reference.make_batch(index))
        (loss * (count if settings else 1)).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), used.clip_grad or float("inf"))
        optimizer.step()
        figures += [norm.item(), used.lr]
    return figures


def test_settings_of_a_step_are_its_own(tmp_path: Path, run_ranks: RankLauncher):
    """Steps with settings equal torch's on summed gradients; the next step has the optimizer's own, and lr of step 0."""
    model = write_model(tmp_path / "source", "qwen3", tied=True)
    expected = plain_steps_with_settings(model.double())
    assert expected[0] > 1, "clipping takes part"
    weights = model.state_dict()
    for num_ranks, layouts in {1: ["1-1-1"], 4: ["2-2-1", "1-2-2", "1-1-4"]}.items():
        by_rank = run_ranks(num_ranks, step_with_settings, tmp_path / "source", layouts, tmp_path)
        for number, sizes in enumerate(layouts):
            for records in by_rank:
                assert records[number] == pytest.approx(expected, rel=1e-4), sizes
            for name, tensor in load_file(tmp_path / sizes / "model.safetensors").items():
                worst = (tensor - weights[name]).abs().max().item()
                assert worst < 3e-4, (
                    f"{sizes}: {name} differs by {worst}"
                )  # float32 moves as much from float64

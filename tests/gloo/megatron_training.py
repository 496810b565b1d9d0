"""Runs on each rank of the training tests: losses for Megatron's outputs, a trainer as the reference, and its steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hybridengine.backends.megatron.groups import initialize_globals
from hybridengine.backends.megatron.trainer import MegatronModel, MegatronTrainer
from hybridengine.backends.megatron.weights import load_weights
from hybridengine.backends.policy import LossFunction
from hybridengine.backends.predictions import Predictions
from hybridengine.config.role_sections import MegatronSettings, OptimizerSection
from hybridengine.models.shapes import ModelShape
from hybridengine.topology.grid import Grid
from hybridengine.topology.sizes import TrainSizes
from hybridengine.weights.process_groups import ProcessGroups
from tests.gloo import training_reference as reference

SETTINGS = OptimizerSection(
    lr=reference.LR,
    min_lr=reference.MIN_LR,
    schedule="cosine",
    weight_decay=reference.WEIGHT_DECAY,
    betas=reference.BETAS,
    eps=reference.EPS,
    clip_grad=reference.CLIP_GRAD,
)


def make_trainer(
    shape: ModelShape,
    grid: Grid,
    rank: int,
    registry: ProcessGroups,
    folder: Path,
    dtype: str = "float32",
    settings: OptimizerSection = SETTINGS,
    decay_steps: int = reference.DECAY_STEPS,
    features: MegatronSettings = MegatronSettings(),
) -> MegatronTrainer:
    """Return a trainer with the weights of `folder` and a fresh optimizer."""
    initialize_globals(1)
    trainer = MegatronTrainer(shape, grid, rank, registry, dtype, settings=features)
    load_weights(trainer, folder)
    trainer.start_optimizer(settings, decay_steps)
    return trainer


def loss_of(trainer: MegatronTrainer) -> LossFunction:
    """Return the reference's loss as a sum over tokens; it collects (sum of the loss, number of tokens)."""

    def language(
        predictions: Predictions, batch: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor, tuple[float, int]]:
        log_probs, _ = predictions[:, :-1].log_probs(batch["tokens"][:, 1:])
        return _summed(-log_probs, reference.token_mask(batch, 1))

    def value(scores: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, tuple[float, int]]:
        return _summed((scores[..., 0] - batch["targets"]).square(), reference.token_mask(batch, 0))

    return value if trainer.shape.num_labels else language


def _summed(per_token: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, tuple[float, int]]:
    loss = (per_token * mask).sum()
    return loss, mask.sum().int(), (loss.item(), int(mask.sum()))


def step(trainer: MegatronTrainer, index: int) -> tuple[float, float, list[tuple[float, int]]]:
    """Take one optimizer step on this rank's rows of batch `index`; return (gradient norm, learning rate, losses)."""
    place = trainer.grid.coordinate(trainer.rank)
    batches = reference.micro_batches(index, place.dp_rank, trainer.grid.sizes.dp_size)
    result = trainer.train_step(batches, loss_of(trainer))
    return result.grad_norm, result.lr, result.collected


def mean_loss(collected: list[tuple[float, int]]) -> float:
    """Return the mean over all tokens of what `step` has collected."""
    return sum(loss for loss, _ in collected) / max(1, sum(count for _, count in collected))


def copy_weights(model: MegatronModel) -> dict[str, Tensor]:
    return {name: model.weights[name].clone() for name in model.weights.names}


def same_weights(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Return True if the weights are bitwise equal."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


Outcome = tuple[float, float | None]
"""Gradient norm of a step, and its mean loss on this replica; None except on the last stage."""


def train_at_sizes(
    rank: int, folder: Path, sizes: Sequence[TrainSizes], num_steps: int
) -> list[list[Outcome]]:
    """Return the outcome of each step at each size, from the checkpoint `folder`."""
    registry, shape, found = ProcessGroups(), ModelShape.from_folder(folder), []
    for one in sizes:
        trainer = make_trainer(shape, Grid(one), rank, registry, folder)
        records = [step(trainer, index) for index in range(num_steps)]
        found.append([(norm, mean_loss(losses) if losses else None) for norm, _, losses in records])
    return found


def check_steps(
    by_rank: Sequence[list[list[Outcome]]], sizes: Sequence[TrainSizes], expected: Sequence[reference.Step]
) -> None:
    """Assert that gradient norms of all steps at all sizes are the reference's, and losses where one replica has them."""
    for index, one in enumerate(sizes):
        for number, figures in enumerate(expected):
            norms = [outcomes[index][number][0] for outcomes in by_rank]
            assert norms == pytest.approx([figures.grad_norm] * len(norms), rel=1e-4), f"{one}, step {number}"
            if one.dp_size == 1:
                losses = [loss for outcomes in by_rank if (loss := outcomes[index][number][1]) is not None]
                assert losses and max(abs(loss - figures.loss) for loss in losses) < 1e-5 * figures.loss, one

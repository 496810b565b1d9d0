"""Runs on each rank of the training tests: losses for Megatron's outputs, a trainer with the reference's settings."""

from __future__ import annotations

from pathlib import Path

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

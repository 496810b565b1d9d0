"""Two ranks on one GPU train one model: context ranks share the tokens of a row, virtual stages the layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from hybridengine.backends.megatron.model import available_names
from hybridengine.backends.megatron.trainer import MegatronTrainer
from hybridengine.backends.megatron.weights import load_weights
from hybridengine.config.role_sections import OptimizerSection
from hybridengine.families.family import NameSet
from hybridengine.models.shapes import ModelShape
from hybridengine.topology.grid import Grid
from hybridengine.topology.sizes import TrainSizes
from tests.gloo.tiny_models import write_model
from tests.gpu import one_device
from tests.gpu.host_transport import messages_through_host
from tests.gpu.test_training import MODEL
from tests.gpu.test_two_ranks import BACKEND

pytestmark = pytest.mark.gpu

SIZES = ("1-1-1 c=2", "2-1-1 v=2")
NUM_STEPS, NUM_LAYERS = 3, 4
PROMPT_TOKENS, RESPONSE_TOKENS, MICRO_BATCH_TOKENS = 7, (90, 41, 66, 23, 58, 90, 12, 35), 160
OPTIMIZER = OptimizerSection(lr=1e-4)
"""Steps so small that differences of one do not grow in the next."""
LOSS_WITHIN, NORM_WITHIN = 3e-3, 1e-2
"""Largest relative differences in bfloat16, where one rounding changes a value by 4e-3 at most. A mean over hundreds of
tokens differs less; in the norm of a gradient, roundings of several layers meet."""


@dataclass(frozen=True)
class Trained:
    names: str
    """Name set of Megatron's layers."""
    losses: list[float]
    """Mean loss of each step; NaN on a stage without losses."""
    grad_norms: list[float]


def train(rank: int, folder: Path, layouts: Sequence[str], dtype: str) -> list[Trained]:
    """Take the same steps in each layout, on rows of different lengths, in several micro-batches."""
    _, registry = one_device.begin(rank)
    shape, names = ModelShape.from_folder(folder), available_names()
    whole = one_device.make_prompts(
        len(RESPONSE_TOKENS), PROMPT_TOKENS + max(RESPONSE_TOKENS), shape.vocab_size
    )
    ends = [PROMPT_TOKENS + length for length in RESPONSE_TOKENS]
    rows = one_device.rows_of(
        [row[:PROMPT_TOKENS] for row in whole],
        [row[PROMPT_TOKENS:end] for row, end in zip(whole, ends, strict=True)],
    )
    found = []
    for sizes in layouts:
        with messages_through_host():
            trainer = MegatronTrainer(shape, Grid(TrainSizes.parse(sizes)), rank, registry, dtype, names)
            load_weights(trainer, folder)
            trainer.start_optimizer(OPTIMIZER)
            steps = [one_device.step(trainer, rows, MICRO_BATCH_TOKENS) for _ in range(NUM_STEPS)]
        losses, norms = [one_device.mean_loss(one) for one in steps], [one.grad_norm for one in steps]
        found.append(Trained(names.name, losses, norms))
    return found


def check_equal(alone: Trained, ranks: Sequence[Trained], loss_within: float, norm_within: float) -> None:
    """Assert that the ranks took the steps of one process."""
    assert alone.losses[-1] < alone.losses[0]
    assert ranks[-1].losses == pytest.approx(alone.losses, rel=loss_within)
    for one in ranks:
        assert one.grad_norms == pytest.approx(alone.grad_norms, rel=norm_within)


def write_layers(folder: Path, dtype: str) -> None:
    """Write a model whose weights are so large that its attention matters."""
    write_model(folder, "qwen3", dtype=dtype, **MODEL, num_hidden_layers=NUM_LAYERS)


def test_ranks_that_share_a_model_take_the_steps_of_one(on_device, folder, note):
    """Passes if two processes on the GPU, with the tokens of each row divided over them (c = 2) by Transformer
    Engine's attention, and with two blocks of layers each in turn (p = 2, v = 2), have the losses and the gradient
    norms of one process over three steps, within the rounding of bfloat16."""
    write_layers(folder, "bfloat16")
    [[alone]] = on_device(1, train, folder, ["1-1-1"], "bfloat16")
    assert alone.names == NameSet.TRANSFORMER_ENGINE.name
    by_rank = on_device(2, train, folder, SIZES, "bfloat16", backend=BACKEND)
    for sizes, ranks in zip(SIZES, zip(*by_rank, strict=True), strict=True):
        norms = zip(ranks[-1].grad_norms, alone.grad_norms, strict=True)
        note(f"{sizes}: gradient norms differ by {max(abs(one / other - 1) for one, other in norms):.2g}")
        check_equal(alone, ranks, LOSS_WITHIN, NORM_WITHIN)

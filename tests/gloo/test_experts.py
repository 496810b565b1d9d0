"""Training of mixtures of experts at combinations of parallel sizes, compared with transformers in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hybridengine.models.shapes import ModelShape
from hybridengine.topology.grid import Grid
from hybridengine.topology.sizes import TrainSizes
from hybridengine.weights.process_groups import ProcessGroups
from tests.gloo import training_reference as reference
from tests.gloo.megatron_training import make_trainer, mean_loss, step
from tests.gloo.ranks import RankLauncher
from tests.gloo.tiny_models import write_model

NUM_STEPS = 5
EXPERTS: dict[str, Any] = {
    "num_hidden_layers": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
}
SIZES = {
    1: ("1-1-1",),
    2: ("1-1-2 e=2", "1-2-1 e=2 etp=1", "1-2-1", "1-2-1 etp=1", "1-1-2", "2-1-1", "1-1-1 c=2 e=2", "1-1-2 etp=2"),
}


def train_at_sizes(
    rank: int, folder: Path, sizes: tuple[str, ...]
) -> list[list[tuple[float, float | None]]]:
    """Return (gradient norm, mean loss of this replica on the last stage) of each step at each size."""
    registry, shape, found = ProcessGroups(), ModelShape.from_folder(folder), []
    for text in sizes:
        trainer = make_trainer(shape, Grid(TrainSizes.parse(text)), rank, registry, folder)
        records = [step(trainer, index) for index in range(NUM_STEPS)]
        found.append([(norm, mean_loss(losses) if losses else None) for norm, _, losses in records])
    return found


@pytest.mark.parametrize("num_ranks", SIZES)
def test_steps_of_a_mixture_equal_plain_pytorch(num_ranks: int, tmp_path: Path, run_ranks: RankLauncher):
    model = write_model(tmp_path, "qwen3_moe", **EXPERTS)
    expected = reference.train(model, reference.language_loss, NUM_STEPS)
    by_rank = run_ranks(num_ranks, train_at_sizes, tmp_path, SIZES[num_ranks])
    for index, text in enumerate(SIZES[num_ranks]):
        for number, figures in enumerate(expected):
            norms = [outcomes[index][number][0] for outcomes in by_rank]
            assert norms == pytest.approx([figures.grad_norm] * num_ranks, rel=1e-4), f"{text}, step {number}"
            if TrainSizes.parse(text).dp_size == 1:
                losses = {outcomes[index][number][1] for outcomes in by_rank} - {None}
                assert losses and max(abs(loss - figures.loss) for loss in losses) < 1e-5 * figures.loss, text

"""Steps at every combination of parallel sizes up to 8 ranks, compared with plain PyTorch in one process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import product
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

NUM_LAYERS, NUM_HEADS = 8, 8
NUM_STEPS = {2: 5, 4: 5, 8: 5 if os.environ.get("EVERY_SIZE") else 1}
"""Number of ranks -> optimizer steps; five with 8 ranks take four minutes, with EVERY_SIZE=1 in the environment."""


def every_size(num_ranks: int) -> Iterator[TrainSizes]:
    """Yield all sizes of a model of 8 layers and 8 heads, with up to two virtual stages, on this number of ranks."""
    degrees = [degree for degree in (1, 2, 4, 8) if degree <= num_ranks]
    for p, t, d, c in product(degrees, repeat=4):
        if p * t * d * c == num_ranks:
            yield TrainSizes(p, t, d, c)
            if 1 < p <= NUM_LAYERS // 2:
                yield TrainSizes(p, t, d, c, virtual_stages=2)


def train_at_every_size(rank: int, folder: Path, num_ranks: int) -> list[list[tuple[float, float | None]]]:
    """Return (gradient norm, mean loss of this replica on the last stage) of each step at each size."""
    registry, shape, found = ProcessGroups(), ModelShape.from_folder(folder), []
    for sizes in every_size(num_ranks):
        trainer = make_trainer(shape, Grid(sizes), rank, registry, folder)
        records = [step(trainer, index) for index in range(NUM_STEPS[num_ranks])]
        found.append([(norm, mean_loss(losses) if losses else None) for norm, _, losses in records])
    return found


@pytest.mark.parametrize("num_ranks", NUM_STEPS)
def test_steps_at_every_size_equal_plain_pytorch(num_ranks: int, tmp_path: Path, run_ranks: RankLauncher):
    sizes: dict[str, Any] = {
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_HEADS,
    }
    model = write_model(tmp_path, "qwen3", tied=True, **sizes)
    expected = reference.train(model, reference.language_loss, NUM_STEPS[num_ranks])
    by_rank = run_ranks(num_ranks, train_at_every_size, tmp_path, num_ranks, timeout_s=550)
    for index, one in enumerate(every_size(num_ranks)):
        for number, figures in enumerate(expected):
            norms = [outcomes[index][number][0] for outcomes in by_rank]
            assert norms == pytest.approx([figures.grad_norm] * num_ranks, rel=1e-4), f"{one}, step {number}"
            if one.dp_size == 1:
                losses = {outcomes[index][number][1] for outcomes in by_rank} - {None}
                assert losses and max(abs(loss - figures.loss) for loss in losses) < 1e-5 * figures.loss, one

"""Steps at every combination of parallel sizes up to 8 ranks, compared with plain PyTorch in one process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from hybridengine.topology.sizes import TrainSizes
from tests.gloo import training_reference as reference
from tests.gloo.megatron_training import check_steps, train_at_sizes
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


@pytest.mark.parametrize("num_ranks", NUM_STEPS)
def test_steps_at_every_size_equal_plain_pytorch(num_ranks: int, tmp_path: Path, run_ranks: RankLauncher):
    sizes: dict[str, Any] = {
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_HEADS,
    }
    model = write_model(tmp_path, "qwen3", tied=True, **sizes)
    expected = reference.train(model, reference.language_loss, NUM_STEPS[num_ranks])
    each = list(every_size(num_ranks))
    by_rank = run_ranks(num_ranks, train_at_sizes, tmp_path, each, NUM_STEPS[num_ranks], timeout_s=550)
    check_steps(by_rank, each, expected)

"""Training of mixtures of experts at combinations of parallel sizes, compared with transformers in one process."""

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

NUM_STEPS = 5
EXPERTS: dict[str, Any] = {
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
}
FAMILIES = ("qwen3_moe", "deepseek_v3")
NUM_LAYERS, NUM_HEADS, NUM_EXPERTS = 4, 8, 8


def every_size(num_ranks: int) -> Iterator[TrainSizes]:
    """Yield all sizes of a mixture of 8 experts in 4 layers on this number of ranks, with up to two virtual stages."""
    degrees = [degree for degree in (1, 2, 4, 8) if degree <= num_ranks]
    for p, t, d, c in product(degrees, repeat=4):
        if p * t * d * c != num_ranks or p > NUM_LAYERS:
            continue
        for e, etp, v in product(degrees, degrees, (1, 2)):
            if (t * d * c) % (e * etp) == 0 and (v == 1 or 1 < p <= NUM_LAYERS // 2):
                yield TrainSizes(p, t, d, c, v, e, etp)


CHOSEN = {
    4: (
        "1-1-4 e=2",
        "1-2-2 e=2 etp=1",
        "1-2-2 e=2",
        "1-2-2 etp=1",
        "1-2-1 c=2 e=4 etp=1",
        "2-1-2 e=2 v=2",
        "2-2-1 e=2 etp=1",
        "1-1-4 e=2 etp=2",
    ),
    8: ("2-2-1 c=2 v=2 e=4 etp=1", "1-2-4 e=4", "2-1-4 e=4"),
}
"""Number of ranks -> sizes that always run; with EVERY_SIZE=1 in the environment all do, which takes half an hour."""


def sizes_of(num_ranks: int) -> list[TrainSizes]:
    if num_ranks in CHOSEN and not os.environ.get("EVERY_SIZE"):
        return [TrainSizes.parse(text) for text in CHOSEN[num_ranks]]
    return list(every_size(num_ranks))


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("family", FAMILIES)
def test_steps_of_a_mixture_equal_plain_pytorch(
    family: str, num_ranks: int, tmp_path: Path, run_ranks: RankLauncher
):
    model = write_model(tmp_path, family, **EXPERTS)
    expected = reference.train(model, reference.language_loss, NUM_STEPS)
    sizes = sizes_of(num_ranks)
    by_rank = run_ranks(num_ranks, train_at_sizes, tmp_path, sizes, NUM_STEPS, timeout_s=3600)
    check_steps(by_rank, sizes, expected)

"""Peak memory of rehearsed passes against the planner's: every recomputation with every kind of size and of layer."""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridengine.backends.megatron.groups import initialize_globals
from hybridengine.backends.megatron.trainer import MegatronTrainer
from hybridengine.backends.vllm.environment import rank_environment
from hybridengine.config.role_sections import MegatronSettings
from hybridengine.families.sizes import ExpertSizes
from hybridengine.models.shapes import ModelShape
from hybridengine.planning.costs.activations import activation_bytes
from hybridengine.planning.costs.lengths import MicroBatches
from hybridengine.rehearsal.counting import StorageCounter
from hybridengine.rehearsal.fused_layers import fused_layers
from hybridengine.rehearsal.routing import even_routes
from hybridengine.rehearsal.shapes_only import ShapesOnly
from hybridengine.rehearsal.world import rehearsed_world
from hybridengine.topology.grid import Grid
from hybridengine.topology.sizes import TrainSizes
from hybridengine.weights.process_groups import ProcessGroups

NUM_RANKS, ROWS, LENGTH, RESPONSE = 8, 4, 1024, 128
LLAMA = ModelShape("llama", 4, 256, 896, 8, 4, 32, 1024, 4096)
SHAPES = {
    "llama": LLAMA,
    "qwen2": replace(LLAMA, family="qwen2"),
    "qwen3": replace(LLAMA, family="qwen3"),
    "glm4": replace(LLAMA, family="glm4", rotary_dim=16, qkv_bias=False),
    "critic": LLAMA.with_score_head(),
    "mixture": replace(LLAMA, family="qwen3_moe", experts=ExpertSizes(16, 4, 96)),
}
MIXTURES = ("1-1-8 e=8", "1-2-4 e=4 etp=1", "1-2-4 e=2", "2-2-2 e=4 etp=1", "1-2-2 c=2 e=8 etp=1")
SIZES = ("1-1-8", "1-2-4", "1-4-2", "2-2-2", "1-2-2 c=2", "2-2-2 v=2")
CASES = [
    (shape, sizes, parallel, recompute)
    for shape, sizes in [
        *(("llama", sizes) for sizes in SIZES),
        ("qwen2", "1-2-4"),
        ("qwen3", "1-2-4"),
        ("glm4", "1-2-4"),
        ("critic", "1-2-4"),
        *(("mixture", sizes) for sizes in MIXTURES),
    ]
    for parallel in ((True, False) if shape == "llama" and sizes != "1-1-8" else (True,))
    for recompute in ("none", "selective", "full")
]
"""Shape, sizes, sequence parallelism and recomputation."""


def num_micro_batches(sizes: TrainSizes) -> int:
    """Return enough for all that may be in flight, and one more pass."""
    p = sizes.pp_size
    return 1 if p == 1 else p + 1 if sizes.virtual_stages == 1 else 2 * p


def settings_of(case: tuple[str, str, bool, str]) -> tuple[ModelShape, TrainSizes, MegatronSettings]:
    shape, sizes, parallel, recompute = case
    settings = MegatronSettings.model_validate({"sequence_parallel": parallel, "recompute": recompute})
    return SHAPES[shape], TrainSizes.parse(sizes), settings


def counted(rank: int) -> dict[tuple[str, str, bool, str], int]:
    """Return the bytes that the passes of each case need on a rank beside the state; once in a process."""
    storages = StorageCounter()
    with ExitStack() as stack:
        stack.enter_context(rehearsed_world(rank, NUM_RANKS, NUM_RANKS, lambda *_: None))
        stack.enter_context(storages.resizes_counted())
        stack.enter_context(fused_layers())
        stack.enter_context(even_routes())
        stack.enter_context(ShapesOnly([storages.observe]).active())
        initialize_globals(1)
        return {
            case: passes(rank, storages, *settings_of(case))
            for case in CASES
            if rank == 0 or TrainSizes.parse(case[1]).pp_size > 1
        }


def passes(
    rank: int, storages: StorageCounter, shape: ModelShape, sizes: TrainSizes, settings: MegatronSettings
) -> int:
    trainer = MegatronTrainer(shape, Grid(sizes), rank, ProcessGroups(), "bfloat16", settings=settings)

    def loss(outputs: Any, columns: dict[str, Tensor]) -> tuple[Tensor, Tensor, None]:
        if not shape.num_labels:
            log_probs, entropies = outputs.log_probs(columns["tokens"][:, -RESPONSE:])
            outputs = log_probs + entropies
        return outputs.sum(), torch.tensor(1, dtype=torch.int32), None

    batch = {
        "tokens": torch.zeros(ROWS, LENGTH, dtype=torch.int64),
        "positions": torch.arange(LENGTH - RESPONSE - 1, LENGTH - 1).expand(ROWS, RESPONSE),
    }
    gc.collect()  # the trainer of the case before this one has cycles
    before = storages.live_bytes
    storages.restart_peak()
    trainer.forward_backward([batch] * num_micro_batches(sizes), loss)
    return storages.peak_bytes - before


@pytest.fixture(scope="module")
def fullest() -> Iterator[dict[tuple[str, str, bool, str], int]]:
    """Most bytes of each case on the first rank of the first stage and the last one of the last stage."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in rank_environment(use_gpus=False).items():
            patch.setenv(name, value)
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=1) as pool:
            first, last = pool.map(counted, [0, NUM_RANKS - 1])
        yield {case: max(num_bytes, last.get(case, 0)) for case, num_bytes in first.items()}


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_the_planner_counts_what_a_pass_needs(
    case: tuple[str, str, bool, str], fullest: dict[tuple[str, str, bool, str], int]
):
    shape, sizes, settings = settings_of(case)
    micro = MicroBatches(num_micro_batches(sizes), ROWS * LENGTH, ROWS * RESPONSE, LENGTH)
    planned = activation_bytes(shape, sizes, "bfloat16", micro, settings, trains=True)
    assert fullest[case] == pytest.approx(planned, rel=0.05)

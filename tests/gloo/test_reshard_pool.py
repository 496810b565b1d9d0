"""Pushes of trained weights to engines in other processes: training ranks keep their weights and share the sending."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hybridengine.backends.megatron.groups import build_groups, initialize_globals
from hybridengine.backends.megatron.trainer import MegatronModel
from hybridengine.backends.megatron.weights import load_weights
from hybridengine.errors import PlanError, TopologyError
from hybridengine.models.shapes import ModelShape
from hybridengine.reshard.compiler import compile_plan
from hybridengine.reshard.layout import Layout
from hybridengine.reshard.megatron import megatron_layout
from hybridengine.reshard.vllm import vllm_layout
from hybridengine.topology.generation import GenerationGrid
from hybridengine.topology.grid import Grid, Groups
from hybridengine.topology.links import NodeMap
from hybridengine.topology.sizes import GenSizes, TrainSizes
from hybridengine.weights.executor import Verify
from hybridengine.weights.hybrid_engine import WeightPush
from hybridengine.weights.process_groups import ProcessGroups
from hybridengine.weights.storage import WeightStorage
from tests.gloo import sharding_by_hand as by_hand
from tests.gloo.counting_transport import CountingTransport
from tests.gloo.megatron_by_hand import gather_unsharded
from tests.gloo.megatron_training import copy_weights, same_weights
from tests.gloo.plain_generation import PlainGeneration
from tests.gloo.ranks import RankLauncher
from tests.gloo.tiny_models import write_model

NUM_TRAIN, NUM_GEN, NUM_PUSHES = 4, 2, 3
POOL = range(NUM_TRAIN, NUM_TRAIN + NUM_GEN)
ELEMENT_BYTES = 4


@dataclass(frozen=True)
class Pool:
    """A training layout on ranks 0 to 3, and one engine on ranks 4 and 5."""

    train: str
    gen: str
    nodes: NodeMap | None = None

    @property
    def grid(self) -> Grid:
        return Grid(TrainSizes.parse(self.train))

    def gen_layout(self, shape: ModelShape) -> Layout:
        """Return the engine's layout on the ranks of the pool."""
        sizes = GenSizes.parse(self.gen)
        alone = GenerationGrid(Grid(TrainSizes(sizes.pp_size, sizes.tp_size, 1)), sizes)
        layout = vllm_layout(shape, alone)
        keys = {POOL[rank]: key for rank, key in layout.keys.items()}
        return Layout(shape, keys, layout.shards, kind=f"{layout.kind} of a pool")

    def train_part(self, shape: ModelShape, rank: int) -> by_hand.Part:
        p, t, d = (int(size) for size in self.train.split("-"))
        pp_rank, _, tp_rank = by_hand.train_place(rank, p, t, d, "PAPER")
        return by_hand.train_part(shape, pp_rank, tp_rank, p, t)

    def gen_part(self, shape: ModelShape, rank: int) -> by_hand.Part:
        p_gen, t_gen = (int(size) for size in self.gen.split("-"))
        return by_hand.gen_part(shape, *divmod(rank - NUM_TRAIN, t_gen), p_gen, p_gen, t_gen)


POOLS = [
    Pool("2-2-1", "1-2"),
    Pool("1-2-2", "1-2"),
    Pool("1-2-2", "2-1", NodeMap((4, 2))),
    Pool("2-1-2", "1-2", NodeMap((4, 2))),
]


@dataclass(frozen=True)
class Pushed:
    """All pushes on one rank."""

    weights_equal: list[bool]
    """After each push, for an engine's rank: True if it has the slices of the whole model; for a training rank: True if
    its weights are unchanged."""
    received_bytes: list[int]
    """Bytes received in each push, counted by the ledger."""
    sent_to: Counter[int]
    live_bytes: int
    peak_bytes: int


class Onlooker(ProcessGroups):
    """Process groups that include groups without this rank."""

    def of(self, groups: Groups) -> dist.ProcessGroup:
        with contextlib.suppress(TopologyError):
            super().of(groups)
        return None  # type: ignore[return-value]  # no group for ranks outside of it


def push_three_times(rank: int, folder: Path, pool: Pool) -> Pushed:
    shape = ModelShape.from_folder(folder)
    initialize_globals(1)
    model: MegatronModel | None = None
    layout = pool.gen_layout(shape)
    if rank in POOL:
        build_groups(pool.grid, Onlooker())
        source, destination = WeightStorage({}), PlainGeneration(layout, rank, "float32").weights
        destination.release()
    else:
        model = MegatronModel(shape, pool.grid, rank, ProcessGroups())
        load_weights(model, folder)
        source, destination = model.weights, WeightStorage({})
    training, world = (
        cast(dist.ProcessGroup, dist.new_group(list(range(size))))
        for size in (NUM_TRAIN, NUM_TRAIN + NUM_GEN)
    )
    plan = compile_plan(
        megatron_layout(shape, pool.grid),
        layout,
        range(NUM_TRAIN + NUM_GEN),
        by_hand.largest_bucket(shape),
        pool.nodes,
        direct_elements=1000,
    )
    transport = CountingTransport(world)
    with pytest.raises(
        PlanError, match=r"rank 0 of .*the model has .* with shape missing"
    ):  # every rank receives the error, and none waits
        WeightPush(plan, rank, source if rank else WeightStorage({}), destination, transport, Verify.ALWAYS)
    sync = WeightPush(plan, rank, source, destination, transport, Verify.ALWAYS)
    weights_equal, received_bytes, peak_bytes = [], [], 0
    for number in range(NUM_PUSHES):
        tensors: list[dict[str, Tensor] | None] = [None]
        before: dict[str, Tensor] = {}
        if model is not None:
            for (
                name
            ) in source.names:  # as an optimizer does; Megatron's uses the whole world, including the pool
                source[name].mul_(number + 1.5)
            tensors[0], before = gather_unsharded(model, training), copy_weights(model)
        dist.broadcast_object_list(tensors, src=0)
        report = sync.push()
        received_bytes.append(report.received_bytes)
        peak_bytes = max(peak_bytes, report.peak_weight_bytes)
        if model is not None:
            weights_equal.append(same_weights(before, copy_weights(model)))
            continue
        assert tensors[0] is not None
        expected = by_hand.generation_weights(shape, tensors[0], pool.gen_part(shape, rank))
        weights_equal.append(same_weights({name: destination[name] for name in destination.names}, expected))
        for name in destination.names:  # the next push finds no remains of this one
            destination[name].fill_(torch.nan)
    live_bytes = source.live_bytes + destination.live_bytes
    return Pushed(weights_equal, received_bytes, transport.sent_to, live_bytes, peak_bytes)


@pytest.mark.parametrize("pool", POOLS, ids=lambda pool: f"{pool.train} to {pool.gen}")
def test_three_pushes_to_a_pool(pool: Pool, tmp_path: Path, run_ranks: RankLauncher):
    write_model(tmp_path, "qwen3", tied=True)
    shape = ModelShape.from_folder(tmp_path)
    by_rank = run_ranks(NUM_TRAIN + NUM_GEN, push_three_times, tmp_path, pool)
    for rank, pushed in enumerate(by_rank):
        part = pool.gen_part(shape, rank) if rank in POOL else pool.train_part(shape, rank)
        assert pushed.weights_equal == [True] * NUM_PUSHES
        received = 0
        if rank in POOL:
            masks = {tensor: by_hand.mask(shape, tensor, part) for tensor in shape.tensors}
            received = ELEMENT_BYTES * sum(int(mask.sum()) for mask in masks.values())
        assert pushed.received_bytes == [received] * NUM_PUSHES
        assert sum(other.sent_to[rank] for other in by_rank) == NUM_PUSHES * received
        stored = ELEMENT_BYTES * by_hand.num_stored(shape, part)
        assert pushed.live_bytes == stored
        assert stored <= pushed.peak_bytes <= stored + ELEMENT_BYTES * by_hand.largest_bucket(shape)
    assert_training_ranks_share_the_sending(pool, shape, by_rank[:NUM_TRAIN])


def assert_training_ranks_share_the_sending(pool: Pool, shape: ModelShape, training: list[Pushed]) -> None:
    """On one node, each pool rank gets its own copy; each element enters another node once. Replicas take turns."""
    sent = [sum(pushed.sent_to.values()) for pushed in training]
    needs = [
        [by_hand.mask(shape, tensor, pool.gen_part(shape, rank)) for rank in POOL] for tensor in shape.tensors
    ]
    num_sent = sum(
        int(np.sum(masks) if pool.nodes is None else np.logical_or(*masks).sum()) for masks in needs
    )
    assert sum(sent) == NUM_PUSHES * ELEMENT_BYTES * num_sent
    by_part: dict[by_hand.Part, list[int]] = {}
    for rank, num_bytes in enumerate(sent):
        by_part.setdefault(pool.train_part(shape, rank), []).append(num_bytes)
    largest_box = ELEMENT_BYTES * max(math.prod(size) for size in shape.tensors.values())
    for replicas in by_part.values():
        assert min(replicas) > 0
        assert max(replicas) - min(replicas) <= NUM_PUSHES * largest_box

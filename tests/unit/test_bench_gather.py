"""The building blocks of the compared methods: contributions, cuts, and values that follow from a logical index."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridengine.bench.reshard.actor import box_values, differing_parameters, fill, parameter_values
from hybridengine.bench.reshard.methods.gather_all import cuts, row_blocks
from hybridengine.errors import PlanError
from hybridengine.models.shapes import ModelShape
from hybridengine.reshard.layout import Shard
from hybridengine.reshard.megatron import megatron_layout
from hybridengine.reshard.vllm import vllm_layout
from hybridengine.topology.generation import GenerationGrid, Grouping
from hybridengine.topology.grid import Grid
from hybridengine.topology.sizes import GenSizes, TrainSizes
from hybridengine.weights.storage import WeightStorage

SHAPE = ModelShape(
    family="qwen2",
    num_layers=4,
    hidden_size=16,
    ffn_hidden_size=24,
    num_heads=4,
    num_kv_heads=4,
    head_dim=4,
    vocab_size=22,  # padded at t = 4
    max_positions=32,
)

CPU = torch.device("cpu")


def logical(name: str) -> np.ndarray:
    """Return a logical tensor whose elements are all different, and differ from those of other tensors."""
    shape = SHAPE.tensors[name]
    start = 1 + 10_000 * list(SHAPE.tensors).index(name)
    return np.arange(start, start + int(np.prod(shape))).reshape(shape)


def arrays(shard: Shard) -> dict[str, np.ndarray]:
    """Return a shard's parameters, cut out of the logical tensors; padding is -1."""
    cut = {}
    for parameter in shard.parameters:
        cut[parameter.name] = np.full(parameter.shape, -1)
        for piece in parameter.pieces:
            box = tuple(slice(*interval) for interval in piece.box)
            cut[parameter.name][tuple(slice(*interval) for interval in piece.local_box)] = logical(
                piece.tensor
            )[box]
    return cut


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.sampled_from([(1, 4, 2), (2, 2, 1), (2, 4, 1), (4, 1, 2), (1, 1, 2)]),
    num_buckets=st.integers(1, 9),
    split_replicas=st.booleans(),
    grouping=st.sampled_from(list(Grouping)),
)
def test_gathered_contributions_fill_every_destination(
    sizes: tuple[int, int, int], num_buckets: int, split_replicas: bool, grouping: Grouping
) -> None:
    """Every contribution is cut out of its owner's arrays and copied to the described places."""
    grid = Grid(TrainSizes(*sizes))
    gen = GenSizes(1, min(2, grid.sizes.tp_size))
    layout = megatron_layout(SHAPE, grid)
    destinations = vllm_layout(SHAPE, GenerationGrid(grid, gen, grouping))
    parts = grid.sizes.dp_size if split_replicas else 1
    members = list(range(grid.num_ranks)) if split_replicas else list(grid.groups("pp", "tp")[0])
    held = [arrays(layout.shard(member)) for member in members]
    gathered = []
    for index, member in enumerate(members):
        part = grid.coordinate(member).dp_rank if split_replicas else 0
        for block in row_blocks(layout.shard(member), index, part, parts, num_buckets):
            rows = held[index][block.parameter.name][block.start : block.stop]
            gathered.append((block, torch.from_numpy(rows)))
    for rank in members[:4]:
        expected = arrays(destinations.shard(rank))
        found = WeightStorage({name: torch.full(array.shape, -1) for name, array in expected.items()})
        times = WeightStorage({name: torch.zeros(array.shape) for name, array in expected.items()})
        for _, source, target in cuts(destinations.shard(rank), found, gathered):
            target.copy_(source)
        for _, _, target in cuts(destinations.shard(rank), times, gathered):
            target.add_(1)
        for name, array in expected.items():
            np.testing.assert_array_equal(found[name], array)
            np.testing.assert_array_equal(times[name], (array != -1).astype(int))


@pytest.mark.parametrize(("num_parts", "num_buckets"), [(1, 1), (1, 7), (2, 3), (3, 1), (50, 1)])
def test_parts_of_a_shard_have_every_row_once(num_parts: int, num_buckets: int) -> None:
    shard = megatron_layout(SHAPE, Grid(TrainSizes(2, 2, 1))).shard(1)
    rows: dict[str, list[int]] = {parameter.name: [] for parameter in shard.parameters}
    for part in range(num_parts):
        ends = dict.fromkeys(range(num_buckets), 0)
        for block in row_blocks(shard, 0, part, num_parts, num_buckets):
            assert block.offset == ends[block.bucket]
            ends[block.bucket] = block.end
            rows[block.parameter.name] += range(block.start, block.stop)
    assert rows == {parameter.name: list(range(parameter.shape[0])) for parameter in shard.parameters}


def test_a_gather_that_lacks_a_shard_is_refused() -> None:
    shard = megatron_layout(SHAPE, Grid(TrainSizes(1, 2, 1))).shard(0)
    whole = megatron_layout(SHAPE, Grid(TrainSizes(1, 1, 1))).shard(0)
    weights = WeightStorage({one.name: torch.empty(one.shape) for one in whole.parameters})
    gathered = [(block, torch.empty(block.shape)) for block in row_blocks(shard, 0, 0, 1, 1)]
    with pytest.raises(PlanError, match="is in no contribution; the group"):
        list(cuts(whole, weights, gathered))


def test_values_follow_from_the_logical_index_alone() -> None:
    whole = box_values("w", ((0, 12), (0, 10)), 3, CPU)
    part = box_values("w", ((5, 9), (2, 7)), 3, CPU)
    assert torch.equal(part, whole[5:9, 2:7])
    assert whole.unique().numel() == whole.numel()
    assert whole.min() >= -1 and whole.max() < 1
    for other in (box_values("w", ((0, 12), (0, 10)), 4, CPU), box_values("v", ((0, 12), (0, 10)), 3, CPU)):
        assert (other != whole).float().mean() > 0.99


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_changed_bit_and_a_missed_version_are_seen(dtype: torch.dtype) -> None:
    shard = megatron_layout(SHAPE, Grid(TrainSizes(2, 2, 1))).shard(3)
    weights = WeightStorage({p.name: torch.empty(p.shape, dtype=dtype) for p in shard.parameters})
    fill(shard, weights, version=1)
    assert differing_parameters(shard, weights, version=1) == []
    assert differing_parameters(shard, weights, version=2) == [p.name for p in shard.parameters if p.pieces]
    name = shard.parameters[2].name
    weights[name].view(torch.uint8).flatten()[7] ^= 1
    assert differing_parameters(shard, weights, version=1) == [name]


def test_padding_is_zero() -> None:
    shard = megatron_layout(SHAPE, Grid(TrainSizes(1, 4, 1))).shard(3)
    padded = [parameter for parameter in shard.parameters if parameter.has_padding]
    assert padded
    for parameter in padded:
        values = parameter_values(parameter, torch.float32, 1, CPU)
        covered = torch.zeros(parameter.shape, dtype=torch.bool)
        for piece in parameter.pieces:
            covered[tuple(slice(*interval) for interval in piece.local_box)] = True
        assert not covered.all()
        assert (values[~covered] == 0).all()

"""Weights that all methods move: one Megatron-core GPTModel per rank, filled with the values of a version.

Any rank can compute the values of any box, which follow from the tensor's name and the logical index. Each version has
different values, so that a method which delivers nothing cannot pass with stale values in memory.
"""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from hybridengine.backends.megatron.groups import build_groups
from hybridengine.backends.megatron.model import DTYPES, available_names, build_chunks
from hybridengine.families.family import is_float32
from hybridengine.models.shapes import ModelShape
from hybridengine.reshard.boxes import Box
from hybridengine.reshard.layout import Layout, LocalParameter, Shard
from hybridengine.reshard.megatron import megatron_layout
from hybridengine.topology.grid import Grid
from hybridengine.weights.process_groups import ProcessGroups
from hybridengine.weights.storage import WeightStorage

NUM_VALUES = 2**24
"""Number of distinct values of an element; exact in float32, rounded in bfloat16."""


def box_values(tensor: str, box: Box, version: int, device: torch.device) -> Tensor:
    """Return the float32 values, in [-1, 1), of a box of a logical tensor, shaped like the box."""
    mixed = torch.tensor(zlib.crc32(f"{version}/{tensor}".encode()), device=device)
    for dim, (start, stop) in enumerate(box):
        step = zlib.crc32(f"{version}/{dim}/{tensor}".encode()) | 1
        mixed = mixed.unsqueeze(-1) + torch.arange(start, stop, device=device) * step
    return (mixed % NUM_VALUES).float().mul_(2 / NUM_VALUES).sub_(1.0)


def parameter_values(
    parameter: LocalParameter, dtype: torch.dtype, version: int, device: torch.device
) -> Tensor:
    """Return the contents of a local parameter; padding is zero."""
    values = torch.zeros(parameter.shape, dtype=dtype, device=device)
    for piece in parameter.pieces:
        values[piece.index] = box_values(piece.tensor, piece.box, version, device).to(dtype)
    return values


def fill(shard: Shard, weights: WeightStorage, version: int) -> None:
    """Write a version's values into all parameters of a shard."""
    for parameter in shard.parameters:
        target = weights[parameter.name]
        target.copy_(parameter_values(parameter, target.dtype, version, target.device))


def differing_parameters(shard: Shard, weights: WeightStorage, version: int) -> list[str]:
    """Return the names of the parameters that differ from a version's values in any bit."""
    wrong = []
    for parameter in shard.parameters:
        found = weights[parameter.name].contiguous()
        expected = parameter_values(parameter, found.dtype, version, found.device)
        if not torch.equal(found.view(torch.uint8), expected.view(torch.uint8)):
            wrong.append(parameter.name)
    return wrong


class Actor:
    """One rank's part of a model, a TrainingSide without gradients or optimizer state. Construction is collective."""

    def __init__(self, shape: ModelShape, grid: Grid, rank: int, registry: ProcessGroups, dtype: str) -> None:
        self.shape, self.grid, self.rank, self.registry, self.dtype_name = shape, grid, rank, registry, dtype
        names = available_names()
        self.groups = build_groups(grid, registry)
        (self.module,) = build_chunks(shape, grid.sizes, self.groups, dtype, names)
        self.module.requires_grad_(False)
        self.layout: Layout = megatron_layout(shape, grid, names)
        self.weights = WeightStorage(self.tensors(), current=self.tensors)
        self.dtype, self.device = DTYPES[dtype], next(self.module.parameters()).device
        self.version, self.gradient_bytes = 0, 0

    def tensors(self) -> dict[str, Tensor]:
        """Return parameters, and buffers of the layout."""
        buffers = {name: buffer for name, buffer in self.module.named_buffers() if is_float32(name)}
        return dict(self.module.named_parameters()) | buffers

    def fill(self, version: int) -> None:
        fill(self.layout.shard(self.rank), self.weights, version)
        self.version = version

    @property
    def retained(self) -> WeightStorage:
        return WeightStorage({})

    def lend(self, *, regathers: bool = False) -> None:
        assert not regathers, "a benchmark cuts the actor's weights out of the engine's"

    def take_back(self, *, regathers: bool = False) -> int:
        return 0

    def leave_training(self) -> None:
        pass

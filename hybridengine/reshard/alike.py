"""Groups of tensors that parameters hold together, and their patterns.

Layers and experts repeat: a mixture of 94 layers has 36,000 tensors, in groups of a few hundred patterns. Groups of one
pattern differ in names alone, so that what is computed of one holds for all.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hybridengine.reshard.boxes import Box
from hybridengine.reshard.domains import components
from hybridengine.reshard.layout import Shard

Contents = tuple[int, tuple[int, ...], int, tuple[tuple[int, Box, tuple[int, ...]], ...]]
"""(shard, shape, tensor, (tensor, box, offset) of every piece) of a parameter; shards and tensors are numbers."""


@dataclass(frozen=True)
class FusedGroup:
    """Logical tensors that parameters hold together."""

    tensors: tuple[str, ...]
    names: tuple[str, ...]
    """Parameters of the tensors, shard by shard."""
    pattern: tuple[Contents, ...]
    """Contents of the parameters."""


def fused_groups(shards: Iterable[Shard]) -> list[FusedGroup]:
    """Return the groups of logical tensors that parameters of the shards hold together, in the order of the shards."""
    shards = tuple(shards)
    groups = components(
        dict.fromkeys((parameter.tensor, *(piece.tensor for piece in parameter.pieces)))
        for shard in shards
        for parameter in shard.parameters
    )
    places = {
        tensor: (index, place) for index, group in enumerate(groups) for place, tensor in enumerate(group)
    }
    names: list[list[str]] = [[] for _ in groups]
    patterns: list[list[Contents]] = [[] for _ in groups]
    for number, shard in enumerate(shards):
        for parameter in shard.parameters:
            group, tensor = places[parameter.tensor]
            pieces = tuple([(places[piece.tensor][1], piece.box, piece.offset) for piece in parameter.pieces])
            names[group].append(parameter.name)
            patterns[group].append((number, parameter.shape, tensor, pieces))
    return [FusedGroup(*found) for found in zip(groups, map(tuple, names), map(tuple, patterns), strict=True)]

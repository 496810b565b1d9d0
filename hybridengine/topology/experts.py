"""The ranks of a training grid as mixture-of-experts layers divide them.

The t·c·d ranks of a pipeline stage, numbered with tp fastest, then cp, then dp, are cut again: `etp` tensor shards of an
expert vary fastest, then `ep` parts of the experts, then `edp` replicas of both. It is Megatron-core's order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from hybridengine.topology.grid import AXIS_NAMES, Grid, Groups, Mesh, named_groups

EXPERT_AXES = ("ep", "etp")
"""Axes that shard the experts of a stage."""


@dataclass(frozen=True)
class ExpertGrid(Mesh):
    """Ranks of a training grid along the axes etp, ep, edp and pp."""

    train: Grid

    @cached_property
    def axes(self) -> dict[str, int]:
        sizes = self.train.sizes
        shards, parts = sizes.expert_shards, sizes.expert_parts
        stage = sizes.num_ranks // sizes.pp_size
        return {"etp": shards, "ep": parts, "edp": stage // (shards * parts), "pp": sizes.pp_size}

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        places = list(self.train.coordinates())

        def position(rank: int) -> tuple[int, ...]:
            return places[rank].along(axis for axis in ("pp", "dp", "cp", "tp") if axis in self.train.axes)

        return tuple(sorted(range(len(places)), key=position))

    @property
    def _listed(self) -> list[str]:
        return ["pp", "edp", "ep", "etp"]

    def __str__(self) -> str:
        return f"experts of {self.train}"


def named_expert_groups(train: Grid) -> list[tuple[str, Groups]]:
    """Return the name of each axis of the experts with the groups along it; pipeline groups are those of the grid."""
    return [(name, groups) for name, groups in named_groups(ExpertGrid(train)) if name != AXIS_NAMES["pp"]]

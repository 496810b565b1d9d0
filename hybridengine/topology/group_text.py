"""Text formatting of rank groups."""

from __future__ import annotations

from collections.abc import Sequence

from hybridengine.topology.grid import AXIS_NAMES, Groups, Mesh

SHOWN_GROUPS = 8
SHOWN_RANKS = 8


def named_groups(mesh: Mesh) -> list[tuple[str, Groups]]:
    """Return the name of each axis of the mesh with the groups along it."""
    return [(name, mesh.groups(axis)) for axis, name in AXIS_NAMES.items() if axis in mesh.axes]


def format_groups(groups: Groups, shown: int = SHOWN_GROUPS) -> str:
    """Return the first `shown` groups and the total number: "[0,1] [2,3] ... 64 groups"."""
    text = " ".join(format_ranks(group) for group in groups[:shown])
    return text + (f" ... {len(groups)} groups" if len(groups) > shown else "")


def format_ranks(ranks: Sequence[int]) -> str:
    """Return the ranks of one group, "[0,1,2,3]"; a long group is shortened to its first two and its last."""
    if len(ranks) > SHOWN_RANKS:
        return f"[{ranks[0]},{ranks[1]},...,{ranks[-1]}]"
    return "[" + ",".join(map(str, ranks)) + "]"

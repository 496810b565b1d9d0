"""Python values that the ranks of one engine share, such as requests that only one of them receives."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist

from hybridengine.topology.generation import GenerationGrid
from hybridengine.topology.grid import group_with
from hybridengine.topology.sizes import MODEL_AXES


class Lead:
    """The ranks of this rank's engine, of which the first one leads. Collective over all ranks of the grid."""

    def __init__(self, generation: GenerationGrid, rank: int, timeout_s: float) -> None:
        engines = generation.groups(*MODEL_AXES)
        self._ranks = sorted(group_with(rank, engines))
        self._group: dist.ProcessGroup | None = None
        for engine in engines if len(self._ranks) > 1 else ():
            # On the host, and without NCCL's buffers: what is shared are Python objects.
            group = dist.new_group(sorted(engine), timeout=timedelta(seconds=timeout_s), backend="gloo")
            if rank in engine:
                self._group = cast(dist.ProcessGroup, group)
        self.is_here = rank == self._ranks[0]
        """True on the rank that leads."""

    def share(self, value: Any) -> Any:
        """Return the leading rank's value on all ranks of the engine."""
        if self._group is None:
            return value
        values = [value]
        dist.broadcast_object_list(values, self._ranks[0], group=self._group)
        return values[0]

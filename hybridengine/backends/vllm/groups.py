"""vLLM's process groups, built from a generation grid before an engine is constructed.

vLLM would place them on consecutive ranks of the world; like this, several engines with interval grouping share it. A
process may have engines of several grids, such as an actor's and a judge's: each puts its own groups into vLLM's globals
before it computes.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist
from vllm.distributed import parallel_state

from hybridengine.errors import TopologyError
from hybridengine.topology.generation import GenerationGrid
from hybridengine.topology.grid import Groups

SHARED_MEMORY = Path("/dev/shm")
"""Folder in which Linux lists shared memory by name."""
GLOBALS = ("_WORLD", "_NODE_COUNT", "_TP", "_PP", "_DP", "_DCP", "_PCP", "_ETP", "_EP")
"""Names of vLLM's globals that hold groups, and a number that follows from them."""
_made: dict[tuple[Groups, Groups], EngineGroups] = {}


class EngineGroups:
    """The groups that vLLM's globals hold when this is created."""

    def __init__(self) -> None:
        self._values = {name: getattr(parallel_state, name) for name in GLOBALS}

    def use(self) -> None:
        """Put the groups into vLLM's globals."""
        for name, value in self._values.items():
            setattr(parallel_state, name, value)


def install_groups(generation: GenerationGrid, identity: str) -> EngineGroups:
    """Return the groups of `generation`, which vLLM uses now. Collective at the first time for each grid.

    `identity` is unique among a node's jobs. Raises TopologyError if torch cannot preserve the order of ranks.
    """
    tensor, pipeline = wanted = generation.groups("tp"), generation.groups("pp")
    if wanted in _made:
        _made[wanted].use()
        return _made[wanted]
    world = tuple(range(generation.train.num_ranks))
    os.environ["VLLM_DIST_IDENT"] = identity
    singles: Groups = tuple((rank,) for rank in world)
    parallel_state._WORLD = _group((world,), "world", communicates=False)
    parallel_state._NODE_COUNT = parallel_state._node_count(parallel_state._WORLD.cpu_group)
    parallel_state._TP = _group(tensor, "tp")
    parallel_state._PP = _group(pipeline, "pp")
    for axis in ("_DP", "_DCP", "_PCP"):
        setattr(parallel_state, axis, _group(singles, axis.strip("_").lower()))
    parallel_state._ETP = parallel_state._EP = parallel_state._TP  # experts are shared among the same ranks
    _made[wanted] = EngineGroups()
    return _made[wanted]


def _group(groups: Groups, name: str, communicates: bool = True) -> parallel_state.GroupCoordinator:
    with _ranks_as_listed(groups):
        coordinator = parallel_state.GroupCoordinator(
            group_ranks=[list(ranks) for ranks in groups],
            local_rank=int(os.environ.get("LOCAL_RANK", "0")),
            torch_distributed_backend=dist.get_backend(),
            use_device_communicator=communicates,
            group_name=name,
        )
    # On a CPU, vLLM unlinks shared memory at the end of the process, which a killed rank does not reach: a later job with
    # the same port could then not start. The whole group has opened it by now.
    shared = getattr(coordinator.device_communicator, "dist_module", None)
    if (file := getattr(shared, "group_name", None)) is not None:
        (SHARED_MEMORY / f"{file}_{coordinator.rank_in_group}").unlink(missing_ok=True)
    return coordinator


@contextlib.contextmanager
def _ranks_as_listed(groups: Groups) -> Iterator[None]:
    """Make a rank's index in the group its index in the given list, as vLLM assumes; torch would sort the list."""
    unsorted = [list(ranks) for ranks in groups if list(ranks) != sorted(ranks)]
    if not unsorted:
        yield
        return
    new_group = dist.new_group
    if "sort_ranks" not in inspect.signature(new_group).parameters:
        raise TopologyError(
            f"the engine's ranks {unsorted[0]} do not ascend, and torch.distributed.new_group has no sort_ranks;"
            " use a torch that has it (2.13 does), or a t_g that divides t and a p_g that divides p"
        )
    dist.new_group = functools.partial(new_group, sort_ranks=False)
    try:
        yield
    finally:
        dist.new_group = new_group

"""Megatron-core's ProcessGroupCollection, built from a grid instead of Megatron's global parallel state."""

from __future__ import annotations

import random

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from hybridengine.backends.megatron.shim import device_shim, is_needed
from hybridengine.topology.experts import ExpertGrid
from hybridengine.topology.grid import Grid, Groups
from hybridengine.weights.process_groups import ProcessGroups

_AXES = {
    "tp": ("tp",),
    "pp": ("pp",),
    "cp": ("cp",),
    "dp": ("dp",),
    "mp": ("tp", "pp"),
    "dp_cp": ("dp", "cp"),
    "tp_cp": ("tp", "cp"),
    "tp_dp_cp": ("tp", "dp", "cp"),
    "intra_dp_cp": ("dp", "cp"),
    "intra_dist_opt": ("tp", "cp", "dp", "pp"),
}
"""Megatron's name of a group -> axes along which its ranks differ."""
_EXPERT_AXES = {
    "ep": ("ep",),
    "expt_tp": ("etp",),
    "tp_ep": ("etp", "ep"),
    "tp_ep_pp": ("etp", "ep", "pp"),
    "expt_dp": ("edp",),
    "intra_expt_dp": ("edp",),
}
"""Megatron's name of a group -> axes of the grid of experts along which its ranks differ."""


def build_groups(grid: Grid, registry: ProcessGroups) -> ProcessGroupCollection:
    """Return the process groups of a model that trains on `grid`. Collective over all ranks."""
    groups = {
        name: grid.groups(*(axis for axis in axes if axis in grid.axes)) for name, axes in _AXES.items()
    }
    experts = ExpertGrid(grid)
    groups |= {name: _ascending(experts.groups(*axes)) for name, axes in _EXPERT_AXES.items()}
    groups["pos_embd"] = grid.groups()  # there are no embeddings of positions
    groups["embd"] = embedding_groups(grid)
    return ProcessGroupCollection(**{name: registry.of(ranks) for name, ranks in groups.items()})


def _ascending(groups: Groups) -> Groups:
    return tuple(tuple(sorted(group)) for group in groups)


def embedding_groups(grid: Grid) -> Groups:
    """Return groups of first and last stage, which hold the embedding and its copy in the head; other ranks are alone."""
    ends = []
    for stages in grid.groups("pp"):
        first_and_last = tuple(sorted({stages[0], stages[-1]}))
        ends.append(first_and_last)
        ends += [(rank,) for rank in stages if rank not in first_and_last]
    return tuple(ends)


def initialize_globals(seed: int) -> None:
    """Initialise the global state that Megatron-core still reads, at tensor and pipeline size 1. Collective.

    The generators of NumPy and Python are also seeded, differently on each rank, for custom loss functions.
    """
    if parallel_state.model_parallel_is_initialized():
        return
    if not is_needed():
        # An engine over several GPUs moves this thread to a stream of vLLM's for good, and gradients are accumulated on
        # the stream that is current when a model is built: move first.
        from vllm.utils.torch_utils import current_stream

        current_stream()
    assert dist.is_initialized(), "torch.distributed must be initialised first"
    with device_shim():
        parallel_state.initialize_model_parallel(1, 1)
        model_parallel_cuda_manual_seed(seed, tp_rank=0, ep_rank=0, etp_rank=0)
    torch.random.default_generator.manual_seed(seed)  # Megatron-core only seeds the GPU's
    own = np.random.SeedSequence([seed, dist.get_rank()])
    np.random.seed(own.generate_state(4))
    random.seed(int(own.generate_state(1, np.uint64)[0]))

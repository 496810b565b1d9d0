"""Measures in processes that somebody else has started: torchrun, or a scheduler that sets the same variables."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta

from hybridengine.bench.ranks import ENVIRONMENT
from hybridengine.bench.results import PairResult
from hybridengine.bench.spec import BenchSpec
from hybridengine.errors import TopologyError, TransferError, raise_all
from hybridengine.topology.links import NodeMap

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR")


def is_rank(environment: Mapping[str, str] = os.environ) -> bool:
    """True in a process that torchrun has started as a rank."""
    return all(name in environment for name in VARIABLES)


def check_world(spec: BenchSpec, environment: Mapping[str, str] = os.environ) -> None:
    """Check that every pair has the number of ranks that were started.

    Raises:
        TopologyError: names the pairs that have not.
    """
    world_size = int(environment["WORLD_SIZE"])
    raise_all(
        [
            f"{pair} needs {pair.train.num_ranks} ranks, torchrun has started {world_size}; choose p·t·d = {world_size}"
            for pair in spec.pairs
            if pair.train.num_ranks != world_size
        ],
        TopologyError,
    )


def measure_joined(spec: BenchSpec, say: Callable[[str], None]) -> Iterator[PairResult]:
    """Results of each pair, the same on every rank; only rank 0 says anything.

    Raises:
        HybridEngineError: of this rank; torchrun ends the others.
    """
    for name in ("OMP_NUM_THREADS", "THP_MEM_ALLOC_ENABLE"):
        os.environ.setdefault(name, ENVIRONMENT[name])  # before torch is loaded
    import torch.distributed as dist

    from hybridengine.bench.rank_process import choose_device, measure
    from hybridengine.runtime.process_groups import ProcessGroups

    local_rank = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
    backend = choose_device(local_rank, local_size)
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=spec.timeout_s))
    except RuntimeError as error:
        raise TransferError(
            f"the ranks could not join: {error}; look for one that has not started"
        ) from error
    registry = ProcessGroups(spec.timeout_s)
    nodes = NodeMap.uniform(dist.get_world_size(), local_size)
    is_first = dist.get_rank() == 0

    def say_once(text: str) -> None:
        if is_first:
            say(text)

    for pair in spec.pairs:
        say_once(spec.describe(pair))
        yield measure(spec, pair, registry, say_once, nodes)
    dist.destroy_process_group()

"""Measures in processes that somebody else has started: torchrun, or a scheduler that sets the same variables."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta

from hybridengine.bench.ranks import ENVIRONMENT
from hybridengine.bench.results import PairResult
from hybridengine.bench.spec import BenchSpec
from hybridengine.errors import ConfigError, TopologyError, TransferError, raise_all
from hybridengine.topology.links import NodeMap

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR")
"""What tells a rank of somebody else's."""
NUMBERS = {"RANK": 0, "WORLD_SIZE": 1, "MASTER_PORT": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
"""Variables that are integers -> the least that they may be."""

RULES = (
    ("RANK", "less than", "WORLD_SIZE"),
    ("LOCAL_RANK", "less than", "LOCAL_WORLD_SIZE"),
    ("LOCAL_WORLD_SIZE", "at most", "WORLD_SIZE"),
)


def is_rank(environment: Mapping[str, str] = os.environ) -> bool:
    """True in a process that torchrun has started as a rank."""
    return all(name in environment for name in VARIABLES)


def check_world(spec: BenchSpec, environment: Mapping[str, str] = os.environ) -> None:
    """Check that every pair has the number of ranks that were started.

    Raises:
        ConfigError: variables that torchrun does not set so.
        TopologyError: names the pairs that have not.
    """
    raise_all(
        f"{name}={environment[name]!r} must be an integer, at least {least}; start the command with torchrun, or unset"
        f" {', '.join(VARIABLES)} to let it start ranks itself"
        for name, least in NUMBERS.items()
        if name in environment and not _is_integer(environment[name], least)
    )
    numbers = {name: int(environment[name]) for name in NUMBERS if name in environment}
    world_size = numbers["WORLD_SIZE"]
    raise_all(
        f"{name}={numbers[name]} must be {rule} {other}={numbers[other]}; start the command with torchrun"
        for name, rule, other in RULES
        if name in numbers and other in numbers and numbers[name] > numbers[other] - (rule == "less than")
    )
    if not environment["MASTER_ADDR"].strip():
        raise ConfigError(
            "MASTER_ADDR must name the host of rank 0, and is empty; start the command with torchrun"
        )
    if not 1 <= numbers.get("MASTER_PORT", 0) <= 65535:
        found = environment.get("MASTER_PORT", "not set")
        raise ConfigError(
            f"MASTER_PORT must be a port from 1 to 65535, and is {found}; start the command with torchrun"
        )
    raise_all(
        [
            f"{pair} needs {pair.train.num_ranks} ranks, torchrun has started {world_size}; choose p·t·d = {world_size}"
            for pair in spec.pairs
            if pair.train.num_ranks != world_size
        ],
        TopologyError,
    )


def _is_integer(text: str, least: int) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 10 and int(text) >= least


def measure_joined(spec: BenchSpec, say: Callable[[str], None]) -> Iterator[PairResult]:
    """Results of each pair, the same on every rank; only rank 0 says anything.

    Raises:
        HybridEngineError: of this rank; torchrun ends the others.
    """
    os.environ.setdefault("OMP_NUM_THREADS", ENVIRONMENT["OMP_NUM_THREADS"])  # before torch is loaded
    import torch.distributed as dist

    from hybridengine.bench.rank_process import choose_device, measure
    from hybridengine.runtime.process_groups import ProcessGroups

    local_rank = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
    backend = choose_device(local_rank, local_size)
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=spec.timeout_s))
    except (RuntimeError, ValueError) as error:
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

"""Rehearsals of several ranks, each in a process of its own: modes and process groups belong to a whole process."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager

from hybridengine.backends.vllm.environment import rank_environment
from hybridengine.config import RunConfig
from hybridengine.errors import WorkerError
from hybridengine.rehearsal.figures import RankRehearsal


def rehearse_ranks(config: RunConfig, ranks: Sequence[int]) -> Iterator[RankRehearsal]:
    """Yield the figures of each rank, one after another; raises what the rank raises.

    Raises WorkerError if a process was killed.
    """
    context = multiprocessing.get_context("spawn")
    for rank in ranks:
        with _environment(), ProcessPoolExecutor(1, mp_context=context) as process:
            try:
                found = process.submit(_rehearse, config, rank).result()
            except BrokenProcessPool as error:
                raise WorkerError(
                    f"the process that rehearsed rank {rank} was killed, as by the system where memory runs out; free"
                    " memory, and rehearse again"
                ) from error
        yield found


def _rehearse(config: RunConfig, rank: int) -> RankRehearsal:
    from hybridengine.rehearsal.rank import rehearse

    return rehearse(config, rank)


@contextmanager
def _environment() -> Iterator[None]:
    """Give child processes the environment of a rank without a GPU, which a rehearsal does not touch."""
    kept = dict(os.environ)
    os.environ |= {**rank_environment(use_gpus=False), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(kept)

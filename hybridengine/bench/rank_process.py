"""One rank as a process: joins the world, measures, and tells the process that started it.

The forkserver imports this module once, so that every rank starts with torch and Megatron loaded. Importing it starts
no thread and touches no GPU.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import traceback
import warnings
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Megatron-core says six times that there is no GPU

    import torch
    import torch.distributed as dist

    from hybridengine.bench.measurement import Measurement, Say
    from hybridengine.bench.results import PairResult
    from hybridengine.bench.spec import BenchSpec, LayoutPair
    from hybridengine.errors import ConfigError, HybridEngineError, WorkerError
    from hybridengine.runtime.process_groups import ProcessGroups
    from hybridengine.topology.links import NodeMap


def run_rank(channel: Connection, spec: BenchSpec, pair: LayoutPair, rank: int, store: str) -> None:
    """Measure one pair as one rank; sends ("say", text), then ("value", PairResult) or ("error", exception)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the starter, which ends the ranks
    end = threading.Thread(target=_end_with_starter, args=(channel,), daemon=True)
    end.start()

    def say(text: str) -> None:
        if rank == 0:
            channel.send(("say", text))

    try:
        world_size = pair.train.num_ranks
        backend = choose_device(rank, world_size)
        timeout = timedelta(seconds=spec.timeout_s)
        dist.init_process_group(
            backend, init_method=Path(store).as_uri(), rank=rank, world_size=world_size, timeout=timeout
        )
        answer = ("value", measure(spec, pair, ProcessGroups(spec.timeout_s), say))
    except HybridEngineError as error:
        answer = ("error", error)
    except Exception as error:
        answer = ("error", WorkerError(f"rank {rank} failed: {_place(error)}"))
    with contextlib.suppress(OSError):
        channel.send(answer)
        end.join()  # others may still talk to this rank
    os._exit(0)


def measure(
    spec: BenchSpec, pair: LayoutPair, registry: ProcessGroups, say: Say, nodes: NodeMap | None = None
) -> PairResult:
    """Results of one pair; collective over the world, which must have its number of ranks."""
    say(f"{dist.get_world_size()} ranks have joined; building Megatron models and preparing methods")
    return Measurement(spec, pair, registry, say, nodes).run()


def choose_device(local_rank: int, num_local_ranks: int) -> str:
    """Take one thread, and a GPU of one's own where the machine has GPUs; returns the backend, `nccl` or `gloo`.

    Raises:
        ConfigError: fewer GPUs than ranks.
    """
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("megatron").setLevel(logging.ERROR)  # what it deprecates is no news to who measures
    if not torch.cuda.is_available():
        return "gloo"
    if torch.cuda.device_count() < num_local_ranks:
        raise ConfigError(
            f"{num_local_ranks} ranks need as many GPUs, this machine has {torch.cuda.device_count()}; choose smaller"
            " training sizes, start more machines with torchrun, or hide the GPUs with CUDA_VISIBLE_DEVICES= to"
            " measure on the CPU"
        )
    torch.cuda.set_device(local_rank)
    return "nccl"


def _end_with_starter(channel: Connection) -> None:
    """End this process when the one that started it has gone, or has what it wanted."""
    with contextlib.suppress(EOFError, OSError):
        channel.recv_bytes()
    os._exit(0)


def _place(error: Exception) -> str:
    """An unexpected error in one line, with where it arose."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''} ({Path(frame.filename).name}:{frame.lineno})"

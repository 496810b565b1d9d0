"""The process of one rank, which hosts several roles that take turns in its main thread.

The pool turns `RankProcess` into a Ray actor with one thread, so that calls run in the order of submission, the same on
every rank, and in the main thread, as signal handlers require.
"""

from __future__ import annotations

import importlib
import os
import pickle
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import ray

from hybridengine.controller import network
from hybridengine.controller.calls import Arguments, Call
from hybridengine.controller.failures import Outcome, failure_of
from hybridengine.controller.whereabouts import telling
from hybridengine.errors import WorkerError
from hybridengine.importing import import_object, nothing_collected
from hybridengine.machine import held_bytes
from hybridengine.rows.protocols import RankContext


@dataclass(frozen=True)
class Seat:
    """Location of a process before it has a rank."""

    node: str
    gpu: int | None
    """Index of the GPU that Ray assigned to the process; None on a CPU pool."""


@dataclass(frozen=True)
class RankIdentity:
    """Rank in the pool's world, as torch.distributed and launchers' environment variables define it."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node: str
    node_gpus: tuple[int, ...]
    """The pool's GPUs on this node, ascending, indexed by `local_rank`; empty on a CPU pool."""

    def environment(self, master_addr: str, master_port: int) -> dict[str, str]:
        return {
            "MASTER_ADDR": master_addr,
            "MASTER_PORT": str(master_port),
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
        }


class RankProcess:
    """One rank of a pool. All methods return an `Outcome` and a result, and never raise."""

    def __init__(self, label: str) -> None:
        """Create a process that prefixes every printed line with `label`."""
        self._label = label
        self._identity: RankIdentity | None = None
        self._store: Any = None
        self._timeout_s = 0.0
        self._workers: dict[str, Any] = {}

    def __repr__(self) -> str:  # Ray calls this once, before the process has a rank
        return self._label

    @ray.method(num_returns=2)
    def take_seat(self, seat: int) -> tuple[Outcome, Seat]:
        """Import torch, the slow part of starting, and return the location of the process; `seat` replaces its rank."""

        def look() -> Seat:
            with nothing_collected():
                importlib.import_module("torch.distributed")
            gpus = [int(gpu) for gpu in ray.get_gpu_ids()]
            return Seat(ray.util.get_node_ip_address(), gpus[0] if gpus else None)

        return self._run(seat, look)

    @ray.method(num_returns=2)
    def open_store(self, node: str, timeout_s: float) -> tuple[Outcome, int]:
        """Open the world's store on rank 0, and return its port."""

        def become_host() -> int:
            self._store = network.open_store(node, timedelta(seconds=timeout_s))
            return self._store.port

        return self._run(0, become_host)

    @ray.method(num_returns=2)
    def join_world(
        self, identity: RankIdentity, master_addr: str, master_port: int, meeting_s: float, timeout_s: float
    ) -> tuple[Outcome, None]:
        """Become a rank: initialise torch.distributed (gloo, and NCCL for GPU tensors), and prepare to exchange rows.

        The visible GPUs are the pool's on this node, in the same order for all its processes.

        Args:
            meeting_s: time limit for the ranks to meet.
            timeout_s: time limit of every later collective.
        """

        def join() -> None:
            import torch
            from torch import distributed

            self._identity = identity
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, identity.node_gpus))
            os.environ.update(identity.environment(master_addr, master_port))
            for name, value in network.socket_environment(identity.node).items():
                os.environ.setdefault(name, value)
            limit, timeout = timedelta(seconds=meeting_s), timedelta(seconds=timeout_s)
            backend = "gloo"
            if identity.node_gpus:
                torch.cuda.set_device(identity.local_rank)
                backend = "cpu:gloo,cuda:nccl"
            try:
                if self._store is None:
                    self._store = network.connect_store(master_addr, master_port, timeout)
                distributed.init_process_group(
                    backend,
                    store=distributed.PrefixStore("world", self._store),
                    rank=identity.rank,
                    world_size=identity.world_size,
                    timeout=limit,
                )
                distributed.barrier()
                distributed.distributed_c10d._set_pg_timeout(timeout)
            except RuntimeError as error:
                raise network.not_met(identity.rank, identity.node, error) from None
            with nothing_collected():
                importlib.import_module("hybridengine.controller.row_requests")
            self._timeout_s = timeout_s

        return self._run(identity.rank, join)

    @ray.method(num_returns=2)
    def add_role(self, context: RankContext, worker: str | bytes, config: bytes) -> tuple[Outcome, None]:
        """Create the worker of a role; `worker` is an import path or a pickled class, `config` pickled kwargs."""

        def make() -> None:
            if context.role in self._workers:
                raise WorkerError(
                    f"role {context.role!r} exists on rank {context.rank}; give each group a role of its own"
                )
            with nothing_collected():
                cls = import_object(worker) if isinstance(worker, str) else pickle.loads(worker)
            self._workers[context.role] = cls(context, **pickle.loads(config))

        return self._run(context.rank, make)

    @ray.method(num_returns=2)
    def call(self, call: Call, arguments: Arguments, *batches: Any) -> tuple[Outcome, Any]:
        """Run a method of a role's worker; return its result, or the description of its rows, on source ranks.

        A method that runs for almost its whole timeout prints the stack of every thread to the process's log, and
        reports its position.

        Args:
            batches: `StoredRows` that the requests among the arguments refer to; None for rows that were not produced.
        """
        from hybridengine.controller.row_requests import fetch_arguments
        from hybridengine.controller.stored_rows import Owner, keep_rows

        identity, cost = self._taken(), dict[str, Any]()
        owner = Owner(identity.node, os.getpid(), identity.rank)

        def run() -> Any:
            (args, kwargs), read = fetch_arguments(call, arguments, batches, self._timeout_s, owner)
            cost.update(read)
            result = getattr(self._workers[call.role], call.method)(*args, **kwargs)
            if not call.is_source:
                return None
            if call.num_rows is None:
                return result
            stored = keep_rows(call, result, owner)
            cost["inline_bytes"] += stored.inline_bytes
            return stored

        with telling(call.timeout_s):
            outcome, result = self._run(identity.rank, run)
        return replace(outcome, **cost), result

    @ray.method(num_returns=2)
    def leave_world(self) -> tuple[Outcome, None]:
        """Drop all roles and leave torch.distributed."""

        def leave() -> None:
            for worker in self._workers.values():
                if hasattr(worker, "close"):
                    worker.close()
            self._workers.clear()
            from torch import distributed

            if distributed.is_initialized():
                distributed.destroy_process_group()

        return self._run(self._taken().rank, leave)

    def _taken(self) -> RankIdentity:
        assert self._identity is not None, "join_world comes first"
        return self._identity

    @staticmethod
    def _run(rank: int, task: Callable[[], Any]) -> tuple[Outcome, Any]:
        begin, failure, result = time.time(), None, None
        try:
            result = task()
        except (Exception, SystemExit) as error:  # sent to the controller as data, with rank and traceback
            failure = failure_of(rank, error)
        return Outcome(rank, begin, time.time(), failure, held_bytes=held_bytes()), result


def process_environment(use_gpus: bool, extra: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that a rank process needs before any import; `extra` takes precedence."""
    # The guard of a reward function outlives its rank to end the function and clean up.
    always = {"RAY_kill_child_processes_on_worker_exit": "0"}
    if use_gpus:
        # Every process sees all of the pool's GPUs on its node, as under torchrun; join_world restricts them.
        return always | {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"} | dict(extra)
    return always | {"OMP_NUM_THREADS": "1"} | dict(extra)

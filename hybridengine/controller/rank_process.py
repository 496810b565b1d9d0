"""The process of one rank: a Ray actor that runs all calls in order in its main thread, as signal handlers require."""

from __future__ import annotations

import functools
import importlib
import logging
import os
import pickle
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import ray
from ray import cloudpickle

from hybridengine.controller import network
from hybridengine.controller.failures import Outcome, failure_of
from hybridengine.controller.json_logs import JsonLogs
from hybridengine.controller.metrics import RankMetrics, Work, work_of
from hybridengine.controller.relays import Share
from hybridengine.controller.whereabouts import telling
from hybridengine.importing import import_object, nothing_collected
from hybridengine.machine import Device, held_bytes, total_bytes, wait_for_device
from hybridengine.rows.protocols import GroupTopology, RankContext

logger = logging.getLogger(__name__)

Gpu = tuple[int, str]
"""Position of a GPU among those of its node, and its name in CUDA_VISIBLE_DEVICES: an index, or that of a GPU or MIG."""
Seat = tuple[str, Gpu | None]
"""Node of a process, and the GPU that Ray assigned to it; None on a CPU pool."""


@dataclass(frozen=True)
class RankIdentity:
    """Rank in the pool's world, as torch.distributed and launchers' environment variables define it."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node: str
    node_gpus: tuple[str, ...]
    """Names of the pool's GPUs on this node, in the node's order, indexed by `local_rank`; empty on a CPU pool."""


@dataclass(frozen=True)
class NewRole:
    """A new role: the class of its workers, and their arguments."""

    name: str
    worker: type | str
    """Class, or its import path."""
    topology: GroupTopology
    config: dict[str, Any]


def _answered(method: Callable[..., Any]) -> Any:
    """Make a method return an `Outcome` with its pickled result, and never raise; the device has ended its work then."""

    @functools.wraps(method)
    def answer(self: RankProcess, *arguments: Any) -> Outcome:
        begin, failure, result = time.time(), None, None
        self.cost, self.work = {}, None
        try:
            result = method(self, *arguments)
            wait_for_device()
            # Bytes, which a relay passes on without the classes of what is in them.
            result = None if result is None else cloudpickle.dumps(result)
        except (Exception, SystemExit) as error:  # sent to the controller as data, with rank and traceback
            failure, result = failure_of(self.rank, error), None
            if self._json:  # as text, the controller prints it
                logger.error(failure.error, extra={"traceback": failure.traceback})
        outcome = Outcome(begin, time.time(), failure, held_bytes=held_bytes(), **self.cost, result=result)
        if self.metrics is not None and self.work is not None and failure is None:
            self.metrics.count(self.work, outcome)
        return outcome

    return answer


class RankProcess:
    """One rank of a pool. All remote methods return an `Outcome`, and never raise.

    Printed lines begin with `label`. `rank` is the number of the process until it has a rank. Metrics and logs name `run`
    and `pool`.
    """

    def __init__(self, label: str, rank: int, run: str = "", pool: str = "", json_logs: bool = False) -> None:
        self.rank, self.cost = rank, dict[str, Any]()
        """Fields of the present call's `Outcome`."""
        self.work: Work | None = None
        """Work of the present call; None until a call of a role has succeeded."""
        self.metrics: RankMetrics | None = None
        self._run_name, self._pool = run, pool
        self._json, self._logs = json_logs, JsonLogs(run, "pool", rank)
        if json_logs:
            self._logs.install()
        self._label, self._node = label, ""
        self._store: Any = None
        self._stored: Any = None
        self._timeout_s = 0.0
        self._workers: dict[str, Any] = {}

    def __repr__(self) -> str:  # Ray calls this once, before the process has a rank
        return f"{self._label} {self.rank}"

    @_answered
    def take_seat(self) -> Seat:
        """Import torch, the slow part of starting, and return the location of the process."""
        with nothing_collected():
            importlib.import_module("torch.distributed")
        gpus = ray.get_gpu_ids()
        own = placed_gpu(str(gpus[0]), os.environ.get("CUDA_VISIBLE_DEVICES")) if gpus else None
        return ray.util.get_node_ip_address(), own

    @_answered
    def look(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return the result of a function of this project on the node."""
        return function(*arguments)

    @_answered
    def open_store(self, node: str, timeout_s: float) -> int:
        """Open the world's store on rank 0, and return its port."""
        self.rank = 0
        self._store = network.open_store(node, timedelta(seconds=timeout_s))
        return self._store.port

    @_answered
    def join_world(
        self, identity: RankIdentity, master_addr: str, master_port: int, meeting_s: float, timeout_s: float
    ) -> Device:
        """Become a rank: initialise torch.distributed (gloo, and NCCL for GPU tensors), and prepare to exchange rows.

        Returns the rank's device.
        The ranks have `meeting_s` to meet, and `timeout_s` for every later collective.
        """
        import torch
        from torch import distributed

        self.rank, self._node, self._timeout_s = identity.rank, identity.node, timeout_s
        os.environ |= {
            "CUDA_VISIBLE_DEVICES": ",".join(identity.node_gpus),
            "MASTER_ADDR": master_addr,
            "MASTER_PORT": str(master_port),
            "RANK": str(identity.rank),
            "WORLD_SIZE": str(identity.world_size),
            "LOCAL_RANK": str(identity.local_rank),
            "LOCAL_WORLD_SIZE": str(identity.local_world_size),
        }
        set_by_user = network.interfaces_set()
        for name, value in network.socket_environment(identity.node).items():
            os.environ.setdefault(name, value)
        timeout = timedelta(seconds=timeout_s)
        backend = "gloo"
        if identity.node_gpus:
            torch.cuda.set_device(identity.local_rank)
            threads = num_threads(identity.local_world_size, os.environ.get("OMP_NUM_THREADS"))
            os.environ["OMP_NUM_THREADS"] = str(threads)
            torch.set_num_threads(threads)
            backend = "cpu:gloo,cuda:nccl"
        try:
            if self._store is None:
                self._store = network.connect_store(master_addr, master_port, timeout)
            distributed.init_process_group(
                backend,
                store=distributed.PrefixStore("world", self._store),
                rank=identity.rank,
                world_size=identity.world_size,
                timeout=timedelta(seconds=meeting_s),
            )
            distributed.barrier()
            distributed.distributed_c10d._set_pg_timeout(timeout)
        except RuntimeError as error:
            raise network.not_met(identity.rank, identity.node, set_by_user, error) from None
        with nothing_collected():
            importlib.import_module("hybridengine.controller.row_requests")
        self._logs.rank = self.rank
        logger.info("rank %d of %d has joined pool %r", self.rank, identity.world_size, self._pool)
        self.metrics = RankMetrics(self._run_name, self._pool, self.rank)
        node_bytes = total_bytes()
        if identity.node_gpus:
            capability = torch.cuda.get_device_capability()
            return Device(torch.cuda.mem_get_info()[1], True, node_bytes, capability)
        return Device(node_bytes, False, node_bytes)

    @_answered
    def add_role(self, packed: bytes, _: Share) -> None:
        """Create the worker of a role from the pickled `NewRole`."""
        with nothing_collected():
            role: NewRole = pickle.loads(packed)
            cls = import_object(role.worker) if isinstance(role.worker, str) else role.worker
        grid = role.topology.grid
        context = RankContext(
            role.name, self.rank, grid.num_ranks, role.topology, grid.coordinate(self.rank), self._node
        )
        self._workers[role.name] = cls(context, **role.config)

    @_answered
    def call(self, packed: Any, share: Share, *inputs: Any) -> Any:
        """Run a method of a role's worker; return its result on source ranks.

        `packed` is a (pickled) `row_requests.Part`, `inputs` are what its batches are found in.
        """
        from hybridengine.controller.row_requests import traffic_bytes

        result, _, _ = self._run(packed, share, inputs)
        if not share.is_source:
            return None
        self.cost["inline_bytes"] += traffic_bytes(result)
        return result

    @ray.method(num_returns=2)
    def give_rows(self, packed: Any, share: Share, *inputs: Any) -> tuple[Outcome, Any]:
        """Run a method of a role's worker; return the description of its rows, or None after a failure."""
        outcome = self._keep(packed, share, inputs)
        stored, self._stored = self._stored, None
        return outcome, stored

    @_answered
    def _keep(self, packed: Any, share: Share, inputs: Any) -> None:
        from hybridengine.controller.stored_rows import keep_rows

        result, call, owner = self._run(packed, share, inputs)
        self._stored = keep_rows(str(call), result, len(share.rows), owner)
        self.cost["inline_bytes"] += self._stored.inline_bytes

    def _run(self, packed: Any, share: Share, inputs: Any) -> tuple[Any, Any, Any]:
        from hybridengine.controller.row_requests import Part, fetch_arguments
        from hybridengine.controller.stored_rows import Owner

        part: Part = pickle.loads(packed) if isinstance(packed, bytes) else packed
        owner = Owner(self._node, os.getpid(), self.rank)
        with telling(part.call.timeout_s):
            (args, kwargs), self.cost = fetch_arguments(part, share.rows, inputs, self._timeout_s, owner)
            role, method = part.call.role, part.call.method
            self._logs.role = role
            result = getattr(self._workers[role], method)(*args, **kwargs)
            given = (*args, *kwargs.values())
            self.work = work_of(role, method, given, result, is_source=share.is_source)
            return result, part.call, owner

    @_answered
    def leave_world(self) -> None:
        """Drop all roles and leave torch.distributed."""
        for worker in self._workers.values():
            if hasattr(worker, "close"):
                worker.close()
        self._workers.clear()
        from torch import distributed

        if distributed.is_initialized():
            distributed.destroy_process_group()


def placed_gpu(name: str, visible: str | None) -> Gpu:
    """Return the GPU with this name, given the node's CUDA_VISIBLE_DEVICES; without that, names are indices."""
    return (visible.split(",").index(name) if visible else int(name)), name


def num_threads(num_ranks: int, given: str | None) -> int:
    """Return the number of threads for each of a node's ranks: its share of the cores, or what OMP_NUM_THREADS gives.

    A single thread does not count as given: Ray sets it, since it gives each rank one of its logical CPUs.
    """
    return int(given) if given not in (None, "1") else max(1, len(os.sched_getaffinity(0)) // num_ranks)


def process_environment(use_gpus: bool, extra: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that a rank process needs before any import; `extra` takes precedence."""
    # The guard of a reward function outlives its rank to end the function and clean up.
    always = {"RAY_kill_child_processes_on_worker_exit": "0"}
    if use_gpus:
        # Every process sees all of the pool's GPUs on its node, as under torchrun; join_world restricts them.
        return always | {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"} | dict(extra)
    return always | {"OMP_NUM_THREADS": "1"} | dict(extra)

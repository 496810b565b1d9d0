"""A pool of ranks: reserved nodes, one process per rank, and one torch.distributed world over all of them."""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import accumulate
from types import TracebackType
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from hybridengine.config.sections import COLLECTIVE_SHARE
from hybridengine.controller import cluster
from hybridengine.controller.call_log import call_log
from hybridengine.controller.calls import Future
from hybridengine.controller.failures import RankFailedError
from hybridengine.controller.rank_process import RankIdentity, RankProcess, Seat, process_environment
from hybridengine.controller.relays import Asked, Branch, Relay, branches_over
from hybridengine.errors import ConfigError, WorkerError, raise_all
from hybridengine.machine import Device

logger = logging.getLogger(__name__)

MEETING_SHARE = 0.5
"""Fraction of the start timeout after which ranks report the ranks they have not met, while the pool still listens."""
LEAVE_TIMEOUT_S = 10.0
"""Time limit for ranks to leave the world before they are terminated."""


class ResourcePool:
    """Ranks on the nodes of a Ray cluster, shared by the worker groups created on it.

    Nothing starts before `start` or the creation of the first worker group. Ranks are numbered by (node, GPU), with
    nodes ordered by numeric address, not in Ray's order of bundles. As a context manager, the pool waits on normal exit
    for calls whose results were not fetched, and always terminates its processes.

        with ResourcePool(gpus_per_node=[8, 8]) as pool:
            actor = WorkerGroup(pool, ActorWorker, parallel="1-4-4", generate="1-2")
    """

    def __init__(
        self,
        ranks_per_node: Sequence[int] | None = None,
        *,
        gpus_per_node: Sequence[int] | None = None,
        name: str = "",
        run: str = "",
        json_logs: bool = False,
        use_gpus: bool = False,
        env: Mapping[str, str] | None = None,
        cpus_per_rank: int = 1,
        start_timeout_s: float = 600.0,
        timeout_s: float = 3600.0,
    ) -> None:
        """Describe a pool.

        `name` identifies the pool in records, and `run` the run in metrics and logs, which are lines of JSON with
        `json_logs`. `gpus_per_node` is short for as many ranks with `use_gpus`. `env` are environment variables that
        every process has from its start. `timeout_s` limits group calls; torch.distributed's collectives time out later,
        so that the error of the call names the missing ranks.

        Raises:
            ConfigError: none or both of ranks_per_node and gpus_per_node are given, or a number is not positive.
        """
        if (ranks_per_node is None) == (gpus_per_node is None):
            raise ConfigError("a ResourcePool takes ranks_per_node or gpus_per_node, and exactly one of them")
        self.ranks_per_node = tuple(ranks_per_node or gpus_per_node or ())
        self.name, self.run, self.json_logs = name, run, json_logs
        self.use_gpus = use_gpus or gpus_per_node is not None
        self.cpus_per_rank = cpus_per_rank
        self.start_timeout_s = start_timeout_s
        self.timeout_s = timeout_s
        if not self.ranks_per_node or any(ranks < 1 for ranks in self.ranks_per_node) or cpus_per_rank < 1:
            raise ConfigError(
                f"ranks_per_node={list(self.ranks_per_node)} with cpus_per_rank={cpus_per_rank}:"
                " give at least one node, and positive numbers"
            )
        self._env = dict(env or {})
        self._placement: PlacementGroup | None = None
        self._processes: list[Any] = []
        self._relays: list[Any] = []
        self._branches: list[Branch] = []
        """Receivers of group calls: the processes, or relays over them."""
        self._identities: list[RankIdentity] = []
        self.devices: tuple[Device, ...] = ()
        """Device of each rank; empty before the start."""
        self.roles = set[str]()
        """Roles of the pool's worker groups."""
        self._closed = False

    @property
    def num_ranks(self) -> int:
        return sum(self.ranks_per_node)

    @property
    def nodes(self) -> tuple[str, ...]:
        """Address of each rank's node; empty before the start."""
        return tuple(identity.node for identity in self._identities)

    @property
    def started(self) -> bool:
        return bool(self._identities)

    def on_nodes(
        self, function: Callable[..., Any], *arguments: Any, nodes: Collection[str] | None = None
    ) -> dict[str, Any]:
        """Return what a function of this project returns on each node (default: all of the pool), in the process of the
        node's first rank."""
        firsts = [identity.rank for identity in self._identities if identity.local_rank == 0]
        ranks = [rank for rank in firsts if nodes is None or self.nodes[rank] in nodes]
        answers = {self._processes[rank].look.remote(function, *arguments): (rank,) for rank in ranks}
        places = [f"node {node}" for node in self.nodes]
        limit_s = self.start_timeout_s
        found = Future(self, "pool", "look", answers, places=places, timeout_s=limit_s, sources=ranks).get()
        return {self.nodes[rank]: one for rank, one in zip(ranks, found, strict=True)}

    def reserve(self) -> None:
        """Reserve nodes for the ranks, in node order; only once. Raises ConfigError as `start` does."""
        if self._placement is not None:
            return
        cluster.start_ray(num_cpus=self.num_ranks * self.cpus_per_rank)
        wanted = self.ranks_per_node, self.cpus_per_rank, self.use_gpus
        raise_all(cluster.capacity_problems(*wanted, cluster.node_offers()))
        self._placement = cluster.reserve(*wanted)

    def start(self) -> None:
        """Reserve the nodes, start the rank processes and join them in one torch.distributed world; only once.

        Raises:
            ConfigError: the cluster is too small, or its nodes stay occupied.
            WorkerError: a process failed while starting, or ranks did not join in time.
        """
        if self._closed:
            raise WorkerError("the pool is closed, and its processes have ended; make a new ResourcePool")
        if self.started:
            return
        try:
            self.reserve()
            self._start_processes()
            self._join_world()
        except BaseException:
            self.close()
            raise

    def submit(
        self,
        role: str,
        method: str,
        ask: Callable[[Branch], Asked],
        *,
        sources: Sequence[int],
        timeout_s: float,
        places: Sequence[str],
        inputs: Sequence[Future] = (),
    ) -> Future:
        """Submit one call to every rank: `ask` sends it to the ranks of a branch.

        Raises RankFailedError if an earlier call whose result was not fetched has failed.
        """
        self.raise_failures()
        asked = [ask(branch) for branch in self._branches]
        future = Future(
            self,
            role,
            method,
            {one.answer: one.branch.ranks for one in asked},
            places=places,
            timeout_s=timeout_s,
            sources=sources,
            asked=asked,
            inputs=inputs,
        )
        call_log().add(future)
        return future

    def raise_failures(self) -> None:
        """Raise the RankFailedError of a call whose result was not fetched, if there is one, without waiting."""
        for call in self._unfinished():
            if call.done() and not call.reported:
                call.wait()
            if call.reported and not call.missing:
                call_log().forget([call])

    def wait(self) -> None:
        """Wait for all calls submitted so far; raises errors as `Future.wait` does."""
        for call in self._unfinished():
            if not call.reported:
                call.wait()
        call_log().forget(self._unfinished())

    @property
    def is_closed(self) -> bool:
        """True once its processes have been ended."""
        return self._closed

    def settle(self) -> None:
        """Record the calls that have ended, without waiting and without raising their failures."""
        self._unfinished()

    def _unfinished(self) -> list[Future]:
        """Return the pool's calls that are unfinished or have failed, oldest first."""
        calls: list[Future] = [call for call in call_log().unfinished if call.pool is self]
        return [call for call in calls if not call.poll() or call.failures]

    def close(self) -> None:
        """Terminate all processes and release the nodes; idle ranks leave the world first."""
        if self._closed:
            return
        self._closed = True
        unfinished = self._unfinished()
        call_log().forget(unfinished)
        if self.started and not unfinished:
            try:
                self._on_all("leave_world", LEAVE_TIMEOUT_S)
            except WorkerError as error:
                logger.warning("ranks were ended without leaving the world: %s", error)
        if not ray.is_initialized():
            return
        for process in (*self._relays, *self._processes):
            ray.kill(process)
        if self._placement is not None:
            remove_placement_group(self._placement)

    def __enter__(self) -> ResourcePool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        try:
            if error is None and self.started and not self._closed:
                self.wait()
        finally:
            self.close()

    def _start_processes(self) -> None:
        """Start the processes, bundle by bundle in node order, and number them."""
        assert self._placement is not None, "reserve comes first"
        process_class = ray.remote(RankProcess)
        # Without GPUs, process n becomes rank n; with GPUs, the rank depends on the GPU that Ray assigns.
        label = "process" if self.use_gpus else "rank"
        for bundle, num_ranks in enumerate(self.ranks_per_node):
            for _ in range(num_ranks):
                self._processes.append(
                    process_class.options(
                        num_cpus=self.cpus_per_rank,
                        num_gpus=1 if self.use_gpus else 0,
                        runtime_env={"env_vars": process_environment(self.use_gpus, self._env)},
                        scheduling_strategy=PlacementGroupSchedulingStrategy(
                            self._placement, placement_group_bundle_index=bundle
                        ),
                    ).remote(label, len(self._processes), self.run, self.name, self.json_logs)
                )
        seats = self._on_all("take_seat", self.start_timeout_s)
        self._processes, self._identities = _number(self._processes, seats, self.ranks_per_node)
        self._branches = branches_over(self._processes, self._new_relay)

    def _new_relay(self, branches: Sequence[Branch]) -> Any:
        """Start a relay over branches, on the node of the first rank."""
        assert self._placement is not None, "reserve comes first"
        bundle = bisect_right(list(accumulate(self.ranks_per_node)), branches[0].ranks.start)
        strategy = PlacementGroupSchedulingStrategy(self._placement, placement_group_bundle_index=bundle)
        relay = ray.remote(Relay).options(num_cpus=0, scheduling_strategy=strategy).remote(branches)
        self._relays.append(relay)
        return relay

    def _join_world(self) -> None:
        timeout_s, node = self.start_timeout_s, self.nodes[0]
        (port,) = self._on_all("open_store", timeout_s, [(node, timeout_s)])
        limits = MEETING_SHARE * timeout_s, COLLECTIVE_SHARE * self.timeout_s
        try:
            self.devices = tuple(
                self._on_all(
                    "join_world",
                    timeout_s,
                    [(identity, node, port, *limits) for identity in self._identities],
                )
            )
        except RankFailedError as error:  # a traceback does not name hosts and addresses
            raise (error.__cause__ if isinstance(error.__cause__, WorkerError) else error) from None

    def _on_all(
        self, method: str, timeout_s: float, arguments: Sequence[tuple[Any, ...]] | None = None
    ) -> list[Any]:
        """Return the results of a `RankProcess` method on all ranks, or on the first ones that have arguments."""
        places = [f"node {node}" for node in self.nodes] or ["not started"] * self.num_ranks
        answers: dict[Any, Sequence[int]] = {
            getattr(process, method).remote(*given): (rank,)
            for rank, (process, given) in enumerate(
                zip(self._processes, arguments or [()] * self.num_ranks, strict=False)
            )
        }
        sources = range(len(answers))
        return Future(
            self, "pool", method, answers, places=places, timeout_s=timeout_s, sources=sources
        ).get()


def _number(
    processes: Sequence[Any], seats: Sequence[Seat], ranks_per_node: Sequence[int]
) -> tuple[list[Any], list[RankIdentity]]:
    """Return processes in rank order and their identities: by node, then by GPU."""
    ordered: list[Any] = []
    identities: list[RankIdentity] = []
    begin = 0
    for num_local in ranks_per_node:
        local = sorted(range(begin, begin + num_local), key=lambda index: (seats[index][1] or (0, ""), index))
        gpus = tuple(gpu[1] for gpu in (seats[index][1] for index in local) if gpu is not None)
        for local_rank, index in enumerate(local):
            ordered.append(processes[index])
            identities.append(
                RankIdentity(len(identities), len(processes), local_rank, num_local, seats[index][0], gpus)
            )
        begin += num_local
    return ordered, identities

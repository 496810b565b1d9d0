"""The Ray cluster: starting one on this machine, what its nodes offer, and the order of nodes."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray

from hybridengine.errors import ConfigError, WorkerError

QUIET_RAY = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # the behaviour of later versions; silences a warning per process
    "RAY_prestart_worker_first_driver": "0",  # idle processes that no rank, each with its own environment, can use
    "RAY_enable_worker_prestart": "0",
}
"""Set before Ray starts here; values of the caller's environment win."""


START_ATTEMPTS = 3
"""How often to try to start Ray on this machine."""
CONNECT_LIMIT_S = 10.0
"""Until the port of a cluster answers."""


@dataclass(frozen=True)
class NodeOffer:
    """What one node of the cluster has."""

    address: str
    num_cpus: int
    num_gpus: int
    node_id: str = ""
    """Ray's."""

    def less(self, num_cpus: int, num_gpus: int) -> NodeOffer:
        """What is left of it."""
        return replace(self, num_cpus=self.num_cpus - num_cpus, num_gpus=self.num_gpus - num_gpus)

    def num_ranks(self, cpus_per_rank: int, use_gpus: bool) -> int:
        """Ranks that fit on the node."""
        by_cpus = self.num_cpus // cpus_per_rank if cpus_per_rank else self.num_gpus
        return min(by_cpus, self.num_gpus) if use_gpus else by_cpus

    def __str__(self) -> str:
        return f"{self.address} with {self.num_cpus} CPUs and {self.num_gpus} GPUs"


def start_ray(num_cpus: int | None = None, num_gpus: int | None = None) -> None:
    """Connect to the cluster that RAY_ADDRESS names, or else start a quiet one on this machine; once per process.

    `num_cpus` are logical: that many ranks can run, also on fewer cores. Ray's zero-copy tensors
    (RAY_ENABLE_ZERO_COPY_TORCH_TENSORS) are left off: they are memory that all readers of a node share, and a worker's
    in-place operation would change it for all. Where this machine's own cluster has lost its node, it is started again.
    """
    if ray.is_initialized():
        if os.environ.get("RAY_ADDRESS") or _live_nodes():
            return
        ray.shutdown()
    for name, value in QUIET_RAY.items():
        os.environ.setdefault(name, value)
    with _termination_kept():
        if os.environ.get("RAY_ADDRESS"):
            _connect(os.environ["RAY_ADDRESS"])
        else:
            _start_local(num_cpus, num_gpus)


def _start_local(num_cpus: int | None, num_gpus: int | None) -> None:
    """Ray gives its own processes 30 s, which a busy machine may not keep: try again."""
    for attempt in range(1, START_ATTEMPTS + 1):
        try:
            with _at_loopback():
                ray.init(
                    address="local",
                    num_cpus=num_cpus,
                    num_gpus=num_gpus,
                    include_dashboard=False,
                    logging_level=logging.WARNING,
                )
            return
        except Exception as error:  # Ray raises bare exceptions here
            ray.shutdown()
            if attempt == START_ATTEMPTS:
                raise WorkerError(
                    f"Ray has not started on this machine, {attempt} times over ({error}); wait until the machine is"
                    " less busy, or start Ray with `ray start --head` and set RAY_ADDRESS"
                ) from error


@contextlib.contextmanager
def _at_loopback() -> Iterator[None]:
    """Have Ray listen at 127.0.0.1, as it does on macOS: else this machine's cluster, its autoscaler's metrics included,
    would listen on all interfaces. Ray reads the environment variable for this when it is imported."""
    from ray._private import ray_constants

    before, ray_constants.ENABLE_RAY_CLUSTER = ray_constants.ENABLE_RAY_CLUSTER, False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


@contextlib.contextmanager
def _termination_kept() -> Iterator[None]:
    """Keep the program's own handler of SIGTERM: Ray puts one in its place that aborts, and leaves what is open open."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if callable(handler) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


def _connect(address: str) -> None:
    """Join a cluster.

    Raises:
        ConfigError: there is none.
    """
    host, _, port = address.rpartition(":")
    try:
        if port.isdigit() and "/" not in host:  # Ray itself tries for minutes
            socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_LIMIT_S).close()
        ray.init(address=address, logging_level=logging.WARNING)
    except (OSError, OverflowError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"no Ray cluster answers at {address!r} ({error}); start one with `ray start --head`, and where it asks"
            " for a token, export RAY_AUTH_MODE and the token here as well"
        ) from None


def node_offers() -> list[NodeOffer]:
    """What the live nodes of the connected cluster have, in node order."""
    offers = []
    for node in sorted(_live_nodes(), key=lambda node: node_key(node["NodeManagerAddress"], node["NodeID"])):
        resources: Mapping[str, float] = node["Resources"]
        offers.append(
            NodeOffer(
                node["NodeManagerAddress"],
                int(resources.get("CPU", 0)),
                int(resources.get("GPU", 0)),
                node["NodeID"],
            )
        )
    return offers


def node_addresses() -> dict[str, str]:
    """Ray's node id -> address of the live nodes."""
    return {node["NodeID"]: node["NodeManagerAddress"] for node in _live_nodes()}


def capacity_problems(
    ranks_per_node: Sequence[int], cpus_per_rank: int, use_gpus: bool, offers: Sequence[NodeOffer]
) -> list[str]:
    """Why the ranks do not fit on distinct nodes of the cluster; empty where they do."""
    fitting = sorted((offer.num_ranks(cpus_per_rank, use_gpus) for offer in offers), reverse=True)
    wanted = sorted(ranks_per_node, reverse=True)
    if len(wanted) <= len(fitting) and all(need <= room for need, room in zip(wanted, fitting, strict=False)):
        return []
    each = f"{cpus_per_rank} CPU" + (" and 1 GPU" if use_gpus else "")
    listing = "; ".join(map(str, offers)) or "no live node"
    return [
        f"ranks_per_node={list(ranks_per_node)} needs {sum(wanted)} ranks on {len(wanted)} nodes ({each} each), but"
        f" the cluster has room for {fitting} ranks per node: {listing}; choose smaller parallel sizes, or"
        " start the cluster with more nodes, CPUs or GPUs"
    ]


def node_key(address: str, node_id: str) -> tuple[Any, ...]:
    """Sort key of a node: addresses as numbers (10.0.0.9 before 10.0.0.10), then names, then Ray's node id."""
    try:
        number = ipaddress.ip_address(address)
    except ValueError:
        return (1, 0, 0, address, node_id)
    return (0, number.version, int(number), address, node_id)


def choose_nodes(ranks_per_node: Sequence[int], rooms: Sequence[int]) -> list[int] | None:
    """A node of its own for each position of `ranks_per_node`, the earliest that has room; None where they do not fit.

    `rooms[n]` is how many ranks node n can take, nodes in node order. The largest choose first, so that they are not
    left without a node that was large enough; equal ones take nodes in ascending order.
    """
    chosen = dict[int, int]()
    for position in sorted(range(len(ranks_per_node)), key=lambda index: -ranks_per_node[index]):
        fitting = (n for n, room in enumerate(rooms) if room >= ranks_per_node[position])
        node = next((n for n in fitting if n not in chosen.values()), None)
        if node is None:
            return None
        chosen[position] = node
    return [chosen[position] for position in range(len(ranks_per_node))]


def order_pools(pools: Sequence[Sequence[int]], rooms: Sequence[int]) -> list[int]:
    """In which order pools, given as their ranks per node, should choose among nodes with `rooms`.

    As they are, where all find room that way; else those with the most ranks on one node first, which have the least
    choice.
    """
    as_given = list(range(len(pools)))
    largest_first = sorted(as_given, key=lambda pool: -max(pools[pool]))
    for order in (as_given, largest_first):
        left = list(rooms)
        for pool in order:
            nodes = choose_nodes(pools[pool], left)
            if nodes is None:
                break
            for node, ranks in zip(nodes, pools[pool], strict=True):
                left[node] -= ranks
        else:
            return order
    return as_given


def order_bundles(ranks_per_node: Sequence[int], bundle_keys: Sequence[tuple[Any, ...]]) -> list[int]:
    """Bundle for each position of `ranks_per_node`: among bundles of equal size, nodes in ascending order.

    `bundle_keys[b]` is the `node_key` of the node on which Ray placed bundle b, which has ranks_per_node[b] ranks.
    Ray may place bundles of equal size on nodes in any order; ranks must not depend on it.
    """
    chosen = [0] * len(ranks_per_node)
    for size in set(ranks_per_node):
        positions = [position for position, ranks in enumerate(ranks_per_node) if ranks == size]
        for position, bundle in zip(positions, sorted(positions, key=lambda b: bundle_keys[b]), strict=True):
            chosen[position] = bundle
    return chosen


def _live_nodes() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]

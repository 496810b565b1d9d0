"""The Ray cluster: local start, ordered nodes, and reservation of nodes for pools."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import signal
import socket
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import ray
from ray._private import services
from ray._private.state import available_resources_per_node
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from hybridengine.errors import ConfigError, WorkerError, shown
from hybridengine.topology.nodes import choose_nodes, order_pools

QUIET_RAY = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # the behaviour of later versions; silences a warning per process
    "RAY_prestart_worker_first_driver": "0",  # prestarted processes are useless: each rank has its own environment
    "RAY_enable_worker_prestart": "0",
}
"""Environment variables set before Ray starts; values already in the environment take precedence."""

START_ATTEMPTS = 3
"""Number of attempts to start Ray on this machine, whose processes have 30 s: too short on a busy machine."""
CONNECT_LIMIT_S, RESERVE_TIMEOUT_S, RESERVE_POLL_S = 10.0, 60.0, 0.2
"""Time limit for nodes that another job or a recently closed pool still holds, and polling interval."""
PIN_TIMEOUT_S = 5.0
"""Time limit for reserving nodes that appeared free."""
TRY_LIMIT_S = 5.0
"""Time limit for trying whether a port can be reached."""
MOST_CONNECTING = 32
"""Number of connections that a process tries at the same time."""
MOST_NAMED = 4
"""Pools that an error names; it counts the others."""
NODE_LABEL = "ray.io/node-id"


@dataclass(frozen=True)
class NodeOffer:
    """Resources of one cluster node."""

    address: str
    num_cpus: int
    num_gpus: int
    node_id: str = ""
    """Ray's node id."""
    port: int = 0
    """Port at which Ray listens there."""

    def num_ranks(self, cpus_per_rank: int, use_gpus: bool) -> int:
        """Return the number of ranks that fit on the node."""
        by_cpus = self.num_cpus // cpus_per_rank if cpus_per_rank else self.num_gpus
        return min(by_cpus, self.num_gpus) if use_gpus else by_cpus

    def __str__(self) -> str:
        return f"{self.address} with {self.num_cpus} CPUs and {self.num_gpus} GPUs"


def start_ray(num_cpus: int | None = None, num_gpus: int | None = None, *, json_logs: bool = False) -> None:
    """Connect to the cluster named by RAY_ADDRESS, or else start a local one with little output; once per process.

    `num_cpus` is logical and may exceed the cores. With `json_logs`, Ray leaves this process's logs as they
    are, and what ranks print stays in files on their nodes. If the node of a local cluster was lost, the cluster is
    restarted.
    """
    if ray.is_initialized():
        if os.environ.get("RAY_ADDRESS") or _live_nodes():
            return
        ray.shutdown()
    os.environ.update(QUIET_RAY | dict(os.environ))
    with _own_sigterm():
        if os.environ.get("RAY_ADDRESS"):
            _connect(os.environ["RAY_ADDRESS"], _logging(json_logs))
        else:
            _start_local(num_cpus, num_gpus, _logging(json_logs))


def _logging(json_logs: bool) -> dict[str, Any]:
    """Return Ray's settings of logging."""
    if json_logs:
        return {"configure_logging": False, "log_to_driver": False}
    return {"logging_level": logging.WARNING}


@contextlib.contextmanager
def _own_sigterm() -> Iterator[None]:
    """Keep this process's handler of SIGTERM while Ray starts: Ray's two end the process, one aborts it after 3 s."""
    from ray._private import utils

    before, utils.set_sigterm_handler = utils.set_sigterm_handler, lambda _: None
    try:
        yield
    finally:
        utils.set_sigterm_handler = before
        with contextlib.suppress(ValueError):  # in another thread than the main one
            signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM) or signal.SIG_DFL)


def _start_local(num_cpus: int | None, num_gpus: int | None, logs: Mapping[str, Any]) -> None:
    for attempt in range(1, START_ATTEMPTS + 1):
        try:
            with _at_loopback():
                ray.init(
                    address="local",
                    num_cpus=num_cpus,
                    num_gpus=num_gpus,
                    include_dashboard=False,
                    **logs,
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
    """Make the local cluster listen on 127.0.0.1 only, as on macOS. Ray reads the variable when it is imported."""
    from ray._private import ray_constants

    before, ray_constants.ENABLE_RAY_CLUSTER = ray_constants.ENABLE_RAY_CLUSTER, False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


def _connect(address: str, logs: Mapping[str, Any]) -> None:
    found = address
    try:
        if "/" not in address:  # what Ray makes of auto, and of loopback: the node's address
            found = services.canonicalize_bootstrap_address(address) or address
        host, _, port = found.rpartition(":")
        if port.isdigit() and "/" not in host:  # Ray itself retries for minutes
            socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_LIMIT_S).close()
        ray.init(address=address, **logs)
    except (OSError, OverflowError, RuntimeError, ValueError) as error:
        looked = "" if found == address else f"{found}: "
        raise ConfigError(
            f"no Ray cluster answers at {address!r} ({looked}{error}); start one with `ray start --head`, and where it"
            " asks for a token, export RAY_AUTH_MODE and the token here as well"
        ) from None


def node_offers(*, free: bool = False) -> list[NodeOffer]:
    """Return the total or free resources of the live nodes of the connected cluster, in node order."""
    available = available_resources_per_node() if free else {}
    offers = []
    for node in _live_nodes():
        resources = available.get(node["NodeID"], {}) if free else node["Resources"]
        cpus, gpus = (int(resources.get(kind, 0)) for kind in ("CPU", "GPU"))
        place = node["NodeManagerAddress"], cpus, gpus, node["NodeID"], node["NodeManagerPort"]
        offers.append(NodeOffer(*place))
    return sorted(offers, key=lambda offer: node_key(offer.address, offer.node_id))


def host_names() -> dict[str, str]:
    """Return the names of the cluster's hosts by their nodes' addresses."""
    return {node["NodeManagerAddress"]: node["NodeManagerHostname"] for node in ray.nodes()}


def reserve(ranks_per_node: Sequence[int], cpus_per_rank: int, use_gpus: bool) -> PlacementGroup:
    """Reserve the first nodes with enough room, one for each number of ranks; raise ConfigError if they stay occupied."""
    bundles = [
        {"CPU": ranks * cpus_per_rank} | ({"GPU": ranks} if use_gpus else {}) for ranks in ranks_per_node
    ]
    deadline = time.monotonic() + RESERVE_TIMEOUT_S
    while True:
        offers = node_offers(free=True)
        nodes = _choose_answering(ranks_per_node, offers, cpus_per_rank, use_gpus)
        if nodes is not None:
            placement = placement_group(
                bundles,  # pyright: ignore[reportArgumentType]
                strategy="STRICT_SPREAD" if len(bundles) > 1 else "STRICT_PACK",
                bundle_label_selector=[{NODE_LABEL: offers[node].node_id} for node in nodes],
            )
            if placement.wait(timeout_seconds=PIN_TIMEOUT_S):
                return placement
            remove_placement_group(placement)  # another job was faster
        if time.monotonic() >= deadline:
            raise ConfigError(
                f"ranks_per_node={list(ranks_per_node)} fits in the cluster, but was not free within"
                f" {RESERVE_TIMEOUT_S:g} s (free now: {_listing(offers)}); close the other pools, or wait for other jobs"
                " to end"
            )
        time.sleep(RESERVE_POLL_S)


def _choose_answering(
    ranks_per_node: Sequence[int], offers: Sequence[NodeOffer], cpus_per_rank: int, use_gpus: bool
) -> list[int] | None:
    """Return the first nodes with enough room, those that answer if there are enough of them; None without room.

    Ray knows for a minute nothing of a host that has disappeared, and a placement there keeps the other nodes' CPUs.
    """
    rooms = [offer.num_ranks(cpus_per_rank, use_gpus) for offer in offers]
    left = list(rooms)
    while (nodes := choose_nodes(ranks_per_node, left)) is not None:
        answers = which_answer([offers[node] for node in nodes])
        if all(answers):
            return list(nodes)
        for node, is_there in zip(nodes, answers, strict=True):
            left[node] = left[node] if is_there else 0
    nodes = choose_nodes(ranks_per_node, rooms)
    return None if nodes is None else list(nodes)


def connection_error(address: str, port: int) -> str:
    """Return the reason why no connection to a port is possible; empty if one is."""
    try:
        socket.create_connection((address, port), timeout=TRY_LIMIT_S).close()
    except OSError as error:
        return f"{type(error).__name__}: {error.strerror or error}"
    return ""


def which_answer(offers: Sequence[NodeOffer]) -> list[bool]:
    """Return for each node whether Ray's port there can be reached, or is not known."""
    with ThreadPoolExecutor(MOST_CONNECTING) as threads:
        return list(
            threads.map(lambda one: not (one.port and connection_error(one.address, one.port)), offers)
        )


def capacity_problems(
    ranks_per_node: Sequence[int], cpus_per_rank: int, use_gpus: bool, offers: Sequence[NodeOffer]
) -> list[str]:
    """Return the reasons why the ranks do not fit on distinct nodes of the cluster; empty if they do."""
    rooms = [offer.num_ranks(cpus_per_rank, use_gpus) for offer in offers]
    if choose_nodes(ranks_per_node, rooms) is not None:
        return []
    each = f"{cpus_per_rank} CPU" + (" and 1 GPU" if use_gpus else "")
    without = "; cluster.device=cpu trains without GPUs" if use_gpus else ""
    return [
        f"ranks_per_node={shown(ranks_per_node)} needs {sum(ranks_per_node)} ranks on {len(ranks_per_node)} nodes"
        f" ({each} each), but the cluster has room for {shown(sorted(rooms, reverse=True))} ranks per node:"
        f" {_listing(offers)}; choose smaller parallel sizes, or start the cluster with more nodes, CPUs or"
        f" GPUs{without}"
    ]


def place_pools(
    pools: Mapping[str, Sequence[int]], offers: Sequence[NodeOffer], use_gpus: bool
) -> tuple[dict[str, list[str]], list[str]]:
    """Return the node of each rank by pool, placed as in a run, and the reasons why pools do not fit.

    Pools NAME.0, NAME.1 ... are engines, whose ranks are together those of NAME.
    """
    rooms = [offer.num_ranks(1, use_gpus) for offer in offers]
    room, names, places = sum(rooms), list(pools), dict[str, list[str]]()
    misfits, crowded = list[str](), list[str]()
    for place in order_pools(list(pools.values()), rooms):
        pool = pools[names[place]]
        problems = capacity_problems(pool, 1, use_gpus, offers)
        nodes = choose_nodes(pool, rooms)
        if problems or nodes is None:
            misfits += problems
            crowded += (
                [] if problems else [f"{_what_is_started(names[place])} with ranks_per_node={shown(pool)}"]
            )
            continue
        places[names[place]] = []
        for node, count in zip(nodes, pool, strict=True):
            rooms[node] -= count
            places[names[place]] += [offers[node].address] * count
    if crowded:
        others = f" and {len(crowded) - MOST_NAMED} more" if len(crowded) > MOST_NAMED else ""
        wanted = sum(map(sum, pools.values()))
        misfits.append(
            f"no nodes with room are left for {', '.join(crowded[:MOST_NAMED])}{others}: the run wants {wanted} ranks,"
            f" and the cluster has room for {room}: {_listing(offers)}; choose smaller parallel sizes, put roles on one"
            " pool, or start the cluster with more nodes, CPUs or GPUs"
        )
    found, unplaced = defaultdict[str, list[str]](list), {_configured(name) for name in {*names} - {*places}}
    for name in names:
        found[_configured(name)] += places.get(name, [])
    return {name: nodes for name, nodes in found.items() if name not in unplaced}, misfits


def _configured(pool: str) -> str:
    """Return the pool of the configuration that a started pool is, or whose engine it is."""
    return pool.partition(".")[0]


def _what_is_started(pool: str) -> str:
    """Return "pool 'NAME'", or which engine of it."""
    name, _, engine = pool.partition(".")
    return f"engine {engine} of pool {name!r}" if engine else f"pool {name!r}"


def _listing(offers: Sequence[NodeOffer]) -> str:
    """Return the nodes as text, and those that Ray has lost."""
    alive = {offer.address for offer in offers}
    gone = {
        node["NodeManagerAddress"]: node["NodeManagerHostname"]
        for node in (ray.nodes() if ray.is_initialized() else [])
        if not node["Alive"] and node["NodeManagerAddress"] not in alive
    }
    lost = [f"{address} (host {host}), which no longer answers Ray" for address, host in gone.items()]
    return "; ".join([*map(str, offers), *lost]) or "no live node"


def node_key(address: str, node_id: str) -> tuple[Any, ...]:
    """Return the sort key of a node: addresses as numbers (10.0.0.9 before 10.0.0.10), then names, then Ray's node id."""
    try:
        number = ipaddress.ip_address(address)
    except ValueError:
        return (1, 0, 0, address, node_id)
    return (0, number.version, int(number), address, node_id)


def _live_nodes() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]

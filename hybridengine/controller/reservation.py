"""Nodes for a pool: the first ones in node order that have room, held by a Ray placement group.

Ray's own choice among nodes may be another one each time. Where other jobs hold the nodes that are first in order, Ray
chooses, and only the order among the chosen nodes is ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from hybridengine.controller import cluster
from hybridengine.errors import ConfigError

PIN_TIMEOUT_S = 5.0
"""Wait for the nodes that are first in order; then any that are free will do."""
RESERVE_TIMEOUT_S = 60.0
"""Wait for nodes that another job or a pool closed just now still holds."""
NODE_LABEL = "ray.io/node-id"


@dataclass(frozen=True)
class Reservation:
    """Nodes that a pool holds."""

    ranks_per_node: tuple[int, ...]
    cpus_per_rank: int
    use_gpus: bool
    placement: PlacementGroup
    bundles: tuple[int, ...] = ()
    """The placement group's bundle for each position of `ranks_per_node`."""
    node_ids: tuple[str, ...] = ()
    """Ray's id of the node at each position."""

    def give_back(self) -> None:
        """Let others have the nodes."""
        _held[:] = [held for held in _held if held is not self]
        remove_placement_group(self.placement)


_held: list[Reservation] = []
"""Reservations of this controller."""


def reserve(ranks_per_node: Sequence[int], cpus_per_rank: int, use_gpus: bool) -> Reservation:
    """Hold a node for each number of ranks.

    Raises:
        ConfigError: the nodes stay occupied.
    """
    wanted = Reservation(tuple(ranks_per_node), cpus_per_rank, use_gpus, PlacementGroup.empty())
    placement = _pinned(wanted) or _anywhere(wanted)
    node_ids: Mapping[int, str] = placement_group_table(placement)["bundles_to_node_id"]
    addresses = cluster.node_addresses()
    keys = [
        cluster.node_key(addresses[node_ids[bundle]], node_ids[bundle])
        for bundle in range(len(ranks_per_node))
    ]
    bundles = tuple(cluster.order_bundles(ranks_per_node, keys))
    held = replace(
        wanted,
        placement=placement,
        bundles=bundles,
        node_ids=tuple(node_ids[bundle] for bundle in bundles),
    )
    _held.append(held)
    return held


def _pinned(wanted: Reservation) -> PlacementGroup | None:
    """On the first nodes that this controller has left room on; None where others are on them."""
    offers = cluster.node_offers()
    for held in _held:
        for node_id, ranks in zip(held.node_ids, held.ranks_per_node, strict=True):
            taken = ranks * held.cpus_per_rank, ranks if held.use_gpus else 0
            offers = [offer.less(*taken) if offer.node_id == node_id else offer for offer in offers]
    rooms = [offer.num_ranks(wanted.cpus_per_rank, wanted.use_gpus) for offer in offers]
    nodes = cluster.choose_nodes(wanted.ranks_per_node, rooms)
    if nodes is None:
        return None
    labels = [{NODE_LABEL: offers[node].node_id} for node in nodes]
    placement = _placement(wanted, labels)
    if placement.wait(timeout_seconds=PIN_TIMEOUT_S):
        return placement
    remove_placement_group(placement)
    return None


def _anywhere(wanted: Reservation) -> PlacementGroup:
    """On nodes of Ray's choice."""
    placement = _placement(wanted, None)
    if placement.wait(timeout_seconds=RESERVE_TIMEOUT_S):
        return placement
    remove_placement_group(placement)
    free = {name: ray.available_resources().get(name, 0.0) for name in ("CPU", "GPU")}
    raise ConfigError(
        f"ranks_per_node={list(wanted.ranks_per_node)} fits in the cluster, but was not free within"
        f" {RESERVE_TIMEOUT_S:g} s (free now: {free['CPU']:g} CPUs, {free['GPU']:g} GPUs);"
        " close the other pools, or wait for other jobs to end"
    )


def _placement(wanted: Reservation, labels: list[dict[str, str]] | None) -> PlacementGroup:
    bundles = [
        {"CPU": ranks * wanted.cpus_per_rank} | ({"GPU": ranks} if wanted.use_gpus else {})
        for ranks in wanted.ranks_per_node
    ]
    strategy = "STRICT_SPREAD" if len(bundles) > 1 else "STRICT_PACK"
    return placement_group(bundles, strategy=strategy, bundle_label_selector=labels)  # pyright: ignore[reportArgumentType]

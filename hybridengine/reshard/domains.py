"""Domains: groups of ranks among which weights move when one layout is converted into another.

Where training replicas repeat a shard, every rank is served by its own replica. A rank is linked to each rank that holds
something it needs and lacks, and a domain is a connected component of these links. It follows from the two layouts alone,
whatever axes they have; ranks that exchange nothing are separate domains.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from functools import cache, lru_cache
from typing import TypeVar

from hybridengine.reshard.boxes import Box, intersect, subtract
from hybridengine.reshard.layout import Layout, ShardKey
from hybridengine.topology.grid import Groups

Element = TypeVar("Element", bound=Hashable)
Place = tuple[ShardKey | None, ShardKey | None]
"""Source and destination shard of a rank; None where it has none."""


@lru_cache(maxsize=4)
def domains(source: Layout, destination: Layout) -> Groups:
    """Return the domains of all ranks of two layouts of one model, each ascending, ordered by their first ranks."""
    choices = {key: _choices(source, destination, key) for key in set(destination.keys.values())}

    @cache
    def connected(places: tuple[Place, ...]) -> list[tuple[int, ...]]:
        return components(_links(places, choices))

    found = []
    for ranks in _replicas(source, destination):
        places = tuple([(source.keys.get(rank), destination.keys.get(rank)) for rank in ranks])
        found += [tuple(sorted(ranks[index] for index in part)) for part in connected(places)]
    return tuple(sorted(found))


def _replicas(source: Layout, destination: Layout) -> Iterable[list[int]]:
    """Return the ranks of each full model; ranks without a source shard are distributed over the models."""
    alike: dict[Place, list[int]] = {}
    for rank in sorted({**source.keys, **destination.keys}):
        place = source.keys.get(rank), None if rank in source.keys else destination.keys[rank]
        alike.setdefault(place, []).append(rank)
    num_replicas = min(len(ranks) for (held, _), ranks in alike.items() if held is not None)
    replicas: dict[int, list[int]] = {}
    for ranks in alike.values():
        for index, rank in enumerate(ranks):
            replicas.setdefault(index * num_replicas // len(ranks), []).append(rank)
    return replicas.values()


def _links(
    places: tuple[Place, ...], choices: dict[ShardKey, set[frozenset[ShardKey]]]
) -> Iterator[list[int]]:
    """Yield, for each of `places`, its index and the indices of the places that serve it."""
    holder: dict[ShardKey, int] = {}
    for index, (held, _) in enumerate(places):
        if held is not None:
            holder.setdefault(held, index)
    for index, (held, needed) in enumerate(places):
        servers = set() if needed is None else _servers(held, choices[needed])
        yield [index, *(holder[key] for key in servers)]


def _servers(held: ShardKey | None, choices: set[frozenset[ShardKey]]) -> set[ShardKey]:
    """Return shards from which a rank with the shard `held` reads, one of each of `choices`."""
    lacking = [keys for keys in choices if held not in keys]
    servers = {key for keys in lacking if len(keys) == 1 for key in keys}
    for keys in sorted(map(sorted, lacking)):
        if servers.isdisjoint(keys):  # prefer the holder with most in common with the rank's shard
            servers.add(min(keys, key=lambda key: sum(a != b for a, b in zip(key, held or key, strict=True))))
    return servers


def _choices(source: Layout, destination: Layout, key: ShardKey) -> set[frozenset[ShardKey]]:
    """Return, for every part of a destination shard, the keys of the source shards that hold it."""
    held = _held(source)
    needed = {
        (held[tensor], piece.box)
        for tensor, pieces in destination.shards[key].pieces.items()
        for _, piece in pieces
        if tensor in held
    }
    return {keys for holders, box in needed for keys in _cut(box, holders) if keys}


_Holders = tuple[tuple[ShardKey, Box], ...]


@lru_cache(maxsize=4)
def _held(source: Layout) -> dict[str, _Holders]:
    """Return logical tensor -> shards that hold a part of it, with the part; equal holdings share one object."""
    alike: dict[_Holders, _Holders] = {}
    found = {}
    for tensor, pieces in source.holders.items():
        holders = tuple((key, piece.box) for key, piece in pieces)
        found[tensor] = alike.setdefault(holders, holders)
    return found


def _cut(box: Box, holders: _Holders) -> set[frozenset[ShardKey]]:
    """Return the holders' keys of each part of a box, cut along the boxes of its holders."""
    parts: list[tuple[Box, frozenset[ShardKey]]] = [(box, frozenset())]
    for key, held in holders:
        cut = []
        for part, keys in parts:
            common = intersect(part, held)
            if common is None:
                cut.append((part, keys))
            else:
                cut += [(common, keys | {key}), *((rest, keys) for rest in subtract(part, common))]
        parts = cut
    return {keys for _, keys in parts}


def components(links: Iterable[Iterable[Element]]) -> list[tuple[Element, ...]]:
    """Return groups of elements connected by links, directly or indirectly; all are in order of first appearance."""
    leader: dict[Element, Element] = {}

    def find(element: Element) -> Element:
        while leader.setdefault(element, element) != element:
            leader[element] = element = leader[leader[element]]
        return element

    for first, *others in links:
        one = find(first)
        for other in others:
            leader[find(other)] = one
    found: dict[Element, list[Element]] = {}
    for element in leader:
        found.setdefault(find(element), []).append(element)
    return [tuple(component) for component in found.values()]

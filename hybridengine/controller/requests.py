"""Arguments of a group call, cut for each rank: requests for its rows in place of batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ray import ObjectRef
from tensordict import TensorDictBase

from hybridengine.controller.calls import Arguments
from hybridengine.controller.futures import Future
from hybridengine.controller.row_requests import RowsRequest
from hybridengine.controller.rows import Batches, Produced, Rows
from hybridengine.errors import ProtocolError
from hybridengine.protocols import GroupTopology, Protocol, Registration
from hybridengine.runtime.batch import payload_bytes


@dataclass(frozen=True)
class Requests:
    """A group call's arguments, rank by rank."""

    parts: list[Arguments]
    """The distinct ones."""
    part_of_rank: list[int]
    ranges: tuple[range, ...] | None
    """Rows of each rank; None where the call was given none."""
    batches: list[list[ObjectRef]]
    """References to the `StoredRows` that each part's requests refer to."""
    produced: list[Produced]
    """Whose they are: calls that must end before this one can."""
    part_payload_bytes: list[int]
    """Bytes of rows that each part brings from the controller."""


def split_requests(
    registration: Registration,
    topology: GroupTopology,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    operation: str,
) -> Requests:
    """Cut a call's arguments for the ranks of a group.

    Rows are split as the protocol says; futures are waited for; all other values go to every rank unchanged. Protocols
    that take items give each rank its item of every argument.

    Raises:
        ProtocolError: rows differ in number, or cannot be split over the group.
        WorkerError: the call behind a future failed or did not end.
    """
    protocol = registration.protocol
    arguments = _plain(args, kwargs)
    values = [*arguments[0], *arguments[1].values()]
    if protocol.takes_items:
        return _items(protocol, topology, arguments, operation)
    sizes = {len(value) for value in values if isinstance(value, Rows)}
    if len(sizes) > 1:
        raise ProtocolError(
            f"{operation} got arguments with {' and '.join(map(str, sorted(sizes)))} rows;"
            " all of them must have the same number"
        )
    if not sizes:
        return Requests([arguments], [0] * topology.num_ranks, None, [[]], [], [0])
    ranges = _row_ranges(protocol, sizes.pop(), topology, operation)
    produced = list(
        dict.fromkeys(
            source.origin
            for value in values
            if isinstance(value, Rows)
            for source in value.sources
            if isinstance(source.origin, Produced)
        )
    )
    distinct = list(dict.fromkeys(ranges))
    parts, batches = [], []
    for rows in distinct:
        needed: Batches = {}

        def request(value: Any, rows: range = rows, needed: Batches = needed) -> Any:
            if not isinstance(value, Rows):
                return value
            return value.request(rows, registration.columns, needed, registration.optional)

        parts.append(_map(arguments, request))
        batches.append(list(needed))
    place = {rows: number for number, rows in enumerate(distinct)}
    return Requests(
        parts,
        [place[rows] for rows in ranges],
        ranges,
        batches,
        produced,
        [traffic_bytes(part) for part in parts],
    )


def _row_ranges(
    protocol: Protocol, num_rows: int, topology: GroupTopology, operation: str
) -> tuple[range, ...]:
    try:
        return protocol.row_ranges(num_rows, topology)
    except ProtocolError as error:
        raise ProtocolError(f"{operation}: {error}") from None


def _plain(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Arguments:
    """Futures replaced by their results, batches by references to them."""

    def value(argument: Any) -> Any:
        if isinstance(argument, Future):
            argument = argument.get()
        return Rows.of(argument) if isinstance(argument, TensorDictBase) else argument

    return _map((tuple(args), dict(kwargs)), value)


def _map(arguments: Arguments, function: Any) -> Arguments:
    args, kwargs = arguments
    return tuple(map(function, args)), {name: function(value) for name, value in kwargs.items()}


def _items(protocol: Protocol, topology: GroupTopology, arguments: Arguments, operation: str) -> Requests:
    args, kwargs = arguments
    values = [*args, *kwargs.values()]
    sizes = {_num_items(value, protocol, topology, operation) for value in values} or {topology.num_ranks}
    if len(sizes) > 1:
        raise ProtocolError(
            f"{operation} got lists of {' and '.join(map(str, sorted(sizes)))} items; give each rank one of every list"
        )
    ranges = _row_ranges(protocol, sizes.pop(), topology, operation)
    parts = [_map(arguments, lambda value, rank=rows.start: value[rank]) for rows in ranges]
    payload = [traffic_bytes([*args, *kwargs.values()]) for args, kwargs in parts]
    return Requests(parts, list(range(topology.num_ranks)), None, [[] for _ in parts], [], payload)


def _num_items(value: Any, protocol: Protocol, topology: GroupTopology, operation: str) -> int:
    if not isinstance(value, (list, tuple)):
        raise ProtocolError(
            f"{operation} got a {type(value).__name__}, but {protocol.name} takes lists with one item per rank;"
            f" pass a list of {topology.num_ranks} items"
        )
    return len(value)


def traffic_bytes(value: Any) -> int:
    """Return the bytes of the batches in a value, in its items, or in a request; other values count nothing."""
    if isinstance(value, TensorDictBase):
        return payload_bytes(value)
    if isinstance(value, RowsRequest):
        value = value.origins
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return sum(map(traffic_bytes, value))
    return 0

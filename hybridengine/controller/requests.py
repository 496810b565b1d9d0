"""Arguments of a group call split by rank, with requests for rows in place of batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ray import ObjectRef
from tensordict import TensorDictBase

from hybridengine.controller.calls import Arguments, map_arguments
from hybridengine.controller.futures import Future
from hybridengine.controller.row_requests import traffic_bytes
from hybridengine.controller.rows import Batches, Rows
from hybridengine.errors import ProtocolError
from hybridengine.rows.protocols import GroupTopology, Registration


@dataclass(frozen=True, eq=False)
class Part:
    """Arguments of one or more ranks."""

    arguments: Arguments
    batches: list[ObjectRef]
    """References to the `StoredRows` that requests in the arguments refer to."""

    @cached_property
    def num_bytes(self) -> int:
        """Bytes of rows sent by the controller."""
        return traffic_bytes(self.arguments)


@dataclass(frozen=True)
class Requests:
    """A group call's arguments, rank by rank."""

    parts: list[Part]
    """Part of each rank; ranks with equal arguments share one."""
    ranges: tuple[range, ...] | None
    """Rows of each rank; None if the call has no rows."""
    inputs: list[Future]
    """Calls that produce the rows, and which must end before this call can."""


def split_requests(
    registration: Registration,
    topology: GroupTopology,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    operation: str,
) -> Requests:
    """Split a call's arguments for the ranks of a group.

    Rows are split by the protocol; futures are awaited; all other values go to every rank unchanged. Protocols that take
    items give each rank its item of every argument.

    Raises:
        ProtocolError: batches differ in their number of rows, or cannot be split over the group.
        WorkerError: the call behind a future failed or did not end.
    """
    protocol = registration.protocol
    arguments = _plain(args, kwargs)
    sized = [*arguments[0], *arguments[1].values()]
    if protocol.takes_items:
        for value in sized:
            if not isinstance(value, (list, tuple)):
                raise ProtocolError(
                    f"{operation} got a {type(value).__name__}, but {protocol.name} takes lists with one item per rank;"
                    f" pass a list of {topology.num_ranks} items"
                )
    else:
        sized = [value for value in sized if isinstance(value, Rows)]
    sizes = {len(value) for value in sized}
    if len(sizes) > 1:
        raise ProtocolError(
            f"{operation} got arguments with {' and '.join(map(str, sorted(sizes)))}"
            f" {'items' if protocol.takes_items else 'rows'}; all of them must have the same number"
        )
    ranges = (range(0),) * topology.num_ranks
    if sizes or protocol.takes_items:
        try:
            ranges = protocol.row_ranges(sizes.pop() if sizes else topology.num_ranks, topology)
        except ProtocolError as error:
            raise ProtocolError(f"{operation}: {error}") from None

    def part(rows: range) -> Part:
        needed: Batches = {}

        def value(argument: Any) -> Any:
            if protocol.takes_items:
                return argument[rows.start]
            if not isinstance(argument, Rows):
                return argument
            return argument.request(rows, registration.columns, needed, registration.optional)

        return Part(map_arguments(arguments, value), list(needed))

    parts = {rows: part(rows) for rows in dict.fromkeys(ranges)}
    has_rows = bool(sized) and not protocol.takes_items
    inputs = [call for value in sized if isinstance(value, Rows) for call in value.calls]
    return Requests([parts[rows] for rows in ranges], ranges if has_rows else None, inputs)


def _plain(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Arguments:
    """Return the arguments with futures replaced by their results, and batches by references to them."""

    def value(argument: Any) -> Any:
        if isinstance(argument, Future):
            argument = argument.get()
        return Rows.of(argument) if isinstance(argument, TensorDictBase) else argument

    return map_arguments((tuple(args), dict(kwargs)), value)

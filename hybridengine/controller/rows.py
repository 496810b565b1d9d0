"""Rows on their way between the controller and the ranks of a group, as a protocol says.

This is the one place where rows pass through the controller. `resolve` is where a future becomes rows here; rows that
stay on their ranks would be re-split at that point, by the row ranges of both protocols.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tensordict import TensorDictBase

from hybridengine.controller.futures import Future
from hybridengine.controller.rank_process import Arguments
from hybridengine.errors import ProtocolError
from hybridengine.protocols import GroupTopology, Protocol
from hybridengine.runtime.batch import concat_rows, num_rows, payload_bytes, slice_rows


def resolve(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Arguments:
    """The arguments with futures replaced by their results; waits for those that are not complete.

    Raises:
        WorkerError: the call behind a future failed or did not end.
    """

    def value(argument: Any) -> Any:
        return argument.get() if isinstance(argument, Future) else argument

    return tuple(value(argument) for argument in args), {
        name: value(argument) for name, argument in kwargs.items()
    }


def split_arguments(
    protocol: Protocol, topology: GroupTopology, arguments: Arguments, operation: str
) -> tuple[list[Arguments], list[int]]:
    """(distinct arguments, which of them each rank gets).

    Batches (TensorDict) are split by rows; all other values go to every rank unchanged. Protocols that take items
    give each rank its item of every argument.

    Raises:
        ProtocolError: batches differ in their number of rows, or cannot be split over the group.
    """
    args, kwargs = arguments
    values = [*args, *kwargs.values()]
    if protocol.takes_items:
        sizes = {_num_items(value, protocol, topology, operation) for value in values} or {topology.num_ranks}
    else:
        sizes = {num_rows(value) for value in values if isinstance(value, TensorDictBase)}
    if not sizes:  # nothing to split
        return [arguments], [0] * topology.num_ranks
    if len(sizes) > 1:
        raise ProtocolError(
            f"{operation} got arguments with {' and '.join(map(str, sorted(sizes)))} rows;"
            " all of them must have the same number"
        )
    ranges = protocol.row_ranges(sizes.pop(), topology)
    distinct = list(dict.fromkeys(ranges))

    def part(value: Any, rows: range) -> Any:
        if protocol.takes_items:
            return value[rows.start]
        return slice_rows(value, rows) if isinstance(value, TensorDictBase) else value

    parts = [
        (
            tuple(part(value, rows) for value in args),
            {name: part(value, rows) for name, value in kwargs.items()},
        )
        for rows in distinct
    ]
    return parts, [distinct.index(rows) for rows in ranges]


def collect_results(protocol: Protocol, results: list[Any], operation: str) -> Any:
    """The result of a group call from those of its source ranks, in row order.

    Raises:
        ProtocolError: some ranks returned a batch where others did not, or batches with other columns.
    """
    are_batches = [isinstance(result, TensorDictBase) for result in results]
    if not protocol.concatenates or not any(are_batches):
        return results
    if not all(are_batches):
        raise ProtocolError(
            f"{operation} returned a TensorDict on {sum(are_batches)} of {len(results)} source ranks;"
            f" {protocol.name} concatenates rows: return one on every rank, or on none"
        )
    return concat_rows(results)


def traffic_bytes(value: Any) -> int:
    """Bytes of the batches among a value, a list of values or call arguments; other values count nothing."""
    if isinstance(value, TensorDictBase):
        return payload_bytes(value)
    if isinstance(value, (list, tuple)):
        return sum(traffic_bytes(item) for item in value)
    if isinstance(value, dict):
        return sum(traffic_bytes(item) for item in value.values())
    return 0


def _num_items(value: Any, protocol: Protocol, topology: GroupTopology, operation: str) -> int:
    if not isinstance(value, (list, tuple)):
        raise ProtocolError(
            f"{operation} got a {type(value).__name__}, but {protocol.name} takes lists with one item per rank;"
            f" pass a list of {topology.num_ranks} items"
        )
    return len(value)

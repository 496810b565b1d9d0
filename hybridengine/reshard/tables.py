"""Conversion of the entries of a family's tables to the parameters of one tensor-parallel rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from hybridengine.families.tables import Entry, Rows, Stack, Whole
from hybridengine.reshard.layout import LocalParameter, row_stack, sharded, whole


def layer_parameters(
    entries: Iterable[Entry],
    prefixes: tuple[str, str],
    tensors: Mapping[str, tuple[int, ...]],
    tp_rank: int,
    tp_size: int,
) -> list[LocalParameter]:
    """Return the parameters of one decoder layer on rank `tp_rank` of `tp_size`.

    Args:
        prefixes: prefix of the layer's parameter names, and of its logical tensors.
        tensors: logical tensor -> shape, with the prefix.
    """
    parameter_prefix, tensor_prefix = prefixes
    parameters = []
    for entry in entries:
        name = parameter_prefix + entry.name
        if isinstance(entry, Stack):
            ranges = _ranges(entry, tp_rank, tp_size)
            named = [(tensor_prefix + tensor, span) for tensor, span in ranges]
            parameters.append(row_stack(name, [(tensor, tensors[tensor], span) for tensor, span in named]))
            continue
        tensor = tensor_prefix + entry.tensor
        shape = tensors[tensor]
        if isinstance(entry, Whole):
            parameters.append(whole(name, tensor, shape))
        else:
            parameters.append(sharded(name, tensor, shape, dim=1, index=tp_rank, count=tp_size))
    return parameters


def _ranges(stack: Stack, tp_rank: int, tp_size: int) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield (logical tensor, range of rows) from top to bottom."""
    if stack.groups is None:
        for section in stack.sections:
            yield section.tensor, _share(section, tp_rank, tp_size)
        return
    groups = stack.groups // tp_size
    for group in range(tp_rank * groups, (tp_rank + 1) * groups):
        for section in stack.sections:
            yield section.tensor, _share(section, group, stack.groups)


def _share(section: Rows, index: int, count: int) -> tuple[int, int]:
    """Return the rows of share `index` of `count`; with fewer units than shares, consecutive shares get the same unit."""
    shares = min(count, section.units)
    size, index = (section.stop - section.start) // shares, index * shares // count
    return section.start + index * size, section.start + (index + 1) * size

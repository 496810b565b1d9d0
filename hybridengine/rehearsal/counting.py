"""Counts of what an iteration needs on one rank: bytes of storages, and messages by process group."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroup
from torch.distributed import get_process_group_ranks
from torch.utils._pytree import tree_leaves

from hybridengine.rehearsal.figures import Traffic
from hybridengine.rehearsal.replacing import replaced


class StorageCounter:
    """Bytes of all storages that exist, and the most that have existed; those in host memory are not counted."""

    def __init__(self) -> None:
        self.live_bytes = 0
        self.peak_bytes = 0
        self._sizes: dict[int, int] = {}
        self._references: dict[int, weakref.ref[Any]] = {}
        self._on_host: set[int] = set()
        self._makes_host_memory = False

    def observe(self, func: object, args: Sequence[Any], result: Any) -> None:
        """Count the storages of an operation's result."""
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.device.type != "meta":
                self.add(leaf)

    def add(self, tensor: Tensor) -> None:
        """Count the storage of a tensor, once."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = 0
            if self._makes_host_memory:
                self._on_host.add(key)
            self._references[key] = weakref.ref(storage, lambda _: self._forget(key))
        self._resize(key, storage.nbytes())

    def _resize(self, key: int, num_bytes: int) -> None:
        if key not in self._on_host:
            self.live_bytes += num_bytes - self._sizes[key]
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        self._sizes[key] = num_bytes

    def _forget(self, key: int) -> None:
        self._resize(key, 0)
        del self._sizes[key], self._references[key]
        self._on_host.discard(key)

    def move(self, tensors: Iterable[Tensor], *, to_host: bool) -> None:
        """Count the storages of tensors as host memory, or as device memory again."""
        for tensor in tensors:
            key = tensor.untyped_storage()._cdata
            if key not in self._sizes or (key in self._on_host) == to_host:
                continue
            if to_host:
                self.live_bytes -= self._sizes[key]
                self._on_host.add(key)
            else:
                self._on_host.discard(key)
                self.live_bytes += self._sizes[key]
                self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    @contextmanager
    def on_host(self) -> Iterator[None]:
        """Count new storages as host memory while the context is open."""
        outer, self._makes_host_memory = self._makes_host_memory, True
        try:
            yield
        finally:
            self._makes_host_memory = outer

    def restart_peak(self) -> None:
        """Begin a new phase: the peak is what exists now."""
        self.peak_bytes = self.live_bytes

    @contextmanager
    def resizes_counted(self) -> Iterator[None]:
        """Count releases and reallocations of storages while the context is open."""
        resize = torch.UntypedStorage.resize_

        def counted(storage: torch.UntypedStorage, num_bytes: int) -> Any:
            result = resize(storage, num_bytes)
            if storage._cdata in self._sizes:
                self._resize(storage._cdata, num_bytes)
            return result

        with replaced(torch.UntypedStorage, "resize_", counted):
            yield


_SIZED_BY: dict[str, int] = {
    "allreduce_": 0,
    "allreduce_coalesced_": 0,
    "broadcast_": 0,
    "reduce_": 0,
    "send": 0,
    "recv_": 0,
    "recv_any_source_": 0,
    "allgather_": 0,
    "allgather_coalesced_": 0,
    "allgather_into_tensor_coalesced_": 0,
    "_allgather_base_": 0,
    "gather_": 1,
    "reduce_scatter_": 1,
    "reduce_scatter_tensor_coalesced_": 1,
    "_reduce_scatter_base_": 1,
    "scatter_": 0,
    "alltoall_": 1,
    "alltoall_base_": 1,
}
"""torch.ops.c10d operator -> argument with the larger side of the message."""


class TrafficCounter:
    """Group calls and their bytes; `name_of` names a group by its ranks."""

    def __init__(self, name_of: Callable[[tuple[int, ...]], str]) -> None:
        self._name_of = name_of
        self._names: dict[str, tuple[str, int]] = {}
        self._counts: Counter[tuple[str, int, str]] = Counter()
        self._bytes: Counter[tuple[str, int, str]] = Counter()

    def observe(self, func: Any, args: Sequence[Any], result: object) -> None:
        """Count an operation if it is a group call."""
        if func.namespace != "c10d":
            return
        operation = func._schema.name.partition("::")[2]
        group = next(ProcessGroup.unbox(arg) for arg in args if isinstance(arg, torch.ScriptObject))
        place = _SIZED_BY.get(operation)
        sized = [] if place is None else tree_leaves(args[place])
        num_bytes = sum(leaf.nbytes for leaf in sized if isinstance(leaf, Tensor))
        self.count(group, operation.strip("_"), num_bytes)

    def count(self, group: ProcessGroup, operation: str, num_bytes: int) -> None:
        """Count one call."""
        name = group.group_name
        if name not in self._names:
            ranks = tuple(get_process_group_ranks(group))
            self._names[name] = self._name_of(ranks), len(ranks)
        key = (*self._names[name], operation)
        self._counts[key] += 1
        self._bytes[key] += num_bytes

    def take(self) -> list[Traffic]:
        """Return what has been counted since the last call, largest first."""
        found = [Traffic(*key, count, self._bytes[key]) for key, count in self._counts.items()]
        self._counts.clear()
        self._bytes.clear()
        return sorted(found, key=lambda one: (-one.num_bytes, one.group, one.operation))

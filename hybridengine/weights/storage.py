"""Named tensors whose memory can be released and reallocated while the tensors remain the same objects."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hybridengine.errors import StorageError
from hybridengine.machine import trim_heap


class StoragePart:
    """Storages of some parameters, each given as a tensor that spans it; those in `zeroed` are zero when allocated."""

    def __init__(self, spans: Sequence[Tensor], zeroed: Sequence[Tensor]) -> None:
        self._storages = [(span.untyped_storage(), span.nbytes) for span in spans]
        self._zeroed = list(zeroed)
        self.total_bytes = sum(num_bytes for _, num_bytes in self._storages)
        """Bytes when allocated."""

    def materialise(self) -> None:
        for storage, num_bytes in self._storages:
            if storage.nbytes() == 0:
                storage.resize_(num_bytes)
        if self._zeroed:
            torch._foreach_zero_(self._zeroed)

    def release(self) -> None:
        for storage, _ in self._storages:
            storage.resize_(0)


class WeightStorage:
    """Weights of one layout on one rank, by parameter name.

    A released tensor keeps its shape and identity, and views of it stay valid; it owns no memory until it is
    materialised again, with undefined contents.

    Args:
        owners: parameter name -> tensor that spans the parameter's whole storage, if that is larger than the parameter
            (a DDP bucket with its padding); one parameter per storage.
        current: tensors that the model uses now, by the same names, for `moved`; `tensors` if None.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        owners: Mapping[str, Tensor] | None = None,
        current: Callable[[], Mapping[str, Tensor]] | None = None,
    ) -> None:
        self._tensors = {name: tensor.detach() for name, tensor in tensors.items()}
        self._spans = {name: (owners or {}).get(name, tensor).detach() for name, tensor in tensors.items()}
        self._storages = {name: span.untyped_storage() for name, span in self._spans.items()}
        self._sizes = {name: span.nbytes for name, span in self._spans.items()}
        self._current = current or (lambda: tensors)
        self._bound = {name: _binding(tensor) for name, tensor in tensors.items()}
        self._check_ownership()

    def _check_ownership(self) -> None:
        by_storage: dict[int, str] = {}
        for name, storage in self._storages.items():
            other = by_storage.setdefault(storage._cdata, name)
            if other != name:
                raise StorageError(f"parameters {other} and {name} share one storage; give each its own")
            tensor = self._tensors[name]
            if tensor.untyped_storage()._cdata != storage._cdata:
                raise StorageError(f"parameter {name} is not part of the storage named as its owner")
            if storage.nbytes() not in (0, self._sizes[name]):
                raise StorageError(
                    f"parameter {name} is a part of a larger storage ({storage.nbytes()} bytes, its own are"
                    f" {self._sizes[name]}); releasing it would release its neighbours"
                )

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._tensors)

    @property
    def total_bytes(self) -> int:
        """Bytes of all storages when materialised."""
        return sum(self._sizes.values())

    @property
    def live_bytes(self) -> int:
        """Bytes that the storages currently own, read from the storages themselves."""
        return sum(storage.nbytes() for storage in self._storages.values())

    def is_live(self, name: str) -> bool:
        return self._storages[name].nbytes() > 0

    def moved(self) -> list[str]:
        """Return the parameters whose tensors in the model have changed since this object was created."""
        current = self._current()
        return [
            name
            for name, bound in self._bound.items()
            if name not in current or _binding(current[name]) != bound
        ]

    def settle(self, names: Iterable[str]) -> None:
        """Be told that parameters have been filled, which a subclass may then convert."""

    def part(self, names: Iterable[str], zero: Iterable[str] = ()) -> StoragePart:
        """Return the storages of `names`; those in `zero`, and owners with padding, are zero-filled when allocated."""
        names, zero = tuple(names), set(zero)
        padded = [name for name in names if name in zero or self._sizes[name] > self._tensors[name].nbytes]
        return StoragePart([self._spans[name] for name in names], [self._spans[name] for name in padded])

    def release(self, names: Iterable[str] | None = None) -> None:
        """Release the memory of `names`, or of all parameters."""
        self.part(self.names if names is None else names).release()

    def materialise(self, names: Iterable[str] | None = None, zero: Iterable[str] = ()) -> None:
        """Allocate memory for the released parameters of `names`, or of all; for `zero`, see `part`."""
        names = self.names if names is None else names
        self.part([name for name in names if not self.is_live(name)], zero).materialise()


def _binding(tensor: Tensor) -> tuple[Any, ...]:
    """Return the memory location of a tensor and its layout."""
    storage = tensor.untyped_storage()._cdata
    return storage, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device


def return_memory_to_system() -> None:
    """Return freed memory to the system: that of the caching allocator on a GPU, else of the C heap."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    else:
        trim_heap()

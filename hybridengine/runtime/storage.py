"""Named tensors whose memory can be given up and taken back while the tensors themselves stay the same objects."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from hybridengine.errors import StorageError


class WeightStorage:
    """Weights of one layout on one rank, by parameter name.

    A released tensor keeps its shape and identity, and views of it stay valid; it owns no memory until it is
    materialised again, with contents that are then undefined.

    Args:
        tensors: parameter name -> tensor.
        owners: parameter name -> tensor that spans the parameter's whole storage, where that is larger than the
            parameter (a DDP bucket with its padding); one parameter per storage.
    """

    def __init__(self, tensors: Mapping[str, Tensor], owners: Mapping[str, Tensor] | None = None) -> None:
        self._tensors = {name: tensor.detach() for name, tensor in tensors.items()}
        spans = {name: (owners or {}).get(name, tensor) for name, tensor in tensors.items()}
        self._storages = {name: span.untyped_storage() for name, span in spans.items()}
        self._sizes = {name: span.numel() * span.element_size() for name, span in spans.items()}
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
        """Bytes that the storages own now, read from the storages themselves."""
        return sum(storage.nbytes() for storage in self._storages.values())

    def is_live(self, name: str) -> bool:
        return self._storages[name].nbytes() > 0

    def release(self, names: Iterable[str] | None = None) -> None:
        """Give up the memory of `names` (all, where None)."""
        for name in self._tensors if names is None else names:
            self._storages[name].resize_(0)

    def materialise(self, names: Iterable[str] | None = None, zero: Iterable[str] = ()) -> None:
        """Take memory for `names` (all, where None); those in `zero`, and owners with padding, are filled with zeros."""
        zero = set(zero)
        for name in self._tensors if names is None else names:
            storage, tensor = self._storages[name], self._tensors[name]
            if storage.nbytes():
                continue
            storage.resize_(self._sizes[name])
            if name in zero or self._sizes[name] > tensor.numel() * tensor.element_size():
                torch.tensor([], dtype=torch.uint8, device=tensor.device).set_(storage).zero_()


def return_memory_to_system() -> None:
    """Hand freed memory back: the C heap's on the host, the caching allocator's on a GPU."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        return
    trim_heap()


def trim_heap() -> None:
    """Hand the C heap's freed memory back; without this, what one bucket gives up stays until the heap's end is free."""
    with contextlib.suppress(OSError, AttributeError):  # without malloc_trim, large blocks are freed at once
        ctypes.CDLL(None).malloc_trim(0)

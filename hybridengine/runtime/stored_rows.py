"""What a process tells others of rows that it keeps for them: a few hundred bytes, whatever the rows have."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
"""By the names that torch prints."""


@dataclass(frozen=True)
class Owner:
    """A process that keeps rows, and how to reach them."""

    host: str
    """As `process_memory.host` says; empty where memory cannot be shared."""
    pid: int
    token_address: int
    """Where `token` is found in the memory of this process, and of no other."""
    token: int
    node: str
    port: int
    """Of the server that hands rows to processes elsewhere."""


@dataclass(frozen=True)
class StoredArray:
    """Contiguous memory of `num_entries` entries of one shape."""

    dtype: str
    entry_shape: tuple[int, ...]
    num_entries: int
    address: int
    descriptor: int | None = None
    """Of the file in the owner's process that other processes map; None where the memory is only read."""

    @property
    def entry_bytes(self) -> int:
        return math.prod(self.entry_shape) * DTYPES[self.dtype].itemsize

    @property
    def num_bytes(self) -> int:
        return self.num_entries * self.entry_bytes


@dataclass(frozen=True)
class StoredColumn:
    """A column of tensors, one entry per row; or of other values, pickled one behind the other."""

    values: StoredArray
    """For values that are not tensors, their bytes."""
    bounds: StoredArray | None = None
    """One entry more than rows: the n-th value is bytes bounds[n] to bounds[n + 1] of `values`. None for tensors."""


@dataclass(frozen=True)
class StoredRows:
    """A batch that a process keeps until its key is dropped."""

    owner: Owner
    key: int
    key_address: int
    """Where the key is found in the owner's memory as long as the rows are kept."""
    num_rows: int
    columns: dict[str, StoredColumn]

"""Descriptions of rows by their producer: small columns inline, and references to large ones in Ray's object store."""

from __future__ import annotations

import math
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
import torch
from ray.exceptions import ObjectStoreFullError, OutOfDiskError
from tensordict import TensorDictBase, is_non_tensor

from hybridengine.errors import ProtocolError, StorageError
from hybridengine.rows.batch import columns_of, is_tensor_column

INLINE_BYTES = 2**16
"""Maximum column bytes inside one description; Ray carries results of up to 100 KiB in its messages."""

Content = np.ndarray | Sequence[bytes]
"""Content of a column: uint8 [rows, bytes per entry] for tensors; else the pickled value of each row."""


@dataclass(frozen=True)
class Owner:
    """The process that produced rows and owns their objects, which are lost when it ends."""

    node: str
    pid: int
    rank: int

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.pid} of node {self.node})"


@dataclass(frozen=True)
class StoredColumn:
    """A column of some rows."""

    content: Any
    """`Content`, or a reference to an object that contains it."""
    is_inline: bool
    """True if `content` is the column itself."""
    dtype: torch.dtype | None = None
    """Type of the tensor; None for values that are not tensors."""
    entry_shape: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.entry_shape)}" if self.dtype else "values that are not tensors"


@dataclass(frozen=True, eq=False)
class StoredRows:
    """Rows of one process. Their objects are kept as long as this description is referenced."""

    owner: Owner
    num_rows: int
    columns: dict[str, StoredColumn]

    @property
    def inline_bytes(self) -> int:
        """Bytes of the columns inside the description."""
        return sum(size_of(column.content) for column in self.columns.values() if column.is_inline)


def keep_rows(call: str, result: Any, num_rows: int, owner: Owner) -> StoredRows:
    """Store the rows that a call has returned; return their description; ProtocolError if it returned anything else."""
    if not isinstance(result, TensorDictBase) or not result.batch_dims:
        raise ProtocolError(
            f"{call} returned a {type(result).__name__} and is registered with returns_rows=True; return a"
            " TensorDict with batch_size=[rows]"
        )
    if result.batch_size[0] != num_rows:
        raise ProtocolError(
            f"{call} returned {result.batch_size[0]} rows for {num_rows}; return one row for each"
        )
    for name, column in result.items():
        if isinstance(column, TensorDictBase) and not is_non_tensor(column):
            raise ProtocolError(
                f"{call} returned the column {name!r} as a TensorDict; return its columns by names of their own"
            )
    return store_rows(result, owner)


def store_rows(batch: TensorDictBase, owner: Owner) -> StoredRows:
    """Store a batch, its smallest columns inline up to `INLINE_BYTES` in total; StorageError if Ray has no room."""
    contents = {
        name: as_bytes(batch[name].detach().to("cpu").contiguous())
        if is_tensor_column(batch, name)
        else [pickle.dumps(value) for value in batch.get(name).tolist()]
        for name in columns_of(batch)
    }
    columns, left = {}, INLINE_BYTES
    for name, content in sorted(contents.items(), key=lambda item: size_of(item[1])):
        left -= size_of(content)
        dtype, entry_shape = None, ()
        if is_tensor_column(batch, name):
            dtype, entry_shape = batch[name].dtype, tuple(batch[name].shape[1:])
        is_inline = left >= 0
        columns[name] = StoredColumn(content if is_inline else _put(content), is_inline, dtype, entry_shape)
    return StoredRows(owner, batch.batch_size[0], columns)


def size_of(content: Content) -> int:
    """Return the number of bytes of a column."""
    return content.nbytes if isinstance(content, np.ndarray) else sum(map(len, content))


def as_bytes(tensor: torch.Tensor) -> np.ndarray:
    """Return a uint8 view [rows, bytes per entry] of a contiguous CPU tensor."""
    entry = math.prod(tensor.shape[1:])
    # With a dimension of size 1, a contiguous tensor may have any stride, and cannot be viewed as bytes.
    return tensor.as_strided((len(tensor), entry), (entry, 1)).view(torch.uint8).numpy()


def _put(content: Content) -> ray.ObjectRef:
    try:
        return ray.put(content)
    except (ObjectStoreFullError, OutOfDiskError) as error:
        text = " ".join(str(error).split())
        raise StorageError(
            f"Ray's object store has no room for rows ({type(error).__name__}: {text}); give Ray more of /dev/shm, or of"
            " the disk that it spills to, or let go of references to rows that nobody will read"
        ) from error

"""Rows as their producer describes them to others: small columns themselves, references to large ones.

What stores an object and returns a reference to it is an argument: Ray's `put` on a rank.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from hybridengine.runtime.batch import columns_of, is_tensor_column

INLINE_BYTES = 2**16
"""Most bytes of columns inside one description. With it, a description stays below the 100 KiB up to which Ray carries
a result inside its messages."""

DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
"""By the names that torch prints."""

Content = np.ndarray | Sequence[bytes]
"""A column of tensors as uint8 [rows, bytes of an entry]; of other values, the pickled value of each row."""


@dataclass(frozen=True)
class Owner:
    """The process that has produced rows and owns their objects, which are lost when it ends."""

    node: str
    pid: int
    rank: int

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.pid} of node {self.node})"


@dataclass(frozen=True)
class StoredColumn:
    """A column of some rows."""

    content: Any
    """`Content`, or a reference to an object that is one."""
    is_inline: bool
    """True if `content` is the column itself."""
    dtype: str | None = None
    """Name of the dtype as torch prints it; None for values that are not tensors."""
    entry_shape: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.entry_shape)}" if self.dtype else "values that are not tensors"


@dataclass(frozen=True)
class StoredRows:
    """Rows of one process. Their objects are kept as long as somebody has this description."""

    owner: Owner
    num_rows: int
    columns: dict[str, StoredColumn]

    @property
    def inline_bytes(self) -> int:
        """Bytes of the columns that travel inside the description."""
        return sum(size_of(column.content) for column in self.columns.values() if column.is_inline)


def store_rows(batch: TensorDictBase, owner: Owner, put: Callable[[Content], Any]) -> StoredRows:
    """Return the description of a batch; its smallest columns, up to `INLINE_BYTES` together, are part of it.

    Args:
        put: stores a copy of a large column and returns a reference to it.
    """
    columns, left = {}, INLINE_BYTES
    for name, content in sorted(_contents(batch).items(), key=lambda item: size_of(item[1])):
        left -= size_of(content)
        dtype, entry_shape = None, ()
        if is_tensor_column(batch, name):
            dtype, entry_shape = str(batch[name].dtype), tuple(batch[name].shape[1:])
        is_inline = left >= 0
        columns[name] = StoredColumn(content if is_inline else put(content), is_inline, dtype, entry_shape)
    return StoredRows(owner, batch.batch_size[0], columns)


def size_of(content: Content) -> int:
    """Bytes of a column."""
    return content.nbytes if isinstance(content, np.ndarray) else sum(map(len, content))


def as_bytes(tensor: torch.Tensor) -> np.ndarray:
    """View a contiguous tensor on the CPU as uint8 [rows, bytes of an entry]."""
    entry = math.prod(tensor.shape[1:])
    # Where a dimension has size 1, a contiguous tensor may have any stride, and cannot be viewed as bytes.
    return tensor.as_strided((len(tensor), entry), (entry, 1)).view(torch.uint8).numpy()


def _contents(batch: TensorDictBase) -> dict[str, Content]:
    return {
        name: as_bytes(batch[name].detach().to("cpu").contiguous())
        if is_tensor_column(batch, name)
        else [pickle.dumps(value) for value in batch.get(name).tolist()]
        for name in columns_of(batch)
    }

"""Rows of a batch: a TensorDict of batch size [B], its columns tensors or NonTensorStacks of strings."""

from __future__ import annotations

import numpy as np
from tensordict import NonTensorStack, TensorDictBase
from torch import Tensor

from hybridengine.errors import ProtocolError


def num_rows(batch: TensorDictBase) -> int:
    """Return the number of rows B; ProtocolError if the batch has no row dim."""
    if not batch.batch_dims:
        raise ProtocolError(
            f"a TensorDict with columns {columns_of(batch)} has no rows; give it batch_size=[num_rows]"
        )
    return batch.batch_size[0]


def payload_bytes(batch: TensorDictBase) -> int:
    """Return the bytes of the columns' content: tensors and arrays as stored, strings in UTF-8."""
    total = batch.bytes()
    for name in columns_of(batch):
        column = batch.get(name)
        if isinstance(column, NonTensorStack):
            total += sum(
                value.nbytes if isinstance(value, np.ndarray) else len(str(value).encode())
                for value in column.tolist()
            )
    return total


def columns_of(batch: TensorDictBase) -> list[str]:
    """Return the names of the columns, sorted."""
    return sorted(str(name) for name in batch.keys())  # noqa: SIM118


def is_tensor_column(batch: TensorDictBase, name: str) -> bool:
    """True if a column is a tensor; other columns hold one Python value per row."""
    return isinstance(batch.get(name), Tensor)

"""Rows of batches with tensors and strings."""

from __future__ import annotations

import pytest
import torch
from tensordict import NonTensorStack, TensorDict

from hybridengine.errors import ProtocolError
from hybridengine.rows.batch import num_rows, payload_bytes


def rows(first: int, last: int) -> TensorDict:
    ids = list(range(first, last))
    return TensorDict(
        {
            "row_ids": torch.tensor(ids),
            "tokens": torch.arange(10 * first, 10 * last).reshape(-1, 10),
            "answers": NonTensorStack(*[f"é{row}" for row in ids]),
        },
        batch_size=[len(ids)],
    )


def test_payload_counts_tensors_and_strings() -> None:
    assert payload_bytes(rows(0, 4)) == 4 * 8 + 4 * 10 * 8 + 4 * 3  # "é" is two bytes in UTF-8
    assert payload_bytes(rows(0, 1)) == 8 + 80 + 3


def test_a_batch_without_rows_is_refused() -> None:
    assert num_rows(rows(0, 7)) == 7
    with pytest.raises(ProtocolError, match="has no rows"):
        num_rows(TensorDict({"row_ids": torch.zeros(1)}, batch_size=[]))

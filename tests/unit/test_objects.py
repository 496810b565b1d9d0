"""Unavailable objects: the error names the one that is lost, not one that is still on its way."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from ray.exceptions import GetTimeoutError, OwnerDiedError, RayError

from hybridengine.controller.row_requests import ColumnRows, read_columns
from hybridengine.controller.stored_rows import Owner, StoredColumn, StoredRows
from hybridengine.errors import TransferError

HERE, ON_ITS_WAY, LOST = "here", "on its way", "lost"


def error_of(kind: str) -> RayError:
    return OwnerDiedError("00ff", None, "") if kind == LOST else GetTimeoutError("not yet")


@pytest.mark.parametrize(
    ("asked", "first", "place", "reason"),
    [
        ([HERE, ON_ITS_WAY, LOST], LOST, 2, "OwnerDiedError: "),
        ([HERE, ON_ITS_WAY, HERE], ON_ITS_WAY, 1, "it has not arrived after 3 s"),
        ([ON_ITS_WAY, LOST], ON_ITS_WAY, 1, "OwnerDiedError: "),
    ],
)
def test_the_object_that_is_lost_is_named(
    asked: list[str], first: str, place: int, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def get(wanted: Any, timeout: float) -> Any:
        if isinstance(wanted, list):
            raise error_of(first)
        if wanted[1] != HERE:
            raise error_of(wanted[1])

    blocks = [
        (
            rank,
            StoredRows(
                Owner("10.0.0.1", 100 + rank, rank),
                1,
                {"half": StoredColumn((rank, state), is_inline=False, dtype=torch.float16)},
            ),
        )
        for rank, state in enumerate(asked)
    ]
    monkeypatch.setattr("ray.get", get)
    message = rf"^column 'half' of a\.call cannot be fetched from rank {place} \(process 10{place} of .*\): {reason}"
    with pytest.raises(TransferError, match=message):
        read_columns({"half": ColumnRows("a.call", "half", blocks, np.arange(len(asked)))}, timeout_s=3)

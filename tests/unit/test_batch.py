"""Rows of batches with tensors and strings."""

from __future__ import annotations

import pickle
from itertools import pairwise

import pytest
import torch
from tensordict import NonTensorStack, TensorDict

from hybridengine.errors import ProtocolError
from hybridengine.runtime.batch import concat_rows, num_rows, payload_bytes, slice_rows


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


def test_slices_put_together_are_the_batch_again() -> None:
    batch = rows(0, 7)
    for cuts in ([0, 3, 7], [0, 1, 2, 7], [0, 7]):
        parts = [slice_rows(batch, range(begin, end)) for begin, end in pairwise(cuts)]
        again = concat_rows(parts)
        assert num_rows(again) == 7
        assert again["row_ids"].tolist() == list(range(7))
        assert torch.equal(again["tokens"], batch["tokens"])
        assert list(again["answers"]) == [f"é{row}" for row in range(7)]


def test_equal_strings_stay_one_per_row() -> None:
    same = TensorDict({"answers": NonTensorStack("x", "x", "x")}, batch_size=[3])
    part = slice_rows(same, range(1, 2))
    assert list(part["answers"]) == ["x"]
    assert list(concat_rows([part, part])["answers"]) == ["x", "x"]


def test_a_slice_owns_its_memory_and_travels_alone() -> None:
    batch = rows(0, 1000)
    part = slice_rows(batch, range(10, 12))
    part["tokens"].zero_()
    assert batch["tokens"][10].tolist() == list(range(100, 110))
    assert len(pickle.dumps(part)) < len(pickle.dumps(batch)) / 20
    again = pickle.loads(pickle.dumps(part))
    assert list(again["answers"]) == ["é10", "é11"]


def test_payload_counts_tensors_and_strings() -> None:
    assert payload_bytes(rows(0, 4)) == 4 * 8 + 4 * 10 * 8 + 4 * 3  # "é" is two bytes in UTF-8
    assert payload_bytes(slice_rows(rows(0, 4), range(1))) == 8 + 80 + 3


def test_batches_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ProtocolError, match="same columns"):
        concat_rows([rows(0, 2), TensorDict({"row_ids": torch.zeros(1)}, batch_size=[1])])
    with pytest.raises(ProtocolError, match="no batches"):
        concat_rows([])
    with pytest.raises(ProtocolError, match="has no rows"):
        num_rows(TensorDict({"row_ids": torch.zeros(1)}, batch_size=[]))

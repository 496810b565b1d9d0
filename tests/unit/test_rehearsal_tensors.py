"""Tensors without values: which stay real, which numbers code reads, and the bytes of storages that come and go."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

from hybridengine.rehearsal.counting import StorageCounter
from hybridengine.rehearsal.shapes_only import REAL_BYTES, ShapesOnly

COUNT = 2**30
"""Elements of a tensor that a test must not allocate many of."""


@pytest.fixture
def counter() -> Iterator[StorageCounter]:
    one = StorageCounter()
    with one.resizes_counted(), ShapesOnly([one.observe]).active():
        yield one


def test_what_decides_the_course_of_a_run_has_values(counter: StorageCounter):
    lengths = torch.tensor([3, 1, 2])
    assert lengths.sum().item() == 6
    assert (torch.arange(4) < lengths[:, None]).sum(1).tolist() == [3, 1, 2]
    order = torch.rand(5, generator=torch.Generator().manual_seed(0)).argsort()
    assert sorted(order.tolist()) == [0, 1, 2, 3, 4]
    assert isinstance(torch.zeros(2), FakeTensor)
    assert isinstance(torch.rand(2), FakeTensor)
    assert isinstance(torch.zeros(REAL_BYTES // 8 + 1, dtype=torch.int64), FakeTensor)


def test_numbers_that_code_reads(counter: StorageCounter):
    values = torch.empty(3, 4)
    assert values.norm().item() == 1.0
    assert torch.tensor([values[0, 0], values[1, 1]]).tolist() == [1.0, 1.0]
    assert values.argmax(-1).tolist() == [1, 1, 1]
    assert values.numpy().sum() == 12
    bad = (~torch.isfinite(values)).any()
    assert not bad
    assert bad.float().item() == 0.0
    assert torch.stack([bad, bad]).any().float().item() == 0.0
    assert (values != values).any(1).nonzero().flatten().tolist() == []


def test_a_real_tensor_takes_numbers_from_one_without_values(counter: StorageCounter):
    real = torch.zeros(2, dtype=torch.int64)
    real.copy_(torch.empty(2).argsort())
    assert real.tolist() == [1, 1]


def test_storages_count_once_and_until_they_are_dropped(counter: StorageCounter):
    weight = torch.empty(COUNT, dtype=torch.bfloat16)
    view = weight[1:].view(-1)
    assert counter.live_bytes == 2 * COUNT
    other = weight + 1
    assert (counter.live_bytes, counter.peak_bytes) == (4 * COUNT, 4 * COUNT)
    del other
    assert (counter.live_bytes, counter.peak_bytes) == (2 * COUNT, 4 * COUNT)
    counter.restart_peak()
    weight.untyped_storage().resize_(0)
    assert counter.live_bytes == 0
    weight.untyped_storage().resize_(2 * COUNT)
    del weight
    assert (counter.live_bytes, counter.peak_bytes) == (2 * COUNT, 2 * COUNT), "the view holds the storage"
    del view
    assert counter.live_bytes == 0


def test_storages_move_to_the_host_and_back(counter: StorageCounter):
    moment = torch.empty(COUNT)
    counter.move([moment], to_host=True)
    counter.move([moment], to_host=True)
    assert counter.live_bytes == 0
    counter.restart_peak()
    counter.move([moment], to_host=False)
    assert counter.live_bytes == counter.peak_bytes == 4 * COUNT
    counter.move([moment], to_host=True)
    del moment
    assert counter.live_bytes == 0


def test_a_backward_pass_keeps_what_autograd_keeps(counter: StorageCounter):
    weight = torch.empty(1024, 1024, requires_grad=True)
    rows = torch.empty(COUNT // 1024, 1024)
    held = counter.live_bytes
    out = torch.nn.functional.silu(rows @ weight)
    kept = counter.live_bytes - held
    assert kept == 2 * 4 * COUNT, "the product, and its activation"
    counter.restart_peak()
    out.sum().backward()
    del out
    assert weight.grad is not None
    assert counter.live_bytes == held + weight.nbytes
    assert counter.peak_bytes >= held + kept + 4 * COUNT

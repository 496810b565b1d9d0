"""Host memory of copies, and their stream. There is no GPU: torch.cuda's streams and runtime are stand-ins."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch

from hybridengine.backends.megatron import offload
from hybridengine.backends.megatron.offload import HostBuffer
from hybridengine.machine import held_bytes

MIB = 2**20


@pytest.fixture
def cuda() -> Iterator[mock.MagicMock]:
    """Stand-in for `torch.cuda` on a machine that seems to have a GPU."""
    with (
        mock.patch.multiple(offload, is_needed=lambda: False, device_shim=contextlib.nullcontext),
        mock.patch.object(offload.torch, "cuda") as cuda,
    ):
        yield cuda


def test_copies_wait_for_the_device_and_the_host_for_copies(cuda: mock.MagicMock) -> None:
    source, buffer = torch.arange(3.0), HostBuffer()
    buffer.take([source])
    stream = cuda.Stream.return_value
    with mock.patch.object(torch.Tensor, "copy_", cuda.copy_):
        cuda.reset_mock()
        (copy,) = buffer.take([source])
    assert cuda.mock_calls == [
        mock.call.current_stream(),
        mock.call.Stream().wait_stream(cuda.current_stream.return_value),
        mock.call.stream(stream),
        mock.call.stream().__enter__(),
        mock.call.copy_(source, non_blocking=True),
        mock.call.stream().__exit__(None, None, None),
        mock.call.Stream().synchronize(),
    ]
    assert torch.equal(copy, source)


def test_a_buffer_pins_its_own_bytes_once_and_unpins_them(cuda: mock.MagicMock) -> None:
    pinned, most = dict[int, int](), 0

    def register(address: int, num_bytes: int, flags: int) -> int:
        nonlocal most
        assert address % 4096 == flags == 0, "two buffers on one page cannot both be pinned"
        pinned[address] = num_bytes
        most = max(most, sum(pinned.values()))
        return 0

    def unregister(address: int) -> int:
        del pinned[address]
        return 0

    cuda.cudart.return_value = mock.Mock(cudaHostRegister=register, cudaHostUnregister=unregister)
    buffer, tensors = HostBuffer(), [torch.zeros(1000), torch.zeros(3 * MIB, dtype=torch.uint8)]
    buffer.take(tensors[:1])
    assert list(pinned.values()) == [4096]  # 4000 bytes, aligned
    copies = buffer.take(tensors)
    assert list(pinned) == [copies[0].data_ptr()]
    assert list(pinned.values()) == [4096 + 3 * MIB] == [most], "not a power of two, and no two at a time"
    buffer.take(tensors[:1])
    assert list(pinned.values()) == [4096 + 3 * MIB]
    del buffer
    assert not pinned
    assert torch.equal(copies[1], tensors[1]), "what is still used remains, as ordinary memory"


def test_a_larger_buffer_takes_the_place_of_the_smaller_one() -> None:
    buffer, tensor = HostBuffer(), torch.ones(192 * MIB, dtype=torch.uint8)
    before = held_bytes()["resident_bytes"]
    buffer.take([tensor[: 64 * MIB]])
    buffer.take([tensor])
    grown = held_bytes()["resident_bytes"] - before
    assert grown == pytest.approx(192 * MIB, rel=0.1)
    del buffer
    assert held_bytes()["resident_bytes"] - before < 20 * MIB


def test_a_fork_copies_no_page_of_a_buffer() -> None:
    memory = offload.own_pages(16 * MIB)
    start, stop, flags = 0, 0, ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            start, stop = (int(number, 16) for number in line.split()[0].split("-"))
        elif line.startswith("VmFlags:") and start <= memory.data_ptr() < stop:
            flags = line
    assert "dc" in flags.split()

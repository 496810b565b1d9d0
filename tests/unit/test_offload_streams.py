"""Copies between device and host on a stream of their own. There is no GPU: torch.cuda's streams are stand-ins."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import torch

from hybridengine.backends.megatron import offload
from hybridengine.backends.megatron.offload import HostBuffer


def test_copies_wait_for_the_device_and_the_host_for_copies() -> None:
    cuda, pinned = mock.MagicMock(), list[int]()
    empty = torch.empty

    def recorded(size: int, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        if pin_memory:
            pinned.append(size)
        return empty(size, **options)

    source = torch.arange(3.0)
    with (
        mock.patch.multiple(offload, is_needed=lambda: False, device_shim=contextlib.nullcontext),
        mock.patch.object(offload.torch, "cuda", cuda),
        mock.patch.object(offload.torch, "empty", recorded),
        mock.patch.object(torch.Tensor, "copy_", cuda.copy_),
    ):
        buffer = HostBuffer()
        (copy,) = buffer.take([source])
        buffer.take([source])
    assert pinned == [offload.ALIGNMENT]  # once, and again used
    stream = cuda.Stream.return_value
    once = [
        mock.call.current_stream(),
        mock.call.Stream().wait_stream(cuda.current_stream.return_value),
        mock.call.stream(stream),
        mock.call.stream().__enter__(),
        mock.call.copy_(source, non_blocking=True),
        mock.call.stream().__exit__(None, None, None),
        mock.call.Stream().synchronize(),
    ]
    assert cuda.mock_calls == [mock.call.Stream(), *once, *once]
    assert copy.shape == source.shape

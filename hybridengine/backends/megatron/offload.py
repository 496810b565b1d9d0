"""Copies between device and host memory, and state that is in host memory while the device is for others."""

from __future__ import annotations

import contextlib
import mmap
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hybridengine.backends.megatron import compat
from hybridengine.backends.megatron.shim import device, device_shim, is_needed
from hybridengine.weights.storage import WeightStorage

ALIGNMENT = 256
"""Bytes to a multiple of which each tensor in a buffer begins, as in torch's allocators."""
PART_BYTES = 64 * 2**20
"""Size of the parts in which tensors pass through a buffer to host memory of their own."""


def own_pages(num_bytes: int) -> Tensor:
    """Return bytes on pages that nothing else is on, which return to the system with the last view of them."""
    pages = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_DONTFORK)  # else a write after a fork would go to a copy of a pinned page
    return torch.frombuffer(pages, dtype=torch.uint8)


class HostBuffer:
    """Persistent host memory, pinned where there is a GPU, with a stream for copies; both are made when first needed.

    Pinned memory is copied at the speed of the bus, without the driver's own buffer, but takes long to allocate. It is
    pages of this buffer's own, because torch's allocator of pinned memory rounds a block up to a power of two, and keeps
    it when it is freed.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._unpin: Callable[[], object] = lambda: None
        self._stream: Any = None

    def take(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return copies of `tensors` in the buffer; those of an earlier call are overwritten."""
        starts, size = list[int](), 0
        for tensor in tensors:
            starts.append(size)
            size += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        if self._memory.nbytes < size:
            self._grow(size)
        places = [
            self._memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for start, tensor in zip(starts, tensors, strict=True)
        ]
        self.copy(places, tensors)
        return places

    def _grow(self, num_bytes: int) -> None:
        """Replace the memory by a larger one, after giving its pages back: there are never two."""
        self._unpin()
        self._memory = torch.empty(0, dtype=torch.uint8)
        memory = own_pages(num_bytes)
        if not is_needed():
            cudart: Any = torch.cuda.cudart()
            torch.cuda.check_error(cudart.cudaHostRegister(memory.data_ptr(), num_bytes, 0))
            self._unpin = weakref.finalize(self, _unpin, memory.data_ptr())
        self._memory = memory

    def copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        """Copy each source to its target on the buffer's stream, after all queued work, and wait for the end."""
        with device_shim(), torch.no_grad():
            if self._stream is None:
                self._stream = torch.cuda.Stream()
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                for target, source in zip(targets, sources, strict=True):
                    target.copy_(source, non_blocking=True)
            self._stream.synchronize()

    def host_copy(self, tensor: Tensor) -> Tensor:
        """Return a copy of `tensor` in host memory of its own, part by part through the buffer."""
        copy = torch.empty(tensor.shape, dtype=tensor.dtype)
        if tensor.dim() == 0 or not tensor.numel():
            copy.copy_(tensor)
            return copy
        rows = max(1, PART_BYTES * len(tensor) // tensor.nbytes)
        for target, source in zip(copy.split(rows), tensor.split(rows), strict=True):
            (staged,) = self.take([source])
            target.copy_(staged)
        return copy


def _unpin(address: int) -> None:
    cudart: Any = torch.cuda.cudart()
    torch.cuda.check_error(cudart.cudaHostUnregister(address))


class OptimizerOffload:
    """Adam's moments, and master weights that are no views of the model's weights: on the device, or in a host buffer."""

    def __init__(self, optimizer: Any, module: nn.Module) -> None:
        self._optimizer, self._module = optimizer, module
        self._buffer, self.is_on_host = HostBuffer(), False

    def to_host(self) -> None:
        """Move the state to the buffer; nothing moves if it is there."""
        if not self.is_on_host:
            replace, tensors = self._slots()
            self._put(replace, self._buffer.take(tensors))
            self.is_on_host = True

    def to_device(self) -> None:
        """Move the state back, with what has been added to it; without memory for all of it, nothing moves."""
        if self.is_on_host:
            replace, tensors = self._slots()
            copies = [torch.empty_like(tensor, device=device()) for tensor in tensors]
            self._buffer.copy(copies, tensors)
            self._put(replace, copies)
            self.is_on_host = False

    @staticmethod
    def _put(replace: Sequence[Callable[[Tensor], None]], tensors: Sequence[Tensor]) -> None:
        for put, tensor in zip(replace, tensors, strict=True):
            put(tensor)

    def _slots(self) -> tuple[list[Callable[[Tensor], None]], list[Tensor]]:
        """Return the tensors of the state, and for each a function that replaces it."""
        found = list(self._found())
        return [put for put, _ in found], [tensor for _, tensor in found]

    def _found(self) -> Iterator[tuple[Callable[[Tensor], None], Tensor]]:
        models = {parameter.untyped_storage()._cdata for parameter in self._module.parameters()}
        for one in compat.plain_optimizers(self._optimizer):
            for group in one.optimizer.param_groups:
                for master in group["params"]:
                    if master.untyped_storage()._cdata not in models:
                        yield (lambda tensor, of=master: setattr(of, "data", tensor)), master.data
            for state in one.optimizer.state.values():
                for name, value in state.items():
                    if isinstance(value, Tensor):
                        yield (lambda tensor, of=state, key=name: of.__setitem__(key, tensor)), value


class WeightOffload:
    """Weights that do not change, in a host buffer except while `on_device`."""

    def __init__(self, weights: WeightStorage) -> None:
        self._weights, self._buffer = weights, HostBuffer()
        self._tensors = [weights[name] for name in weights.names]
        self._copies = self._buffer.take(self._tensors)
        weights.release()

    @contextlib.contextmanager
    def on_device(self) -> Iterator[None]:
        """Return a context manager in which the weights are on the device; it gives up their memory at its end."""
        try:
            self._weights.materialise()
            self._buffer.copy(self._tensors, self._copies)
            yield
        finally:
            self._weights.release()

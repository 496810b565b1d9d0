"""Weights whose addresses are captured in CUDA graphs: physical memory comes and goes beneath them, bucket by bucket.

vLLM's CuMem allocator, the one of its sleep mode, reserves addresses once and maps physical memory there in segments.
torch gives every large tensor a segment of its own, and small ones share. vLLM's own calls map all segments of a tag.
"""

from __future__ import annotations

import ctypes
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from hybridengine.weights.storage import StoragePart, WeightStorage


class Segments(Protocol):
    """Ranges of addresses, each of which is backed by physical memory or not."""

    @property
    def bounds(self) -> Mapping[int, int]:
        """First address -> number of bytes."""
        ...

    def map(self, start: int) -> None:
        """Back a segment by physical memory, whose contents are undefined."""
        ...

    def unmap(self, start: int) -> None:
        """Give a segment's physical memory back to the device."""
        ...


GPU_PAGE_BYTES = 2 * 2**20
"""Granularity of physical memory on a GPU."""


def pieces(parameter: Tensor, num_bytes: int, page_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield (offset, bytes) of the parts of a parameter's memory that may come and go on their own.

    It is one for a parameter of up to two dims, and for stacked experts the smallest number of experts that fills whole
    pages: one expert of a large model.
    """
    step = num_bytes
    if parameter.dim() == 3:
        step = math.lcm(parameter.nbytes // parameter.size(0), page_bytes)
    for offset in range(0, num_bytes, step):
        yield offset, min(step, num_bytes - offset)


class CuMemSegments:
    """Segments that hold the weights of vLLM's model in this process; those of stacked experts are cut (`pieces`)."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        from vllm.device_allocator import cumem

        self._cumem: Any = cumem
        found = cumem.CuMemAllocator.get_instance().pointer_to_data
        self._data = {start: data for start, data in found.items() if data.tag == "weights"}
        self._handles = {start: data.handle for start, data in self._data.items()}
        self._numbers: list[ctypes.c_ulonglong] = []
        """The driver's numbers of the physical memory of pieces."""
        for parameter in parameters:
            if parameter.data_ptr() in self._data:
                self._cut(parameter)
        self.bounds: Mapping[int, int] = {start: handle[1] for start, handle in self._handles.items()}

    def _cut(self, parameter: Tensor) -> None:
        """Map the pieces of a segment, which belongs to a parameter, in place of the whole."""
        data = self._data[parameter.data_ptr()]
        device, num_bytes, start, _ = data.handle
        parts = list(pieces(parameter, num_bytes, GPU_PAGE_BYTES))
        if len(parts) == 1:
            return
        torch.cuda.synchronize()
        self._cumem.unmap_and_release(data.handle)
        data.is_asleep = True  # to vLLM, which must not map the whole
        del self._data[start]
        for offset, size in parts:
            self._numbers.append(ctypes.c_ulonglong())
            handle = device, size, start + offset, ctypes.addressof(self._numbers[-1])
            self._cumem.create_and_map(handle)
            self._handles[start + offset] = handle

    def map(self, start: int) -> None:
        device, num_bytes, *_ = handle = self._handles[start]
        if torch.cuda.mem_get_info(device)[0] < num_bytes:
            torch.cuda.empty_cache()  # what training has released, which torch keeps and this allocator cannot take
        self._cumem.create_and_map(handle)
        self._note(start, is_asleep=False)

    def unmap(self, start: int) -> None:
        torch.cuda.synchronize()  # until nothing reads it
        self._cumem.unmap_and_release(self._handles[start])
        self._note(start, is_asleep=True)

    def _note(self, start: int, *, is_asleep: bool) -> None:
        if start in self._data:
            self._data[start].is_asleep = is_asleep


class SleepingWeights(WeightStorage):
    """Weights with fixed addresses: a segment is mapped with the first of its parameters and unmapped with the last.

    So the peak of a switch is that of tensors that are released one by one, but for segments that small parameters share.

    Args:
        kept: other tensors of the model, such as its buffers; their segments stay mapped.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        kept: Iterable[Tensor],
        segments: Segments,
        current: Callable[[], Mapping[str, Tensor]] | None = None,
    ) -> None:
        super().__init__(tensors, current=current)
        self._segments, self._starts = segments, sorted(segments.bounds)
        self._live = set(self.names)
        self._of = {name: self._segment(self[name]) for name in self.names}
        self._in_use = {self._segment(tensor) for tensor in kept}
        self._inside: dict[int, set[str]] = {}
        for name, start in self._of.items():
            self._inside.setdefault(start, set()).add(name)

    def _check_ownership(self) -> None:
        """Segments, not storages, are what a parameter owns."""

    def _segment(self, tensor: Tensor) -> int:
        """Return the first address of a tensor's segment; -1 for one of other memory, which stays."""
        address = tensor.data_ptr()
        place = bisect_right(self._starts, address) - 1
        start = self._starts[place] if place >= 0 else -1
        return start if place >= 0 and address < start + self._segments.bounds[start] else -1

    @property
    def live_bytes(self) -> int:
        return sum(self._sizes[name] for name in self._live)

    @property
    def mapped_bytes(self) -> int:
        """Bytes of physical memory of the segments with parameters."""
        bounds = self._segments.bounds
        return sum(bounds[start] for start in self._inside if start >= 0 and self._is_mapped(start))

    def is_live(self, name: str) -> bool:
        return name in self._live

    def _is_mapped(self, start: int) -> bool:
        return start < 0 or start in self._in_use or not self._inside[start].isdisjoint(self._live)

    def part(self, names: Iterable[str], zero: Iterable[str] = ()) -> StoragePart:
        names = tuple(names)
        return _SleepingPart(self, names, tuple(set(names) & set(zero)))

    def fall_asleep(self, names: Iterable[str]) -> None:
        """Release parameters, and unmap the segments without any other."""
        for name in set(names) & self._live:
            self._live.remove(name)
            if not self._is_mapped(self._of[name]):
                self._segments.unmap(self._of[name])

    def wake_up(self, names: Iterable[str]) -> None:
        """Map the segments of released parameters."""
        for name in set(names) - self._live:
            if not self._is_mapped(self._of[name]):
                self._segments.map(self._of[name])
            self._live.add(name)


class _SleepingPart(StoragePart):
    """A part of weights with fixed addresses."""

    def __init__(self, weights: SleepingWeights, names: tuple[str, ...], zero: tuple[str, ...]) -> None:
        super().__init__([weights[name] for name in names], [weights[name] for name in zero])
        self._weights, self._names = weights, names

    def materialise(self) -> None:
        self._weights.wake_up(self._names)
        if self._zeroed:
            torch._foreach_zero_(self._zeroed)

    def release(self) -> None:
        self._weights.fall_asleep(self._names)

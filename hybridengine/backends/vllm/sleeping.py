"""Weights whose addresses are captured in CUDA graphs: physical memory comes and goes beneath them, bucket by bucket.

vLLM's CuMem allocator, the one of its sleep mode, reserves addresses once and maps physical memory there in segments.
torch gives every large tensor a segment of its own, and small ones share. vLLM's own calls map all segments of a tag.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
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


class CuMemSegments:
    """Segments that hold the weights of vLLM's model in this process."""

    def __init__(self) -> None:
        from vllm.device_allocator import cumem

        self._cumem: Any = cumem
        allocator = cumem.CuMemAllocator.get_instance()
        self._data = {
            start: data for start, data in allocator.pointer_to_data.items() if data.tag == "weights"
        }

    @property
    def bounds(self) -> Mapping[int, int]:
        return {start: data.handle[1] for start, data in self._data.items()}

    def map(self, start: int) -> None:
        self._cumem.create_and_map(self._data[start].handle)
        self._data[start].is_asleep = False

    def unmap(self, start: int) -> None:
        torch.cuda.synchronize()  # until nothing reads it
        self._cumem.unmap_and_release(self._data[start].handle)
        self._data[start].is_asleep = True


class SleepingWeights(WeightStorage):
    """Weights with fixed addresses: a segment is mapped with the first of its parameters and unmapped with the last.

    So the peak of a switch is that of tensors that are released one by one, but for segments that small parameters share.

    Args:
        kept: other tensors of the model, such as its buffers; their segments stay mapped.
    """

    def __init__(self, tensors: Mapping[str, Tensor], kept: Iterable[Tensor], segments: Segments) -> None:
        super().__init__(tensors)
        self._segments, self._starts = segments, sorted(segments.bounds)
        self._live = set(self.names)
        self._of = {name: self._segment(self[name]) for name in self.names}
        self._in_use = {self._segment(tensor) for tensor in kept}
        self._inside: dict[int, set[str]] = {}
        for name, start in self._of.items():
            self._inside.setdefault(start, set()).add(name)

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

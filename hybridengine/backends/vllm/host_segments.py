"""Memory of a CPU's weights at fixed addresses: pages come and go beneath them."""

from __future__ import annotations

import mmap
from collections.abc import Mapping

import torch
from torch.nn import Parameter


class HostSegments:
    """Anonymous memory for the parameters of a model (`sleeping.Segments`), which moves them into it, uninitialised.

    Args:
        parts: number of equal parts of some parameters, in order, that are released on their own.
    """

    def __init__(self, parameters: Mapping[str, Parameter], parts: Mapping[str, int]) -> None:
        self._places: dict[int, tuple[mmap.mmap, int, int]] = {}
        for name, parameter in parameters.items():
            memory = mmap.mmap(-1, parameter.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            whole = torch.frombuffer(memory, dtype=parameter.dtype, count=parameter.numel())
            parameter.data = whole.view(parameter.shape)
            size = parameter.nbytes // parts.get(name, 1)
            for offset in range(0, parameter.nbytes, size):
                self._places[parameter.data_ptr() + offset] = memory, offset, size

    @property
    def bounds(self) -> Mapping[int, int]:
        return {start: size for start, (_, _, size) in self._places.items()}

    def map(self, start: int) -> None:
        """Do nothing: the system gives pages when they are written."""

    def unmap(self, start: int) -> None:
        """Return the pages that lie in the segment wholly."""
        memory, offset, size = self._places[start]
        first, end = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE, offset + size
        if end < len(memory):
            end = end // mmap.PAGESIZE * mmap.PAGESIZE
        if first < end:
            memory.madvise(mmap.MADV_DONTNEED, first, end - first)

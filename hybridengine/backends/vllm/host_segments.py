"""Memory of a CPU's weights at fixed addresses: pages come and go beneath them."""

from __future__ import annotations

import mmap
from collections.abc import Mapping

import torch
from torch import Tensor

from hybridengine.backends.vllm.sleeping import pieces


class HostSegments:
    """Anonymous memory for the parameters of a model (`sleeping.Segments`), which moves them into it, uninitialised.

    Experts, which a parameter of three dims stacks, come and go one by one if each fills whole pages.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._places: dict[int, tuple[mmap.mmap, int, int]] = {}
        for parameter in parameters.values():
            memory = mmap.mmap(-1, parameter.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            whole = torch.frombuffer(memory, dtype=parameter.dtype, count=parameter.numel())
            parameter.data = whole.view(parameter.shape)
            for offset, size in pieces(parameter, parameter.nbytes, mmap.PAGESIZE):
                self._places[parameter.data_ptr() + offset] = memory, offset, size
        self.bounds: Mapping[int, int] = {start: size for start, (_, _, size) in self._places.items()}

    def map(self, start: int) -> None:
        """Do nothing: the system gives pages when they are written."""

    def unmap(self, start: int) -> None:
        """Return the segment's pages."""
        memory, offset, size = self._places[start]
        memory.madvise(mmap.MADV_DONTNEED, offset, size)

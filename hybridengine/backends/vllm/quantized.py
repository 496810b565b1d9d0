"""Weights of an engine in FP8, made of those that a switch brings in the model's type.

A matrix in FP8 (E4M3) has a float32 scale for each block of 128 rows and columns, as vLLM's `fp8` method reads them.
It arrives in the model's type, in memory that lasts as long as its bucket, and is converted when it is complete.

Source: DeepSeek-V3, arXiv 2412.19437, section 3.3.2.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridengine.models.shapes import FP8_BLOCK as BLOCK
from hybridengine.weights.storage import StoragePart, WeightStorage

STRIP = 8 * BLOCK
"""Rows that are converted at a time."""
SCALE = "_scale_inv"
"""End of the name of a matrix's scales, in vLLM."""
LARGEST = torch.finfo(torch.float8_e4m3fn).max


def quantize(matrix_NK: Tensor) -> tuple[Tensor, Tensor]:
    """Return a matrix in FP8 [N, K], and the scales of its blocks [N / 128, K / 128], rounded up, in float32.

    The largest element of a block becomes the largest number of FP8.
    """
    (rows, columns), blocks_NMKL = matrix_NK.shape, _blocks(matrix_NK.float())
    peaks_NK = blocks_NMKL.abs().amax((1, 3))
    scales_NK = torch.where(peaks_NK > 0, peaks_NK / LARGEST, 1.0)
    scaled_NMKL = (blocks_NMKL / scales_NK[:, None, :, None]).clamp(-LARGEST, LARGEST)
    return scaled_NMKL.flatten(2).flatten(0, 1)[:rows, :columns].to(torch.float8_e4m3fn), scales_NK


def dequantize(matrix_NK: Tensor, scales_NK: Tensor) -> Tensor:
    """Return the float32 matrix of a matrix in FP8 [N, K] and the scales of its blocks."""
    (rows, columns), blocks_NMKL = matrix_NK.shape, _blocks(matrix_NK.float())
    return (blocks_NMKL * scales_NK[:, None, :, None]).flatten(2).flatten(0, 1)[:rows, :columns]


def _blocks(matrix_NK: Tensor) -> Tensor:
    """Return a matrix as [blocks of rows, rows, blocks of columns, columns], padded with zeros."""
    rows, columns = matrix_NK.shape
    padded_NK = F.pad(matrix_NK, (0, -columns % BLOCK, 0, -rows % BLOCK))
    return padded_NK.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))


class QuantizedWeights(WeightStorage):
    """Weights by the names of the layout; a matrix in FP8 stands there in the type in which it arrives.

    Args:
        held: weights as the engine computes with them, with scales.
        dtype: type of the weights that a switch brings.
    """

    def __init__(self, held: WeightStorage, dtype: torch.dtype) -> None:
        self._held = held
        self._scaled = {name: name + SCALE for name in held.names if name + SCALE in held}
        scales = set(self._scaled.values())
        arriving = {
            name: torch.empty(held[name].shape, dtype=dtype, device=held[name].device)
            for name in self._scaled
        }
        super().__init__({name: arriving.get(name, held[name]) for name in held.names if name not in scales})
        self._arriving = WeightStorage(arriving)
        self._arriving.release()

    def _check_ownership(self) -> None:
        """Those of `held` are checked there, and those that arrive are made here."""

    @property
    def total_bytes(self) -> int:
        return self._held.total_bytes

    @property
    def live_bytes(self) -> int:
        return self._held.live_bytes + self._arriving.live_bytes

    def is_live(self, name: str) -> bool:
        return self._held.is_live(name)

    def moved(self) -> list[str]:
        return self._held.moved()

    def part(self, names: Iterable[str], zero: Iterable[str] = ()) -> StoragePart:
        names, zero = tuple(names), set(zero)
        scaled = [name for name in names if name in self._scaled]
        parts = (
            self._held.part([*names, *map(self._scaled.__getitem__, scaled)], zero - set(scaled)),
            self._arriving.part(scaled, zero & set(scaled)),
        )
        return _Joined(parts)

    def settle(self, names: Iterable[str]) -> None:
        """Convert matrices that are complete, and give up the memory in which they arrived."""
        for name in names:
            if name not in self._scaled:
                continue
            # In strips, as the copies in float32 are larger than the matrix.
            for start in range(0, self[name].size(0), STRIP):
                matrix, scales = quantize(self[name][start : start + STRIP])
                self._held[name][start : start + STRIP] = matrix
                first = start // BLOCK
                self._held[self._scaled[name]][first : first + len(scales)] = scales
            self._arriving.release([name])


class _Joined(StoragePart):
    """Parts of two storages."""

    def __init__(self, parts: Iterable[StoragePart]) -> None:
        super().__init__([], [])
        self._parts = tuple(parts)
        self.total_bytes = sum(part.total_bytes for part in self._parts)

    def materialise(self) -> None:
        for part in self._parts:
            part.materialise()

    def release(self) -> None:
        for part in self._parts:
            part.release()

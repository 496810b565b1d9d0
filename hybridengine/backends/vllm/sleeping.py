"""Weights whose addresses are captured in CUDA graphs, with memory managed by vLLM's sleep mode."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from hybridengine.weights.storage import StoragePart, WeightStorage


class SleepingWeights(WeightStorage):
    """Weights with fixed addresses, whose memory vLLM's sleep mode releases and reallocates all at once.

    The first bucket of a switch therefore materialises everything, and the ledger reports the higher peak.
    """

    def __init__(self, tensors: dict[str, Tensor], llm: Any) -> None:
        self._llm, self._awake, self._released = llm, True, set[str]()
        super().__init__(tensors)

    @property
    def live_bytes(self) -> int:
        return self.total_bytes if self._awake else 0

    def is_live(self, name: str) -> bool:
        return self._awake

    def part(self, names: Iterable[str], zero: Iterable[str] = ()) -> StoragePart:
        return _SleepingPart(self, tuple(names), tuple(zero))

    def fall_asleep(self, released: Iterable[str]) -> None:
        """Mark parameters as released; the memory is freed when all are."""
        self._released |= set(released)
        if self._awake and self._released >= set(self.names):
            self._llm.sleep(level=2, mode="keep")  # unfinished requests continue with the next weights
            self._awake = False

    def wake_up(self) -> None:
        """Allocate the memory of all weights, if it is released."""
        if not self._awake:
            self._llm.wake_up(tags=["weights"])
            self._awake, self._released = True, set()


class _SleepingPart(StoragePart):
    """A part of weights that are allocated and released all at once."""

    def __init__(self, weights: SleepingWeights, names: tuple[str, ...], zero: tuple[str, ...]) -> None:
        super().__init__([weights[name] for name in names], [weights[name] for name in zero])
        self._weights, self._names = weights, names

    def materialise(self) -> None:
        self._weights.wake_up()
        if self._zeroed:
            torch._foreach_zero_(self._zeroed)

    def release(self) -> None:
        self._weights.fall_asleep(self._names)

"""The storage ledger: memory and network costs of weights during a switch, read from the storages."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from hybridengine.weights.storage import WeightStorage


@dataclass(frozen=True)
class SwitchReport:
    """Memory, traffic and time of one switch on one rank."""

    direction: str
    """`to_generate`, `to_train` or `push`."""
    received_bytes: int
    """Weight bytes received from other ranks, counted at the transport."""
    peak_weight_bytes: int
    """Peak bytes of weights and staging buffers during the switch."""
    redundant_bytes: int
    """Bytes of the other mode's weights still held after the switch."""
    weight_bytes: int
    """Bytes of weights held after the switch."""
    gradient_bytes: int
    """Bytes of gradients that wait for an optimizer step and are therefore kept during the switch."""
    seconds: float

    def as_dict(self) -> dict[str, str | int | float]:
        return asdict(self)


class StorageLedger:
    """Tracks the weight bytes of a rank: the storages of each mode, and staging buffers."""

    def __init__(self, storages: Mapping[str, WeightStorage]) -> None:
        self._storages = dict(storages)
        self._staging = 0
        self._received = 0
        self._peak = 0
        self._started = time.perf_counter()

    @property
    def live_bytes(self) -> int:
        """Weight and staging bytes currently held."""
        return sum(storage.live_bytes for storage in self._storages.values()) + self._staging

    def begin(self) -> None:
        self._received, self._peak, self._staging = 0, 0, 0
        self._started = time.perf_counter()
        self.note()

    def note(self) -> None:
        """Update the peak; called after every allocation."""
        self._peak = max(self._peak, self.live_bytes)

    def stage(self, num_bytes: int) -> None:
        """Count staging buffers until `unstage`."""
        self._staging += num_bytes
        self.note()

    def unstage(self, num_bytes: int) -> None:
        self._staging -= num_bytes

    def receive(self, num_bytes: int) -> None:
        self._received += num_bytes

    def finish(self, direction: str, mode: str, gradient_bytes: int = 0) -> SwitchReport:
        """Return the report of the switch that ends in `mode`."""
        self.note()
        others = sum(storage.live_bytes for name, storage in self._storages.items() if name != mode)
        return SwitchReport(
            direction=direction,
            received_bytes=self._received,
            peak_weight_bytes=self._peak,
            redundant_bytes=others,
            weight_bytes=self.live_bytes,
            gradient_bytes=gradient_bytes,
            seconds=time.perf_counter() - self._started,
        )

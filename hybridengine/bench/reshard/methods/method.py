"""Base of every method: it brings the actor's weights into a destination layout and back, and counts what that takes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridengine.bench.reshard.actor import Actor, check_weights
from hybridengine.reshard.boxes import Box
from hybridengine.reshard.layout import Layout
from hybridengine.reshard.vllm import vllm_layout
from hybridengine.topology.generation import GenerationGrid, Grouping
from hybridengine.topology.links import NodeMap
from hybridengine.topology.sizes import GenSizes
from hybridengine.weights.ledger import StorageLedger, SwitchReport
from hybridengine.weights.storage import WeightStorage, return_memory_to_system

TRAINING, GENERATING = "training", "generating"


@dataclass(frozen=True)
class Setting:
    """Work of a method on one rank."""

    actor: Actor
    gen: GenSizes
    bucket_bytes: int
    verify: str
    timeout_s: float
    """Longest that any wait may take."""
    nodes: NodeMap

    @property
    def bucket_elements(self) -> int:
        return self.bucket_bytes // self.actor.dtype.itemsize


class Method(ABC):
    """One way to get weights from training to generation and back, on one rank. Every call is collective.

    Bytes, peaks and redundancy come from a `StorageLedger` over the actor's weights, the destination's and the method's
    own buffers.
    """

    layout: Layout
    """Layout of the destination."""
    destination: WeightStorage

    def __init__(self, setting: Setting) -> None:
        self.setting, self.actor = setting, setting.actor

    @abstractmethod
    def prepare(self) -> None:
        """Make everything that a run would make once: groups, plans, the destination."""

    @abstractmethod
    def there(self) -> SwitchReport:
        """Bring the actor's weights to the destination."""

    @abstractmethod
    def back(self) -> SwitchReport:
        """Make the actor ready to train again."""

    def check(self, name: str) -> None:
        """Check what `there` has delivered, bit for bit.

        Raises:
            TransferError: a parameter differs.
        """
        check_weights(self.layout, self.actor.rank, self.destination, self.actor.version, f"method {name}")


class Copies:
    """Copies between views, which stay valid while the memory beneath them comes and goes; all are made at once."""

    def __init__(self) -> None:
        self._sources: list[Tensor] = []
        self._targets: list[Tensor] = []

    def add(self, source: Tensor, target: Tensor) -> None:
        """Add the copy of a view into another."""
        self._sources.append(source)
        self._targets.append(target)

    def run(self) -> None:
        """Make the copies."""
        if self._sources:
            torch._foreach_copy_(self._targets, self._sources)


class CopyingMethod(Method):
    """A method that leaves the training copy where it is and fills the engine's parameters beside it.

    The engine's parameters take memory before the weights come and give it up on the way back, as vLLM's do between
    `wake_up(tags=["weights"])` and `sleep`. Nothing else happens on the way back: the training copy has stayed.
    """

    def prepare(self) -> None:
        actor = self.actor
        self.layout = vllm_layout(actor.shape, GenerationGrid(actor.grid, self.setting.gen, Grouping.VANILLA))
        self.destination = engine_weights(actor, self.layout)
        self._padded = [p.name for p in self.layout.shard(actor.rank).parameters if p.has_padding]
        self.buffers = self.make_buffers()
        self.buffers.release()
        self.destination.release()
        return_memory_to_system()
        self.ledger = StorageLedger(
            {TRAINING: actor.weights, GENERATING: self.destination, "buffers": self.buffers}
        )

    @abstractmethod
    def make_buffers(self) -> WeightStorage:
        """Return the method's own buffers.

        They and the destination have memory now, for views to be made; afterwards only during `there`, and the
        destination until `back`.
        """

    @abstractmethod
    def move(self) -> int:
        """Fill the destination; returns the bytes that came from other ranks."""

    def there(self) -> SwitchReport:
        self.ledger.begin()
        self.destination.materialise(zero=self._padded)
        self.buffers.materialise()
        self.ledger.note()
        self.ledger.receive(self.move())
        self.buffers.release()
        return self.ledger.finish("to_generate", GENERATING)

    def back(self) -> SwitchReport:
        self.ledger.begin()
        self.destination.release()
        return self.ledger.finish("to_train", TRAINING)


def empty_weights(actor: Actor, shapes: Mapping[str, tuple[int, ...]]) -> WeightStorage:
    """Return plain tensors of the actor's type and device, with undefined contents."""
    return WeightStorage(
        {name: torch.empty(shape, dtype=actor.dtype, device=actor.device) for name, shape in shapes.items()}
    )


def engine_weights(actor: Actor, layout: Layout) -> WeightStorage:
    """Return empty tensors for this rank's shard of `layout`."""
    return empty_weights(actor, {p.name: p.shape for p in layout.shard(actor.rank).parameters})


def box_view(tensor: Tensor, box: Box) -> Tensor:
    """Return the elements of a box of a tensor."""
    return tensor[tuple(slice(start, stop) for start, stop in box)]

"""Base classes of the methods, which move the actor's weights into a destination layout and back, and count the cost."""

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
    """Settings of a method on one rank."""

    actor: Actor
    gen: GenSizes
    bucket_bytes: int
    verify: str
    timeout_s: float
    """Time limit of any wait."""
    nodes: NodeMap

    @property
    def bucket_elements(self) -> int:
        return self.bucket_bytes // self.actor.dtype.itemsize


class Method(ABC):
    """Method of moving weights from training to generation and back, on one rank. Calls are collective.

    Bytes, peaks and redundancy come from a `StorageLedger` over the weights of the actor and the destination, and the
    method's own buffers.
    """

    layout: Layout
    """Layout of the destination."""
    destination: WeightStorage

    def __init__(self, setting: Setting) -> None:
        self.setting, self.actor = setting, setting.actor

    @abstractmethod
    def prepare(self) -> None:
        """Create everything that a run would create once: groups, plans, the destination."""

    @abstractmethod
    def there(self) -> SwitchReport:
        """Move the actor's weights to the destination."""

    @abstractmethod
    def back(self) -> SwitchReport:
        """Make the actor ready to train again."""

    def check(self, name: str) -> None:
        """Check the weights delivered by `there`, bit for bit.

        Raises:
            TransferError: a parameter differs.
        """
        check_weights(self.layout, self.actor.rank, self.destination, self.actor.version, f"method {name}")


class Copies:
    """Batch of copies between views, which stay valid when their memory is released and reallocated."""

    def __init__(self) -> None:
        self._sources: list[Tensor] = []
        self._targets: list[Tensor] = []

    def add(self, source: Tensor, target: Tensor) -> None:
        """Add a copy from one view to another."""
        self._sources.append(source)
        self._targets.append(target)

    def run(self) -> None:
        """Execute all copies."""
        if self._sources:
            torch._foreach_copy_(self._targets, self._sources)


class CopyingMethod(Method):
    """Method that keeps the training copy in memory and fills separate engine parameters.

    The engine's parameters are allocated before the weights arrive and released on the way back, as vLLM's are between
    `wake_up(tags=["weights"])` and `sleep`. Nothing else happens on the way back.
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

        They and the destination have memory during this call, so that views can be made; afterwards the buffers have it
        only during `there`, and the destination until `back`.
        """

    @abstractmethod
    def move(self) -> int:
        """Fill the destination and return the bytes received from other ranks."""

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
    """Return uninitialised tensors of the actor's type on its device."""
    return WeightStorage(
        {name: torch.empty(shape, dtype=actor.dtype, device=actor.device) for name, shape in shapes.items()}
    )


def engine_weights(actor: Actor, layout: Layout) -> WeightStorage:
    """Return empty tensors for this rank's shard of `layout`."""
    return empty_weights(actor, {p.name: p.shape for p in layout.shard(actor.rank).parameters})


def box_view(tensor: Tensor, box: Box) -> Tensor:
    """Return the view of a box of a tensor."""
    return tensor[tuple(slice(start, stop) for start, stop in box)]

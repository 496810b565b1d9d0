"""Base classes of the methods, which move the actor's weights into a destination layout and back, and count the cost."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from hybridengine.bench.reshard.actor import Actor
from hybridengine.bench.reshard.spec import BenchSpec, LayoutPair
from hybridengine.reshard.boxes import Box
from hybridengine.reshard.layout import Layout
from hybridengine.reshard.vllm import vllm_layout
from hybridengine.topology.generation import GenerationGrid, Grouping
from hybridengine.weights.ledger import StorageLedger, SwitchReport
from hybridengine.weights.storage import WeightStorage, return_memory_to_system

TRAINING, GENERATING = "training", "generating"


class Method(ABC):
    """Method of moving weights to generation and back on one rank, counted by a `StorageLedger`. Calls are collective."""

    layout: Layout
    """Layout of the destination."""
    destination: WeightStorage

    def __init__(self, actor: Actor, spec: BenchSpec, pair: LayoutPair, verify: str) -> None:
        self.actor, self.spec, self.pair, self.verify = actor, spec, pair, verify
        self.bucket_elements = spec.bucket_bytes // actor.dtype.itemsize
        self.prepare()

    @abstractmethod
    def prepare(self) -> None:
        """Create everything that a run would create once: groups, plans, the destination."""

    @abstractmethod
    def there(self) -> SwitchReport:
        """Move the actor's weights to the destination."""

    @abstractmethod
    def back(self) -> SwitchReport:
        """Make the actor ready to train again."""


class Copies:
    """Batch of copies between views, which stay valid when their memory is released and reallocated."""

    def __init__(self) -> None:
        self._sources: list[Tensor] = []
        self._targets: list[Tensor] = []

    def add(self, source: Tensor, target: Tensor) -> None:
        self._sources.append(source)
        self._targets.append(target)

    def run(self) -> None:
        if self._sources:
            torch._foreach_copy_(self._targets, self._sources)


@dataclass(frozen=True)
class Bucket:
    """One gather, with views that stay valid when buffers are released and reallocated."""

    gathered: Tensor
    """Gathered parts, [ranks of the group, elements of the largest part]."""
    own: Copies = field(default_factory=Copies)
    """Copies of this rank's contribution into the buffer."""
    root: int = 0
    """Global rank that broadcasts this rank's part over the stages (per-tensor)."""
    assembled: Copies = field(default_factory=Copies)
    """Copies from the buffer into full tensors (per-tensor)."""
    loaded: Copies = field(default_factory=Copies)
    """Copies of the parts that this rank's engine needs."""


class CopyingMethod(Method):
    """Method that keeps the training copy in memory and fills engine parameters, which are released on the way back."""

    def prepare(self) -> None:
        actor = self.actor
        self.layout = vllm_layout(actor.shape, GenerationGrid(actor.grid, self.pair.gen, Grouping.VANILLA))
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
        """Return the method's own buffers, which have memory during this call, so that views can be made, and `there`."""

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
    """Return uninitialised tensors for this rank's shard of `layout`."""
    return empty_weights(actor, {p.name: p.shape for p in layout.shard(actor.rank).parameters})


def all_gather(gathered: Tensor, group: dist.ProcessGroup) -> int:
    """Fill `gathered`, [ranks of the group, elements], in which this rank has written its row; return received bytes."""
    if len(gathered) > 1:
        dist.all_gather_into_tensor(gathered.view(-1), gathered[dist.get_rank(group)], group=group)
    return gathered[1:].nbytes


def box_view(tensor: Tensor, box: Box) -> Tensor:
    return tensor[tuple(slice(start, stop) for start, stop in box)]

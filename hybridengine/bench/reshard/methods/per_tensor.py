"""per-tensor: stream full Hugging Face tensors to all ranks, each of which copies its slice (verl and others)."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from hybridengine.bench.reshard.collectives import CollectiveTransport
from hybridengine.bench.reshard.methods.method import Copies, CopyingMethod, box_view, empty_weights
from hybridengine.reshard.boxes import Box, full_box, num_elements
from hybridengine.reshard.layout import LocalParameter
from hybridengine.weights.storage import WeightStorage


@dataclass(frozen=True)
class _Bucket:
    """Parameters of one pipeline stage, with views that stay valid when buffers are released and reallocated."""

    root: int
    """Global rank that broadcasts this tensor-parallel rank's part over the stages."""
    gathered: Tensor
    """Gathered parts, [tensor-parallel ranks, elements of a part]."""
    own: Copies = field(default_factory=Copies)
    """Copies of this rank's contribution; empty on ranks of other stages."""
    assembled: Copies = field(default_factory=Copies)
    """Copies from `gathered` into full tensors."""
    loaded: Copies = field(default_factory=Copies)
    """Copies of the slices that this rank's engine needs."""


class PerTensor(CopyingMethod):
    """Stream of full tensors, stage by stage.

    Shards are broadcast over the pipeline group and all-gathered over the tensor-parallel group; full Hugging Face
    tensors are assembled, and every rank copies its slice into the engine's parameters. This is how verl loads vLLM
    (`per_tensor_generator`, then the engine's `load_weights`), in the same order. Unlike in verl, every collective is
    bucketed, buffers are made once, and names, owners and views are known in advance. As with verl's defaults, the
    training copy stays in memory and the engine drops its weights on the way back.

    Source: verl, verl/utils/megatron_utils.py (`per_tensor_generator`, `broadcast_from_megatron_pp`).
    """

    def make_buffers(self) -> WeightStorage:
        actor = self.actor
        self._tensor = CollectiveTransport(actor.groups.tp)
        self._pipeline = CollectiveTransport(actor.groups.pp)
        batches = self._batches()
        widths = [sum(parameter.num_elements for parameter in batch) for _, batch in batches]
        full_sizes = [sum(map(num_elements, self._full_boxes(batch).values())) for _, batch in batches]
        made = empty_weights(
            actor, {"gathered": (max(widths) * self._tensor.size,), "full": (max(full_sizes),)}
        )
        self._buckets = [
            self._bucket(stage, batch, width, made)
            for (stage, batch), width in zip(batches, widths, strict=True)
        ]
        return made

    def move(self) -> int:
        before = self._tensor.received_bytes + self._pipeline.received_bytes
        for bucket in self._buckets:
            bucket.own.run()
            self._pipeline.broadcast(bucket.gathered[self._tensor.rank], bucket.root)
            self._tensor.all_gather(bucket.gathered)
            bucket.assembled.run()
            bucket.loaded.run()
        return self._tensor.received_bytes + self._pipeline.received_bytes - before

    def _batches(self) -> list[tuple[int, list[LocalParameter]]]:
        """Return (stage, parameters sent together) in model order; a tensor that two stages hold is sent once.

        The parameters are those of the first tensor-parallel rank; those of the others have the same sizes and tensors.
        """
        seen: set[str] = set()
        batches: list[tuple[int, list[LocalParameter]]] = []
        for stage, rank in enumerate(self._pipeline.ranks):
            assert self.actor.grid.coordinate(rank).pp_rank == stage, "pipeline groups list stages in order"
            size = self.setting.bucket_elements
            for parameter in self.actor.layout.shards[(stage, 0)].parameters:
                if parameter.tensor in seen:
                    continue
                seen.add(parameter.tensor)
                added = parameter.num_elements * self._tensor.size
                if not batches or batches[-1][0] != stage or size + added > self.setting.bucket_elements:
                    batches.append((stage, []))
                    size = 0
                batches[-1][1].append(parameter)
                size += added
        return batches

    def _full_boxes(self, batch: list[LocalParameter]) -> dict[str, Box]:
        """Return the full box of each tensor of which a batch has parts."""
        tensors = self.actor.shape.tensors
        return {
            piece.tensor: full_box(tensors[piece.tensor]) for parameter in batch for piece in parameter.pieces
        }

    def _bucket(self, stage: int, batch: list[LocalParameter], width: int, made: WeightStorage) -> _Bucket:
        actor, size = self.actor, self._tensor.size
        bucket = _Bucket(self._pipeline.ranks[stage], made["gathered"][: width * size].view(size, width))
        full, offset = {}, 0
        for name, box in self._full_boxes(batch).items():
            end = offset + num_elements(box)
            full[name] = made["full"][offset:end].view([stop for _, stop in box])
            offset = end
        arrived: set[tuple[str, Box]] = set()
        is_own_stage = actor.grid.coordinate(actor.rank).pp_rank == stage
        for tp_rank in range(size):
            by_name = actor.layout.shards[(stage, tp_rank)].by_name
            offset = 0
            for parameter in (by_name[parameter.name] for parameter in batch):
                end = offset + parameter.num_elements
                view = bucket.gathered[tp_rank, offset:end].view(parameter.shape)
                offset = end
                if is_own_stage and tp_rank == self._tensor.rank:
                    bucket.own.add(actor.weights[parameter.name], view)
                for piece in parameter.pieces:
                    if (piece.tensor, piece.box) not in arrived:  # norms are on every tensor-parallel rank
                        arrived.add((piece.tensor, piece.box))
                        bucket.assembled.add(view[piece.index], box_view(full[piece.tensor], piece.box))
        for parameter in self.layout.shard(actor.rank).parameters:
            for piece in parameter.pieces:
                if piece.tensor in full:
                    wanted = box_view(full[piece.tensor], piece.box)
                    bucket.loaded.add(wanted, self.destination[parameter.name][piece.index])
        return bucket

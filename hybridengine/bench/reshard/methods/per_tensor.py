"""per-tensor: stream full Hugging Face tensors to all ranks, each of which copies its slice (verl and others)."""

from __future__ import annotations

import math

import torch.distributed as dist

from hybridengine.bench.reshard.methods.method import (
    Bucket,
    CopyingMethod,
    all_gather,
    box_view,
    empty_weights,
)
from hybridengine.reshard.boxes import Box
from hybridengine.reshard.layout import LocalParameter
from hybridengine.weights.storage import WeightStorage


class PerTensor(CopyingMethod):
    """Stream of full tensors, stage by stage.

    Shards are broadcast over the pipeline group and all-gathered over the tensor-parallel group; full Hugging Face
    tensors are assembled, and every rank copies its slice into the engine's parameters, as verl loads vLLM. Unlike in
    verl, every collective is bucketed, buffers are made once, and names, owners and views are known in advance.

    Source: verl, verl/utils/megatron_utils.py (`per_tensor_generator`, `broadcast_from_megatron_pp`).
    """

    def make_buffers(self) -> WeightStorage:
        self._stages = dist.get_process_group_ranks(self.actor.groups.pp)
        batches = self._batches()
        largest = max(sum(parameter.num_elements for parameter in batch) for _, batch in batches)
        size = largest * self.actor.grid.sizes.tp_size
        made = empty_weights(self.actor, {"gathered": (size,), "full": (size,)})
        self._buckets = [self._bucket(stage, batch, made) for stage, batch in batches]
        return made

    def move(self) -> int:
        groups, received = self.actor.groups, 0
        for bucket in self._buckets:
            bucket.own.run()
            part = bucket.gathered[dist.get_rank(groups.tp)]
            if len(self._stages) > 1:
                dist.broadcast(part, bucket.root, group=groups.pp)
            received += part.nbytes if bucket.root != self.actor.rank else 0
            received += all_gather(bucket.gathered, groups.tp)
            bucket.assembled.run()
            bucket.loaded.run()
        return received

    def _batches(self) -> list[tuple[int, list[LocalParameter]]]:
        """Return (stage, parameters of its first rank, sent together); a tensor that two stages hold is sent once."""
        seen: set[str] = set()
        batches: list[tuple[int, list[LocalParameter]]] = []
        for stage in range(len(self._stages)):
            size = self.bucket_elements
            for parameter in self.actor.layout.shards[(stage, 0)].parameters:
                if parameter.tensor in seen:
                    continue
                seen.add(parameter.tensor)
                added = parameter.num_elements * self.actor.grid.sizes.tp_size
                if not batches or batches[-1][0] != stage or size + added > self.bucket_elements:
                    batches.append((stage, []))
                    size = 0
                batches[-1][1].append(parameter)
                size += added
        return batches

    def _bucket(self, stage: int, batch: list[LocalParameter], made: WeightStorage) -> Bucket:
        actor, size = self.actor, self.actor.grid.sizes.tp_size
        width = sum(parameter.num_elements for parameter in batch)
        bucket = Bucket(made["gathered"][: width * size].view(size, width), root=self._stages[stage])
        full, offset = {}, 0
        for name in dict.fromkeys(piece.tensor for parameter in batch for piece in parameter.pieces):
            shape = actor.shape.tensors[name]
            end = offset + math.prod(shape)
            full[name] = made["full"][offset:end].view(shape)
            offset = end
        arrived: set[tuple[str, Box]] = set()
        place = actor.grid.coordinate(actor.rank)
        for tp_rank in range(size):
            by_name = actor.layout.shards[(stage, tp_rank)].by_name
            offset = 0
            for parameter in (by_name[parameter.name] for parameter in batch):
                end = offset + parameter.num_elements
                view = bucket.gathered[tp_rank, offset:end].view(parameter.shape)
                offset = end
                if (place.pp_rank, place.tp_rank) == (stage, tp_rank):
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

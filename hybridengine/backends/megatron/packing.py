"""Micro-batches as Megatron-core sees them: rows one behind another without padding, and divided over context ranks.

Of the 2c equal parts of each row, context-parallel rank r of c holds parts r and 2c-1-r: Megatron-core's order, in which
all ranks compute as much causal attention.

Shapes: B rows, T tokens of a row, R wanted positions, S tokens of a pack, N wanted outputs of this rank, L layers with
experts, K experts of a token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridengine.backends.megatron.routing import RoutedPack
from hybridengine.backends.megatron.shim import device
from hybridengine.backends.megatron.sight import Sight, sight_of
from hybridengine.backends.places import Places
from hybridengine.backends.policy import MicroBatch
from hybridengine.families.sizes import VisionSizes
from hybridengine.rows.images import IMAGE_BYTES, IMAGE_SIZES, images_of_columns
from hybridengine.rows.micro_batches import ROUTES

_NOT_FOR_LOSSES = (ROUTES, IMAGE_SIZES, IMAGE_BYTES)
"""Columns of micro-batches that only the model reads."""


@dataclass(frozen=True)
class Pack:
    """A micro-batch on its way through the model; all tensors are on this rank's device."""

    tokens_1S: Tensor
    """This rank's tokens, [1, S / c]."""
    offsets_1S: Tensor
    """The position of each token in its row."""
    params: RoutedPack
    """Bounds of the rows among all S tokens, and the routes of this rank's share."""
    wanted_N: Tensor
    """Indices of this rank's tokens whose outputs are wanted."""
    places: Places
    """Where these outputs belong, [B, R]."""
    columns: MicroBatch
    sight: Sight | None = None
    """Images, for a model that reads them."""


@dataclass(frozen=True)
class Packing:
    """How the ranks of a model share a pack: its rows over `context`, and its tokens over `tp_size` ranks."""

    context: dist.ProcessGroup
    tp_size: int
    """Tensor-parallel ranks with a part of the sequence each; 1 without sequence parallelism."""
    tp_rank: int = 0
    multiple: int = 1
    """Number of which a rank's tokens are a multiple, as matrix products in FP8 need it."""
    vision: VisionSizes | None = None
    """Vision tower of a model that reads images."""

    @property
    def row_unit(self) -> int:
        """Number of which the tokens of each row are a multiple, by padding on its right."""
        return 2 * self.context.size() if self.context.size() > 1 else 1

    def num_tokens(self, batch: MicroBatch) -> int:
        """Return the number of tokens of a pack, which this rank's peers can divide among them."""
        return -(-int(self._row_sizes(batch).sum()) // self._unit) * self._unit

    def packs(self, batches: Sequence[MicroBatch], same_size: bool) -> list[Pack]:
        """Return the packs; with `same_size` all have as many tokens as the largest, so that no stage asks for sizes."""
        sizes = [self.num_tokens(batch) for batch in batches]
        if same_size:
            sizes = [max(sizes)] * len(sizes)
        return [self._pack(batch, size) for batch, size in zip(batches, sizes, strict=True)]

    def empty_like(self, pack: Pack) -> Pack:
        """Return a pack of as many tokens as another's, whose outputs nobody wants."""
        batch = {
            "tokens": torch.zeros(1, 1, dtype=torch.int64),
            "positions": torch.full((1, 1), -1),
            "weight": torch.zeros(()),
        }
        size = pack.tokens_1S.size(1) * self.context.size()
        return replace(self._pack(batch, size), columns={})

    @property
    def _unit(self) -> int:
        return math.lcm(self.row_unit, self.context.size() * self.tp_size * self.multiple)

    def _row_sizes(self, batch: MicroBatch) -> Tensor:
        return -(-_lengths(batch).clamp(min=1) // self.row_unit) * self.row_unit

    def _pack(self, batch: MicroBatch, size: int) -> Pack:
        tokens_BT, lengths_B, sizes_B = batch["tokens"].cpu(), _lengths(batch), self._row_sizes(batch)
        num_rows, width = tokens_BT.shape
        filler = size - int(sizes_B.sum())
        bounds = torch.cat([sizes_B.new_zeros(1), sizes_B, sizes_B.new_tensor([filler] if filler else [])])
        bounds = bounds.cumsum(0)
        row_S = torch.repeat_interleave(torch.arange(len(bounds) - 1), bounds.diff())
        offset_S = torch.arange(size) - bounds[row_S]
        padded_BT = torch.cat([tokens_BT, tokens_BT.new_zeros(1, width)])
        inside_S = offset_S < torch.cat([lengths_B, lengths_B.new_zeros(1)])[row_S]
        tokens_S = padded_BT[row_S, offset_S.clamp(max=width - 1)].masked_fill(~inside_S, 0)
        positions_BR = batch.get("positions")
        if positions_BR is None:
            every = torch.arange(width).expand(num_rows, width)
            positions_BR = every.masked_fill(every >= lengths_B.unsqueeze(1), -1)
        positions_BR = positions_BR.cpu()
        entries_N = (positions_BR.flatten() >= 0).nonzero().flatten()
        wanted_N = (positions_BR + bounds[:num_rows].unsqueeze(1)).flatten()[entries_N]
        held = held_tokens(bounds, self.context.size())[self.context.rank()]
        if self.context.size() > 1:
            index_S = held.new_full((size,), -1)
            index_S[held] = torch.arange(len(held))
            here = index_S[wanted_N] >= 0
            entries_N, wanted_N = entries_N[here], index_S[wanted_N][here]
        routed = self._routed(batch, inside_S, row_S, offset_S, held)
        longest = int(bounds.diff().max())
        bounds = bounds.int().to(device())
        return Pack(
            tokens_S[held].unsqueeze(0).to(device()),
            offset_S[held].unsqueeze(0).to(device()),
            RoutedPack(
                qkv_format="thd",
                cu_seqlens_q=bounds,
                cu_seqlens_kv=bounds,
                max_seqlen_q=longest,
                max_seqlen_kv=longest,
                **routed,
            ),
            wanted_N.to(device()),
            Places(tuple(positions_BR.shape), entries_N.to(device()), self.context),
            {name: tensor.to(device()) for name, tensor in batch.items() if name not in _NOT_FOR_LOSSES},
            self._sight(batch, bounds.cpu(), held),
        )

    def _sight(self, batch: MicroBatch, bounds: Tensor, held: Tensor) -> Sight | None:
        """Return what a model that reads images sees in a micro-batch; None for other models."""
        if self.vision is None:
            return None
        lengths = _lengths(batch).tolist()
        rows = [row[:length].numpy() for row, length in zip(batch["tokens"].cpu(), lengths, strict=True)]
        images = images_of_columns(batch) if IMAGE_BYTES in batch else [()] * len(rows)
        return sight_of(self.vision, rows, images, bounds, held.chunk(self.tp_size)[self.tp_rank])

    def _routed(
        self, batch: MicroBatch, inside_S: Tensor, row_S: Tensor, offset_S: Tensor, held: Tensor
    ) -> dict[str, Any]:
        """Return how the tokens of this rank are routed: those of its layers, of which tensor ranks may have parts."""
        own = held.chunk(self.tp_size)[self.tp_rank]
        weight = batch["weight"] if "weight" in batch else batch.get("mask", inside_S).sum()
        routed = {"is_token_N": inside_S[own].to(device()), "weight": float(weight)}
        if ROUTES not in batch:
            return routed
        routes_BTLK = batch[ROUTES].cpu()
        rows, places = (
            row_S[own].clamp(max=routes_BTLK.size(0) - 1),
            offset_S[own].clamp(max=routes_BTLK.size(1) - 1),
        )
        routes_NLK = routes_BTLK[rows, places].masked_fill(~inside_S[own][:, None, None], -1)
        return routed | {"routes_NLK": routes_NLK.to(device())}


def held_tokens(bounds: Tensor, cp_size: int) -> list[Tensor]:
    """Return the indices among a pack's tokens of those that each of `cp_size` ranks holds, in its order."""
    if cp_size == 1:
        return [torch.arange(int(bounds[-1]), device=bounds.device)]
    starts, parts = bounds[:-1], bounds.diff() // (2 * cp_size)
    held = []
    for rank in range(cp_size):
        # Each row's two parts, as ranges of its length / c tokens.
        firsts = torch.stack([starts + rank * parts, starts + (2 * cp_size - 1 - rank) * parts], -1).flatten()
        counts = parts.repeat_interleave(2)
        begins = counts.cumsum(0) - counts
        places = torch.arange(int(counts.sum()), device=bounds.device)
        held.append(places + torch.repeat_interleave(firsts - begins, counts))
    return held


def _lengths(batch: MicroBatch) -> Tensor:
    """Return the number of tokens of each row, [B]."""
    num_rows, width = batch["tokens"].shape
    return batch["lengths"].cpu() if "lengths" in batch else torch.full((num_rows,), width)

"""The layout of a Hugging Face checkpoint: all logical tensors, unsharded, on the ranks that hold the files."""

from __future__ import annotations

from functools import lru_cache

from hybridengine.models.shapes import ModelShape
from hybridengine.reshard.layout import Layout, Shard, whole


@lru_cache(maxsize=16)
def hf_layout(shape: ModelShape, ranks: tuple[int, ...] = (0,)) -> Layout:
    """Return the layout in which each of `ranks` holds all logical tensors under their own names."""
    shard = Shard(tuple(whole(name, name, size) for name, size in shape.tensors.items()))
    return Layout(shape, dict.fromkeys(ranks, ()), {(): shard}, kind="hugging face")

"""Engines that keep the MLPs of all layers in two 3-d parameters, as vLLM keeps experts; also cut in numpy.

w13 [L, 2I, H]: the gate rows, then the up rows of each layer. w2 [L, H, I]: the down projection of each layer.
"""

from __future__ import annotations

import numpy as np

from hybridengine.models.shapes import ModelShape
from hybridengine.reshard.layout import Layout, Shard, row_stack, sharded, stacked, whole
from tests.unit.numpy_shards import Arrays

KINDS = ("rows", "layers")
"""Two ranks share the rows of every layer, or each has half of the layers, as in expert parallelism."""


def held_layers(shape: ModelShape, kind: str, rank: int) -> range:
    half = shape.num_layers // 2
    return range(rank % 2 * half, (rank % 2 + 1) * half) if kind == "layers" else range(shape.num_layers)


def stacked_layout(shape: ModelShape, kind: str, num_ranks: int) -> Layout:
    """Return a layout in which even ranks hold half of the MLPs, odd ranks the other half, all ranks everything else."""
    count = 1 if kind == "layers" else 2
    shards = {}
    for half in (0, 1):
        index = half % count
        layers = [f"model.layers.{layer}.mlp." for layer in held_layers(shape, kind, half)]
        rows = shape.ffn_hidden_size // count
        share = (index * rows, (index + 1) * rows)
        gate_up = [
            row_stack("", [(name, shape.tensors[name], share) for name in names])
            for names in ([f"{layer}{x}_proj.weight" for x in ("gate", "up")] for layer in layers)
        ]
        down = [
            sharded(
                "", f"{layer}down_proj.weight", shape.tensors[f"{layer}down_proj.weight"], 1, index, count
            )
            for layer in layers
        ]
        rest = [whole(name, name, size) for name, size in shape.tensors.items() if ".mlp." not in name]
        shards[half,] = Shard((stacked("w13", gate_up), stacked("w2", down), *rest))
    return Layout(shape, {rank: (rank % 2,) for rank in range(num_ranks)}, shards, kind=f"stacked {kind}")


def stacked_reference(shape: ModelShape, tensors: Arrays, kind: str, rank: int) -> Arrays:
    """Return the parameters of a rank, without layouts."""

    def part(layer: int, name: str, axis: int) -> np.ndarray:
        matrix = tensors[f"model.layers.{layer}.mlp.{name}_proj.weight"]
        return matrix if kind == "layers" else np.split(matrix, 2, axis)[rank % 2]

    layers = held_layers(shape, kind, rank)
    gate_up = [np.concatenate([part(layer, "gate", 0), part(layer, "up", 0)]) for layer in layers]
    rest = {name: values for name, values in tensors.items() if ".mlp." not in name}
    return {"w13": np.stack(gate_up), "w2": np.stack([part(layer, "down", 1) for layer in layers]), **rest}

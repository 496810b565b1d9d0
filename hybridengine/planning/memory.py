"""Memory of training on one rank: weights, gradients and optimizer state.

Activations and framework overhead are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

from hybridengine.model_shapes import DTYPE_BYTES, ModelShape
from hybridengine.reshard.megatron import megatron_layout
from hybridengine.topology.grid import Grid

GRADIENT_BYTES = 4
MOMENT_BYTES = 8
"""Adam's two moments in float32."""


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes of the rank with the most, for a model that is trained."""

    weights_bytes: int
    gradients_bytes: int
    """Float32, released while generating."""
    optimizer_bytes: int
    """Moments, and float32 master weights where the weights are not float32; sharded over d."""


def training_memory(shape: ModelShape, grid: Grid, dtype: str) -> TrainingMemory:
    """Memory of training `shape` on `grid` under the distributed optimizer."""
    layout = megatron_layout(shape, grid)
    elements = max(shard.num_elements for shard in layout.shards.values())
    per_weight = MOMENT_BYTES + (4 if dtype != "float32" else 0)
    return TrainingMemory(
        weights_bytes=elements * DTYPE_BYTES[dtype],
        gradients_bytes=elements * GRADIENT_BYTES,
        optimizer_bytes=-(-elements * per_weight // grid.sizes.dp_size),
    )

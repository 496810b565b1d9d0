"""What a checkpoint of a run takes."""

from __future__ import annotations

from hybridengine.config import RunConfig, holder_shape, model_holders
from hybridengine.config.run_config import TRAINED
from hybridengine.model_shapes import DTYPE_BYTES

STATE_BYTES = 8
"""Of the optimizer, for each weight: two moments; a float32 copy comes on top where weights have another type."""


def checkpoint_bytes(config: RunConfig) -> int:
    """Bytes of the tensors in a checkpoint."""
    dtype_bytes = DTYPE_BYTES[config.model.dtype]
    each = dtype_bytes + STATE_BYTES + (4 if config.model.dtype != "float32" else 0)
    trained = (holder for holder in model_holders(config) if holder.role in TRAINED)
    return sum(each * holder_shape(config, holder).num_parameters for holder in trained)

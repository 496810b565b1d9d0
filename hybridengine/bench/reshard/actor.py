"""The weights that all methods move: one real Megatron-core GPTModel per rank, filled with values of a version."""

from __future__ import annotations

from hybridengine.backends.megatron.groups import build_groups
from hybridengine.backends.megatron.model import DTYPES, available_names, build_model
from hybridengine.bench.reshard.values import differing_parameters, fill
from hybridengine.errors import TransferError
from hybridengine.models.shapes import ModelShape
from hybridengine.reshard.layout import Layout
from hybridengine.reshard.megatron import megatron_layout
from hybridengine.topology.grid import Grid
from hybridengine.weights.process_groups import ProcessGroups
from hybridengine.weights.storage import WeightStorage


class Actor:
    """One rank's part of a model under (p, t, d). Making it is collective over all ranks.

    Implements TrainingSide. There are no gradients and no optimizer state: the benchmark prices weights alone.
    """

    def __init__(self, shape: ModelShape, grid: Grid, rank: int, registry: ProcessGroups, dtype: str) -> None:
        self.shape, self.grid, self.rank, self.registry, self.dtype_name = shape, grid, rank, registry, dtype
        names = available_names()
        self.groups = build_groups(grid, registry)
        self.module = build_model(shape, grid.sizes, self.groups, dtype, names)
        self.module.requires_grad_(False)
        self.layout: Layout = megatron_layout(shape, grid, names)
        parameters = dict(self.module.named_parameters())
        self.weights = WeightStorage(parameters, current=lambda: dict(self.module.named_parameters()))
        self.dtype, self.device = DTYPES[dtype], next(self.module.parameters()).device
        self.version, self.gradient_bytes = 0, 0

    def fill(self, version: int) -> None:
        """Take the values of `version`."""
        fill(self.layout.shard(self.rank), self.weights, version)
        self.version = version

    def check(self, after: str) -> None:
        """Check that the weights are whole.

        Raises:
            TransferError: `after` has changed or lost them.
        """
        check_weights(self.layout, self.rank, self.weights, self.version, after)

    def leave_training(self) -> None:
        """There is nothing that only training needs."""

    def enter_training(self) -> None:
        """There is nothing to take back."""


def check_weights(layout: Layout, rank: int, weights: WeightStorage, version: int, after: str) -> None:
    """Check that a rank's weights are the values of `version`, bit for bit.

    Raises:
        TransferError: names the rank and the first parameters that differ.
    """
    wrong = differing_parameters(layout.shard(rank), weights, version)
    if wrong:
        shown = ", ".join(wrong[:3]) + (f" and {len(wrong) - 3} more" if len(wrong) > 3 else "")
        raise TransferError(
            f"{after} left wrong weights on rank {rank} in {layout.kind}: {shown} differ from the values of the"
            " logical tensors; no timing of it counts"
        )

"""Weights that all methods move: one Megatron-core GPTModel per rank, filled with the values of a version."""

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
    """One rank's part of a model under (p, t, d). Its construction is collective over all ranks.

    Implements TrainingSide, without gradients or optimizer state: the benchmark measures weights alone.
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
        """Fill the weights with the values of `version`."""
        fill(self.layout.shard(self.rank), self.weights, version)
        self.version = version

    def check(self, after: str) -> None:
        """Check that the weights are intact.

        Raises:
            TransferError: a weight differs; the message names `after` as the cause.
        """
        check_weights(self.layout, self.rank, self.weights, self.version, after)

    def leave_training(self) -> None:
        """Do nothing: no state belongs to training only."""

    def enter_training(self) -> None:
        """Do nothing: no state was released."""


def check_weights(layout: Layout, rank: int, weights: WeightStorage, version: int, after: str) -> None:
    """Check that a rank's weights are the values of `version`, bit for bit.

    Raises:
        TransferError: a parameter differs; the message names the rank and the first parameters.
    """
    wrong = differing_parameters(layout.shard(rank), weights, version)
    if wrong:
        shown = ", ".join(wrong[:3]) + (f" and {len(wrong) - 3} more" if len(wrong) > 3 else "")
        raise TransferError(
            f"{after} left wrong weights on rank {rank} in {layout.kind}: {shown} differ from the values of the"
            " logical tensors; no timing of it counts"
        )

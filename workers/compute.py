"""Plain functions over rows on the ranks that hold them, such as advantages and statistics between model calls."""

from __future__ import annotations

from typing import Any

from tensordict import TensorDict, TensorDictBase

from hybridengine.algorithms.across import Across
from hybridengine.config import RunConfig
from hybridengine.importing import import_object
from hybridengine.rows.protocols import DP_PROTO, ROW_NUMBERS, RankContext, register
from hybridengine.weights.process_groups import process_groups


class ComputeWorker:
    """One rank's share of the rows.

    Functions receive a copy of this rank's rows, with the column `ROW_NUMBERS`, and an `Across` over all ranks.
    """

    def __init__(self, context: RankContext, run: RunConfig) -> None:
        registry = process_groups(run.timeouts.collective_s)
        self._across = Across(registry.of((tuple(range(context.world_size)),)))

    @register(DP_PROTO, optional=[ROW_NUMBERS], returns_rows=True)
    def map(self, rows: TensorDictBase, function: str, *arguments: Any) -> TensorDict:
        """Return the columns that `function(rows, across, *arguments)` computes from these rows."""
        return import_object(function)(rows.clone(), self._across, *arguments)

    @register(DP_PROTO, optional=[ROW_NUMBERS])
    def measure(self, rows: TensorDictBase, function: str, *arguments: Any) -> dict[str, float]:
        """Return the metrics that `function(rows, across, *arguments)` computes from all rows; the same on every rank."""
        return import_object(function)(rows.clone(), self._across, *arguments)

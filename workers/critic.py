"""The critic, which estimates the value of every state of a response."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from hybridengine.algorithms.losses.value import value_loss
from hybridengine.backends.megatron.outputs import response_values
from hybridengine.config import RunConfig
from hybridengine.rows.micro_batches import RESPONSE_MASK, SEQUENCE_COLUMNS
from hybridengine.rows.protocols import PROTO_3D, ROW_NUMBERS, RankContext, register
from workers.model_worker import TrainedWorker


class CriticWorker(TrainedWorker):
    """One rank of the critic: a language model whose head returns one value per token, initially zero."""

    def __init__(self, context: RankContext, run: RunConfig, folder: str | Path) -> None:
        super().__init__(context, run, folder, score_head=True)
        self.start_optimizer()
        self.trainer.leave_training()

    @register(PROTO_3D, SEQUENCE_COLUMNS, returns_rows=True)
    def compute_values(self, rollout: TensorDictBase) -> TensorDict | None:
        """Return `values` [B, R]: the value of the state before each response token."""
        return self.forward_rows(rollout, lambda scores, columns: {"values": response_values(scores)})

    @register(
        PROTO_3D,
        [*SEQUENCE_COLUMNS, "values", "returns"],
        optional=["keep", "trained", "versions", RESPONSE_MASK, ROW_NUMBERS],
    )
    def update(self, batch: TensorDictBase, version: int | None = None) -> dict[str, float]:
        """Update towards `returns` [B, R] from `values` [B, R]; return metrics on the last stage.

        Optional columns, `version` and StalenessError are those of `ActorWorker.update`.
        """
        clip = getattr(self.run, self.context.role).value_clip or None

        def loss(scores: Tensor, columns: dict[str, Tensor]) -> tuple[Tensor, Tensor, Any]:
            values, mask = response_values(scores), columns["mask"]
            total = value_loss(values, columns["values"], columns["returns"], mask, clip)
            count = mask.sum()
            return total.loss_sum, count.int(), (total.stats, int(count))

        metrics = self.update_rows(batch, ["values", "returns"], loss, version=version)
        role = self.context.role  # a run may have two critics
        return {f"{role}/{name.partition('/')[2]}": value for name, value in metrics.items()}

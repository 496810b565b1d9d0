"""The reference policy: the frozen model from which the KL penalty is measured."""

from __future__ import annotations

import contextlib
from pathlib import Path

from tensordict import TensorDict, TensorDictBase

from hybridengine.backends.megatron.offload import WeightOffload
from hybridengine.config import RunConfig
from hybridengine.rows.images import IMAGES
from hybridengine.rows.micro_batches import CLIENT_COLUMNS, SEQUENCE_COLUMNS
from hybridengine.rows.protocols import PROTO_3D, RankContext, register
from hybridengine.rows.supports import SUPPORTS
from workers.model_worker import ModelWorker
from workers.scoring import score_rows


class ReferenceWorker(ModelWorker):
    """One rank of the reference policy."""

    def __init__(self, context: RankContext, run: RunConfig, folder: str | Path) -> None:
        super().__init__(context, run, folder, score_head=False, trains=False)
        offloads = run.reference.offload == "weights"
        self._on_device = WeightOffload(self.model.weights).on_device if offloads else contextlib.nullcontext

    @register(PROTO_3D, SEQUENCE_COLUMNS, optional=[SUPPORTS, IMAGES], returns_rows=True)
    def compute_log_probs(self, rollout: TensorDictBase) -> TensorDict | None:
        """Return `ref_log_probs` [B, R] of the response tokens, among the tokens that could be drawn there."""
        with self._on_device():
            return self.forward_rows(
                rollout, lambda output, columns: {"ref_log_probs": self.log_probs_of(output, columns)[0]}
            )

    @register(PROTO_3D, CLIENT_COLUMNS, optional=["draws"], returns_rows=True)
    def score(self, batch: TensorDictBase, num_top: int) -> TensorDict | None:
        """Return log-probs, most likely tokens and drawn ones of a server's rows (`score_rows`)."""
        with self._on_device():
            return score_rows(self, batch, num_top)

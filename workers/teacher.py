"""The teacher: a frozen model of its own shape, which the actor is distilled from."""

from __future__ import annotations

import contextlib
from pathlib import Path

from tensordict import TensorDict, TensorDictBase

from hybridengine.backends.megatron.offload import WeightOffload
from hybridengine.config import RunConfig
from hybridengine.rows.micro_batches import SEQUENCE_COLUMNS
from hybridengine.rows.protocols import PROTO_3D, RankContext, register
from hybridengine.rows.supports import SUPPORTS
from workers.model_worker import ModelWorker
from workers.scoring import check_tokens


class TeacherWorker(ModelWorker):
    """One rank of the teacher."""

    def __init__(self, context: RankContext, run: RunConfig, folder: str | Path) -> None:
        super().__init__(context, run, folder, score_head=False, trains=False)
        offloads = run.teacher.offload == "weights"
        self._on_device = WeightOffload(self.model.weights).on_device if offloads else contextlib.nullcontext

    @register(PROTO_3D, SEQUENCE_COLUMNS, optional=[SUPPORTS], returns_rows=True)
    def compute_log_probs(self, rollout: TensorDictBase) -> TensorDict | None:
        """Return `teacher_log_probs` [B, R] of the response tokens, among the tokens that could be drawn there.

        Raises DataError for a token that the teacher does not have: a number beyond the tokenizer's, which only the
        actor's padded vocabulary has.
        """
        check_tokens(rollout, self.shape.vocab_size, ["tokens"])
        with self._on_device():
            return self.forward_rows(
                rollout, lambda output, columns: {"teacher_log_probs": self.log_probs_of(output, columns)[0]}
            )

"""The teacher: a frozen model of its own shape, which the actor is distilled from."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path

from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from hybridengine.backends.megatron.offload import WeightOffload
from hybridengine.backends.policy import MicroBatch
from hybridengine.backends.predictions import Predictions
from hybridengine.config import RunConfig, model_shape
from hybridengine.rows.images import IMAGES
from hybridengine.rows.micro_batches import SEQUENCE_COLUMNS, TEACHER_COLUMNS
from hybridengine.rows.protocols import PROTO_3D, RankContext, register
from hybridengine.rows.supports import SUPPORTS
from workers.model_worker import ModelWorker
from workers.scoring import check_tokens


class TeacherWorker(ModelWorker):
    """One rank of the teacher."""

    def __init__(self, context: RankContext, run: RunConfig, folder: str | Path) -> None:
        super().__init__(context, run, folder, score_head=False, trains=False)
        self._num_shared = min(self.shape.vocab_size, model_shape(run).vocab_size)
        """Number of tokens that both models have; further ones are padding."""
        offloads = run.teacher.offload == "weights"
        self._on_device = WeightOffload(self.model.weights).on_device if offloads else contextlib.nullcontext

    @register(PROTO_3D, SEQUENCE_COLUMNS, optional=[SUPPORTS, IMAGES], returns_rows=True)
    def compute_log_probs(self, rollout: TensorDictBase, top_k: int = 0) -> TensorDict | None:
        """Return `teacher_log_probs` [B, R] of the response tokens, among the tokens that could be drawn there.

        With `top_k`, also `TEACHER_COLUMNS` [B, R, K]: its most likely tokens of all that the actor has (int64), and
        their log-probs.

        Raises DataError for a token that the teacher does not have: a number beyond the tokenizer's, which only the
        actor's padded vocabulary has.
        """
        check_tokens(rollout, self.shape.vocab_size, ["tokens"])

        def outputs(output: Predictions, columns: MicroBatch) -> dict[str, Tensor]:
            found = {"teacher_log_probs": self.log_probs_of(output, columns)[0]}
            if top_k:
                shared = replace(output, vocab_size=self._num_shared)
                found |= zip(TEACHER_COLUMNS, shared.most_likely(top_k, temperature), strict=True)
            return found

        temperature = self.run.rollout.temperature
        with self._on_device():
            rows = self.forward_rows(rollout, outputs)
        if rows is not None and top_k:
            ids = TEACHER_COLUMNS[0]
            rows[ids] = rows[ids].long()  # ids below 2^24 are exact in float32
        return rows

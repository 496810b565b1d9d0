"""Rewards: a rule-based function of the response's text, or the score of a reward model."""

from __future__ import annotations

from pathlib import Path

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from hybridengine.backends.megatron.outputs import last_token_scores
from hybridengine.config import RunConfig
from hybridengine.controller.context import RankContext
from hybridengine.data.rewards import load_reward_function
from hybridengine.data.tokenizer import load_tokenizer
from hybridengine.errors import DataError
from hybridengine.protocols import DP_PROTO, PROTO_3D, register
from hybridengine.runtime.micro_batches import SEQUENCE_COLUMNS, cut_rows
from workers.model_worker import ModelWorker


class RewardFunctionWorker:
    """Scores responses with a Python function: `function(responses, answers) -> scores`."""

    def __init__(self, context: RankContext, run: RunConfig) -> None:
        self._tokenizer = load_tokenizer(run.tokenizer_folder, pad_with_eos=True)
        self._path = run.reward.function
        self._function = load_reward_function(run.reward.function)

    @register(DP_PROTO, [*SEQUENCE_COLUMNS, "answers"], returns_rows=True)
    def compute_scores(self, rollout: TensorDictBase) -> TensorDict:
        """`scores` [B] float32 of the responses' texts, without special tokens.

        Raises:
            DataError: the function returned another number of scores, or one that is not finite.
        """
        prompts, responses = rollout["prompt_lengths"].tolist(), rollout["response_lengths"].tolist()
        texts = self._tokenizer.batch_decode(
            [
                row[first : first + count]
                for row, first, count in zip(rollout["tokens"].tolist(), prompts, responses, strict=True)
            ],
            skip_special_tokens=True,
        )
        scores = torch.tensor(self._function(texts, list(rollout["answers"])), dtype=torch.float32)
        if scores.shape != (len(texts),) or not scores.isfinite().all():
            raise DataError(
                f"{self._path} returned scores of shape {tuple(scores.shape)} for {len(texts)} responses;"
                " it must return one finite number for each"
            )
        return TensorDict({"scores": scores}, batch_size=[len(texts)])


class RewardModelWorker(ModelWorker):
    """One rank of a reward model: a sequence-classification checkpoint with one label."""

    def __init__(self, context: RankContext, run: RunConfig, folder: str | Path) -> None:
        super().__init__(context, run, folder, score_head=False, trains=False)

    @register(PROTO_3D, SEQUENCE_COLUMNS, returns_rows=True)
    def compute_scores(self, rollout: TensorDictBase) -> TensorDict | None:
        """`scores` [B] float32: the head's output at each sequence's last token."""

        def output(scores: Tensor, columns: dict[str, Tensor]) -> dict[str, Tensor]:
            return {"scores": last_token_scores(scores, columns)}

        micro = cut_rows(rollout, self.max_tokens)
        results = self.model.forward([part.columns for part in micro], output)
        if not self.model.is_last_stage:
            return None
        scores = torch.zeros(len(rollout))
        for part, result in zip(micro, results, strict=True):
            scores[part.rows] = result["scores"].float().cpu()
        return TensorDict({"scores": scores}, batch_size=[len(rollout)])

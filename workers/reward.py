"""Rewards and costs: functions of a response's text in separate processes, or the score of a model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from tensordict import TensorDict, TensorDictBase

from hybridengine.config import RunConfig
from hybridengine.config.reward_sections import scorer_key
from hybridengine.data.rewards import RewardFunctions, reward_texts, score_column, scored_rows
from hybridengine.data.tokenizer import load_tokenizer
from hybridengine.errors import DataError
from hybridengine.rows.micro_batches import SEQUENCE_COLUMNS, cut_rows
from hybridengine.rows.protocols import DP_PROTO, ONE_TO_ALL, PROTO_3D, ROW_NUMBERS, RankContext, register
from workers.model_worker import ModelWorker


class RewardFunctionWorker:
    """Scores responses with the Python functions of a section, by default the one with the role's name."""

    def __init__(self, context: RankContext, run: RunConfig, section: str | None = None) -> None:
        name = section or context.role
        self._tokenizer = load_tokenizer(run.tokenizer_folder, pad_with_eos=True)
        self._functions = RewardFunctions(name, getattr(run, name), run.timeouts.start_s)
        self._columns = self._functions.start()

    @register(DP_PROTO, [*SEQUENCE_COLUMNS, "answers", ROW_NUMBERS], returns_rows=True)
    def compute_scores(self, rollout: TensorDictBase) -> TensorDict:
        """Return `scores` [B] float32, `dropped` [B] bool, for several terms `SECTION/NAME` [B] (`RewardFunctions`).

        Raises DataError if a function failed, and the section does not drop rows.
        """
        texts = reward_texts(rollout, self._tokenizer, self._columns)
        return self._functions.score(texts, rollout[ROW_NUMBERS].tolist())

    @register(ONE_TO_ALL)
    def take_metrics(self) -> dict[str, float]:
        """Return this rank's counters since the last call: calls, failures, retries and dropped rows."""
        return self._functions.take_metrics()

    def close(self) -> None:
        """End the functions' processes."""
        self._functions.close()


class RewardModelWorker(ModelWorker):
    """One rank of a model that scores responses: a sequence-classification checkpoint with one label.

    `section` is by default the role's name; `term` is "" for the only scorer.
    """

    def __init__(
        self,
        context: RankContext,
        run: RunConfig,
        folder: str | Path,
        section: str | None = None,
        term: str = "",
    ) -> None:
        name = section or context.role
        super().__init__(replace(context, role=name), run, folder, score_head=False, trains=False)
        self._key, self._column = f"{scorer_key(name, term)}.path={folder}", score_column(name, term)
        self.max_tokens = getattr(run, name).scorers[term].micro_batch_tokens

    @register(PROTO_3D, [*SEQUENCE_COLUMNS, ROW_NUMBERS], returns_rows=True)
    def compute_scores(self, rollout: TensorDictBase) -> TensorDict | None:
        """Return the head's output at each sequence's last token, [B] float32: `SECTION/NAME` for a term; otherwise
        `scores`, and `dropped` [B] bool, which is always False, as with functions. Scores must be finite.
        """

        micro = cut_rows(rollout, self.max_tokens)
        last_tokens = [
            part.columns | {"positions": part.columns["lengths"].unsqueeze(1) - 1} for part in micro
        ]
        results = self.model.forward(last_tokens, lambda scores, columns: {"scores": scores[:, 0, 0]})
        if not self.model.is_last_stage:
            return None
        scores = torch.zeros(len(rollout))
        for part, result in zip(micro, results, strict=True):
            scores[part.rows] = result["scores"].float().cpu()
        wrong = (~scores.isfinite()).nonzero().flatten().tolist()
        if wrong:
            raise DataError(
                f"{self._key}, row {int(rollout[ROW_NUMBERS][wrong[0]])}: the model's score is"
                f" {float(scores[wrong[0]])}, and that of {len(wrong)} of {len(scores)} rows is not finite; look for"
                " damaged weights, or use another dtype"
            )
        return scored_rows(self._column, scores)

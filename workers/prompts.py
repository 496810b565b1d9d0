"""Prompts, read from the data files by each rank, so that none pass through the controller."""

from __future__ import annotations

from functools import cached_property

from tensordict import TensorDict, TensorDictBase

from hybridengine.config import RunConfig
from hybridengine.data.datasets import PromptDataset, rows_after
from hybridengine.data.tokenizer import load_tokenizer
from hybridengine.rows.protocols import ONE_TO_ALL, PROTO_3D, ROW_NUMBERS, RankContext, register


class PromptWorker:
    """One rank's access to the prompts."""

    def __init__(self, context: RankContext, run: RunConfig) -> None:
        self._run = run
        self._begin_step, self._begin_drawn = 0, 0

    @register(ONE_TO_ALL)
    def go_on_after(self, step: int, prompts_drawn: int) -> None:
        """Start the next step after the first `prompts_drawn` prompts, whatever the batch size was before."""
        self._begin_step, self._begin_drawn = step, prompts_drawn

    @register(PROTO_3D, [ROW_NUMBERS], returns_rows=True)
    def training_prompts(self, rows: TensorDictBase, step: int) -> TensorDict:
        """Return the prompts of a step (from 1): `prompt_tokens` [B, P], `prompt_lengths`, `row_ids` [B], `answers`."""
        batch_size = self._run.data.batch_size
        num_drawn = self._begin_drawn + (step - 1 - self._begin_step) * batch_size
        row_ids = rows_after(len(self._training), batch_size, self._run.run.seed, num_drawn)
        return self._training.rows([row_ids[number] for number in rows[ROW_NUMBERS].tolist()])

    @register(PROTO_3D, [ROW_NUMBERS], returns_rows=True)
    def held_out_prompts(self, rows: TensorDictBase) -> TensorDict:
        """Return the held-out prompts in file order, repeated from the first if there are more rows than prompts."""
        numbers = rows[ROW_NUMBERS] % len(self._held_out)
        return self._held_out.rows(numbers.tolist())

    @cached_property
    def _training(self) -> PromptDataset:
        return self._dataset(self._run.train_file)

    @cached_property
    def _held_out(self) -> PromptDataset:
        return self._dataset(self._run.eval_file)

    def _dataset(self, file: object) -> PromptDataset:
        tokenizer = load_tokenizer(self._run.tokenizer_folder, pad_with_eos=True)
        return PromptDataset(str(file), tokenizer, self._run.rollout.max_prompt_tokens)

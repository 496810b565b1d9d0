"""Prompts, read from the data files by each rank, so that none pass through the controller."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from tensordict import TensorDict, TensorDictBase

from hybridengine.config import RunConfig
from hybridengine.data.datasets import (
    EPISODE_ROWS,
    PromptDataset,
    numbered_rows,
    prompts_digest,
    rows_after,
)
from hybridengine.data.images import image_reader
from hybridengine.data.responses import ResponseDataset
from hybridengine.data.tokenizer import load_tokenizer
from hybridengine.rows.protocols import ONE_TO_ALL, PROTO_3D, ROW_NUMBERS, RankContext, register


class PromptReader:
    """The prompts of a run, read from its files when they are first needed."""

    def __init__(self, run: RunConfig) -> None:
        self._run = run

    @cached_property
    def training(self) -> PromptDataset:
        return self._prompts(self._run.train_file)

    @cached_property
    def training_rows(self) -> PromptDataset | ResponseDataset:
        """Rows of the kind that the algorithm reads, as are `held_out_rows`."""
        return self._rows(self._run.train_file) if not self._run.algorithm.generates else self.training

    @cached_property
    def held_out_rows(self) -> PromptDataset | ResponseDataset:
        file = self._run.eval_file
        return self._rows(file) if not self._run.algorithm.generates else self._prompts(file)

    def prompts(self, numbers: Sequence[int]) -> TensorDict:
        """Return the prompts with these numbers in the endless stream of shuffled epochs."""
        return self.training.rows(numbered_rows(len(self.training), self._run.run.seed, numbers))

    def _rows(self, file: object) -> ResponseDataset:
        data, kind = self._run.data, self._run.algorithm.rows_kind
        tokenizer = load_tokenizer(self._run.tokenizer_folder, pad_with_eos=True)
        reader = image_reader(self._run)
        return ResponseDataset(str(file), tokenizer, kind, data.max_tokens, data.too_long, reader=reader)

    def _prompts(self, file: object) -> PromptDataset:
        tokenizer = load_tokenizer(self._run.tokenizer_folder, pad_with_eos=True)
        return PromptDataset(
            str(file),
            tokenizer,
            self._run.rollout.max_prompt_tokens,
            json_column=EPISODE_ROWS if self._run.rollout.episode is not None else None,
            reader=image_reader(self._run),
        )


class PromptWorker:
    """One rank's access to the prompts."""

    def __init__(self, context: RankContext, run: RunConfig) -> None:
        self._run, self._reader = run, PromptReader(run)
        self._begin_step, self._begin_drawn = 0, 0

    @register(ONE_TO_ALL)
    def go_on_after(self, step: int, prompts_drawn: int) -> None:
        """Start the next step after the first `prompts_drawn` prompts, whatever the batch size was before."""
        self._begin_step, self._begin_drawn = step, prompts_drawn

    @register(PROTO_3D, [ROW_NUMBERS], returns_rows=True)
    def training_prompts(self, rows: TensorDictBase, step: int, num_more: int = 0) -> TensorDict:
        """Return the rows of a step (from 1): `prompt_tokens` [B, P], `prompt_lengths`, `row_ids` [B], `answers`; for an
        offline algorithm the columns of a `ResponseDataset`.

        Before the step, `num_more` prompts were drawn beyond one batch for each step.
        """
        batch_size, data = self._run.data.batch_size, self._reader.training_rows
        num_drawn = self._begin_drawn + (step - 1 - self._begin_step) * batch_size + num_more
        row_ids = rows_after(len(data), batch_size, self._run.run.seed, num_drawn)
        return data.rows(_sequences(rows, row_ids, data.unit))

    @register(PROTO_3D, returns_rows=True)
    def sequences(self, rows: TensorDictBase) -> TensorDict:
        """Return the numbered prompts with `tokens` [B, P + R], each prompt and its response, padded at the end.

        Reads `prompt_numbers` [B] and `response_tokens` [B, R], and returns the other columns as they are, so that other
        groups read them from these ranks.
        """
        prompts = self._reader.prompts(rows["prompt_numbers"].tolist())
        lengths, width = prompts["prompt_lengths"], rows["response_tokens"].size(1)
        padded = torch.nn.functional.pad(
            prompts["prompt_tokens"], (0, width), value=self._reader.training.pad_id
        )
        places = lengths[:, None] + torch.arange(width)
        # right-padded prompts: a response begins where its prompt ends
        prompts["tokens"] = padded.scatter(1, places, rows["response_tokens"].long())
        return prompts.update(rows.exclude("prompt_numbers", "response_tokens"))

    @register(ONE_TO_ALL)
    def digest(self, numbers: Sequence[int]) -> str:
        """Return the digest of numbered prompts (`prompts_digest`)."""
        return prompts_digest(self._reader.training, self._run.run.seed, numbers)

    @register(PROTO_3D, [ROW_NUMBERS], returns_rows=True)
    def held_out_prompts(self, rows: TensorDictBase) -> TensorDict:
        """Return the held-out rows in file order, repeated from the first if more are asked for than there are."""
        data = self._reader.held_out_rows
        count = int(rows[ROW_NUMBERS].max()) // data.unit + 1
        return data.rows(_sequences(rows, [number % len(data) for number in range(count)], data.unit))


def _sequences(rows: TensorDictBase, row_ids: Sequence[int], unit: int) -> list[int]:
    """Return the numbers of a rank's sequences, of which each row in `row_ids` has `unit`."""
    return [row_ids[number // unit] * unit + number % unit for number in rows[ROW_NUMBERS].tolist()]

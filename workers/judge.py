"""A generative judge: a frozen language model on engines, which is asked about each response."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import torch
from tensordict import TensorDict, TensorDictBase

from hybridengine.backends.engine import SamplingSettings, generate
from hybridengine.backends.vllm.construction import EngineSettings
from hybridengine.backends.vllm.engine import VllmEngine
from hybridengine.checkpoints.hf_files import read_parameters
from hybridengine.config import Role, RunConfig
from hybridengine.config.reward_sections import scorer_key
from hybridengine.config.run_config import judge_is_alone
from hybridengine.data.dropped_rows import DroppedRows
from hybridengine.data.judging import JudgePrompts, Verdicts
from hybridengine.data.rewards import DROPPED, reward_texts, score_column, scored_rows
from hybridengine.data.tokenizer import load_tokenizer
from hybridengine.errors import DataError
from hybridengine.models.shapes import ModelShape
from hybridengine.rows.micro_batches import SEQUENCE_COLUMNS
from hybridengine.rows.protocols import ONE_TO_ALL, PROTO_3D, ROW_NUMBERS, RankContext, register
from hybridengine.topology.generation import GenerationGrid

COUNTS = ("verdicts", "unparsed", "long_prompts", "verdict_tokens")
"""Verdicts, those without a valid score, responses whose prompt is too long, and tokens of verdicts."""


class JudgeEngine:
    """The engine of a judge, which is awake while it draws verdicts.

    If other models use the same ranks, its KV cache is released between calls, and its weights too if they are offloaded.
    """

    def __init__(
        self, context: RankContext, run: RunConfig, folder: str | Path, section: Role, term: str
    ) -> None:
        scorers = getattr(run, section)
        judge = scorers.judges[term]
        shape = ModelShape.from_folder(folder)
        self._is_alone = judge_is_alone(run, section)
        width = judge.max_prompt_tokens + judge.max_tokens
        self.engine = VllmEngine(
            folder,
            shape,
            GenerationGrid(context.topology.grid, judge.engine),
            EngineSettings(
                width,
                judge.max_num_seqs,
                judge.kv_cache_bytes,
                run.model.dtype,
                run.run.seed,
                # Graphs keep addresses by an allocator that the engines of a process share.
                cuda_graphs=run.rollout.cuda_graphs if self._is_alone else False,
                tokenizer=str(folder) if judge.structure is not None else None,
            ),
            identity=f"hybridengine-{os.environ['MASTER_PORT']}-{context.node}",
        )
        weights = self.engine.weights
        read_parameters(
            folder,
            self.engine.layout.shard(context.rank).parameters,
            {name: weights[name] for name in weights.names},
        )
        self._weights = weights.part(weights.names)
        self._host = {name: weights[name].cpu().clone() for name in weights.names} if judge.offload else {}
        self._fall_asleep()

    @contextlib.contextmanager
    def awake(self) -> Iterator[VllmEngine]:
        """Return the engine with its weights and KV cache."""
        if self._host:
            self._weights.materialise()
            for name, value in self._host.items():
                self.engine.weights[name].copy_(value)
        if not self._is_alone:
            self.engine.enter_generation(0)
        try:
            yield self.engine
        finally:
            self._fall_asleep()

    def _fall_asleep(self) -> None:
        if not self._is_alone:
            self.engine.leave_generation()
        if self._host:
            self._weights.release()


class JudgeWorker:
    """One rank of a judge, the checkpoint `folder`; `stop_token_ids` end a verdict.

    `section` is by default the role's name; `term` is "" for the only scorer.
    """

    def __init__(
        self,
        context: RankContext,
        run: RunConfig,
        folder: str | Path,
        section: Role | None = None,
        term: str = "",
        stop_token_ids: tuple[int, ...] = (),
    ) -> None:
        name = cast(Role, section or context.role)
        self._section, self._term = name, term
        self._key, self._column = f"{scorer_key(name, term)}.judge", score_column(name, term)
        scorers = getattr(run, name)
        self._prefix = f"{name}/{term}_" if term else f"{name}/"
        self._judge = judge = scorers.judges[term]
        self._tokenizer = load_tokenizer(run.tokenizer_folder, pad_with_eos=True)
        self._prompts = JudgePrompts(self._key, judge, folder)
        self._verdicts = Verdicts(self._key, judge, scorers.timeout_s, run.timeouts.start_s)
        self._verdicts.start()
        self._sampling = SamplingSettings(
            judge.max_tokens, judge.temperature, stop_token_ids=stop_token_ids, structure=judge.structure
        )
        self._engine = JudgeEngine(context, run, folder, name, term)
        self._is_source = context.rank in PROTO_3D.source_ranks(context.topology)
        self._counts = Counter[str]()

    @register(PROTO_3D, [*SEQUENCE_COLUMNS, "answers", ROW_NUMBERS], returns_rows=True)
    def compute_scores(self, rollout: TensorDictBase) -> TensorDict:
        """Return the mean score of each response's verdicts, [B] float32, NaN for a dropped one: `SECTION/NAME` for a
        term; otherwise `scores`, and `dropped` [B] bool.

        Raises DataError for a response without a valid verdict if the section says so.
        """
        texts, rows = (
            reward_texts(rollout, self._tokenizer, ("responses", "answers")),
            rollout[ROW_NUMBERS].tolist(),
        )
        lengths = rollout["prompt_lengths"].tolist()
        read = [row[:length] for row, length in zip(rollout["tokens"].tolist(), lengths, strict=True)]
        prompts = self._tokenizer.batch_decode(read, skip_special_tokens=True)
        asked = [
            self._prompts.tokens(prompt, response, answer)
            for prompt, response, answer in zip(prompts, texts["responses"], texts["answers"], strict=True)
        ]
        verdicts = self._ask(asked, rows)
        unscored = DroppedRows(f"{self._prefix}unparsed, {self._prefix}long_prompts")
        scores = [
            self._score(row, answer, verdicts.get(place), unscored)
            for place, (row, answer) in enumerate(zip(rows, texts["answers"], strict=True))
        ]
        return scored_rows(self._column, torch.tensor(scores, dtype=torch.float32))

    @register(ONE_TO_ALL)
    def take_metrics(self) -> dict[str, float]:
        """Return the `COUNTS` of verdicts since the last call; {} on ranks whose results are not collected."""
        counts, self._counts = self._counts, Counter()
        return {f"{self._prefix}{count}": float(counts[count]) for count in COUNTS} if self._is_source else {}

    def close(self) -> None:
        """End the parser's process."""
        self._verdicts.close()

    def _ask(self, asked: list[list[int] | None], rows: list[int]) -> dict[int, list[str]]:
        """Return the verdicts on each response whose prompt is not too long, by its place."""
        judge = self._judge
        places = [
            place for place, tokens in enumerate(asked) if tokens is not None for _ in range(judge.samples)
        ]
        seeds = [
            (judge.seed + rows[place] * judge.samples + number % judge.samples) % 2**31
            for number, place in enumerate(places)
        ]
        with self._engine.awake() as engine:
            found = generate(
                engine, [asked[place] or () for place in places], seeds, [self._sampling] * len(places)
            )
        texts = self._prompts.tokenizer.batch_decode(
            [response.token_ids for response in found], skip_special_tokens=True
        )
        verdicts: dict[int, list[str]] = {}
        for place, text in zip(places, texts, strict=True):
            verdicts.setdefault(place, []).append(text)
        self._counts.update(
            verdicts=len(texts),
            long_prompts=sum(tokens is None for tokens in asked),
            verdict_tokens=sum(len(response.token_ids) for response in found),
        )
        return verdicts

    def _score(self, row: int, answer: str, verdicts: list[str] | None, unscored: DroppedRows) -> float:
        """Return the score of one response, NaN if it is dropped."""
        judge = self._judge
        scores, failures = [], []
        for verdict in verdicts or ():
            try:
                scores.append(self._verdicts.score(verdict, answer, row))
            except DataError as error:
                failures.append(error)
        self._counts.update(unparsed=len(failures))
        if scores:
            return sum(scores) / len(scores)
        if not failures:
            text = (
                f"the judge's prompt is too long; raise max_prompt_tokens={judge.max_prompt_tokens}, or choose another"
                f" {self._key}.on_unparsed"
            )
            failures = [DataError(f"{self._key}, row {row}: {text}")]
        if judge.on_unparsed == "fail":
            raise failures[0]
        unscored.warn(str(failures[0]))
        return judge.unparsed_score if judge.on_unparsed == "score" else DROPPED

"""Rewards computed by Python functions in separate processes and by services: called in parts, combined from terms."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Any, Protocol

import torch
from tensordict import TensorDict, TensorDictBase

from hybridengine.config.reward_sections import RewardSection, scorer_key
from hybridengine.data.reward_process import RewardProcess, RewardTimeoutError
from hybridengine.data.reward_service import DROPPED, RewardService
from hybridengine.errors import DataError, raise_all
from hybridengine.report.keys import EPISODE_FAILURE
from hybridengine.rows.batch import columns_of

EXTRA_COLUMNS = ("prompts", "prompt_lengths", "response_lengths")
"""Columns that a function may take: prompts as seen by the model, including special tokens, and numbers of tokens."""
COUNTS = ("calls", "failures", "timeouts", "retries", "dropped_rows", "call_s")

_logger = logging.getLogger(__name__)


class Decoder(Protocol):
    """The part of a tokenizer that decodes tokens."""

    def batch_decode(self, sequences: Any, *, skip_special_tokens: bool) -> list[str]: ...


class RewardFunctions:
    """The functions and services of a reward or cost section, ready to score any number of rows; a context manager."""

    def __init__(self, name: str, section: RewardSection, start_timeout_s: float = 600.0) -> None:
        self._name, self._section = name, section
        functions: dict[str, _Function | RewardService] = {
            term: _Function(f"{scorer_key(name, term)}.function", path, section, start_timeout_s)
            for term, path in section.functions.items()
        }
        self._terms = functions | {
            term: RewardService(f"{scorer_key(name, term)}.service", service, section)
            for term, service in section.services.items()
        }
        assert self._terms, f"{name} has models only, which have workers of their own"

    def start(self) -> tuple[str, ...]:
        """Start all processes; return the columns that scorers take; raise DataError listing those that do not load."""
        columns, problems = dict[str, None](), []
        for scorer in self._terms.values():
            try:
                columns |= dict.fromkeys(scorer.start())
            except DataError as error:
                problems.append(str(error))
        raise_all(problems, DataError)
        return tuple(columns)

    def check(self) -> None:
        """Start all processes and call every service without rows; raise DataError listing those that do not answer."""
        problems = list[str]()
        for scorer in self._terms.values():
            try:
                scorer.check()
            except DataError as error:
                problems += error.problems or [str(error)]
        raise_all(problems, DataError)

    def score(self, columns: Mapping[str, Sequence[Any]], rows: Sequence[int] | None = None) -> TensorDict:
        """Return `scores` [B] float32, `dropped` [B] bool, and each of several terms' own scores as `SECTION/NAME`.

        A row is dropped if the call of a term with a weight failed and the section drops rows on failure. Its scores are
        NaN and must not enter any loss, mean or variance. If the section drops no rows, a failure raises DataError.

        `columns` are at least those that `start` returns; `rows` are row numbers for messages, by default from 0.
        """
        num_rows = len(columns["responses"])
        numbers = range(num_rows) if rows is None else rows
        found = TensorDict(batch_size=[num_rows])
        for term, scorer in self._terms.items():
            scores = torch.tensor(scorer.score(columns, numbers), dtype=torch.float64)
            found[score_column(self._name, term)] = scores
        weights = {
            score_column(self._name, term): self._section.weights.get(term, 1.0) for term in self._terms
        }
        return found.float().update(combine_scores(found, None, weights))

    def take_metrics(self) -> dict[str, float]:
        """Return `COUNTS` since the last call, including timeouts as failures; a row counts once per failed term."""
        counts = Counter[str]()
        for scorer in self._terms.values():
            counts.update(scorer.counts)
            scorer.counts.clear()
        return {f"{self._name}/{count}": float(counts[count]) for count in COUNTS}

    def close(self) -> None:
        """End all processes."""
        for scorer in self._terms.values():
            scorer.close()

    def __enter__(self) -> RewardFunctions:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Function:
    """One function in one or more processes, which share its calls."""

    def __init__(self, key: str, path: str, section: RewardSection, start_timeout_s: float) -> None:
        self._section = section
        self.processes = [
            RewardProcess(
                path,
                key=key,
                offered=EXTRA_COLUMNS,
                timeout_s=section.timeout_s,
                start_timeout_s=start_timeout_s,
                memory_bytes=section.memory_bytes,
            )
            for _ in range(section.num_processes)
        ]
        self.counts, self._lock = Counter[str](), threading.Lock()

    def start(self) -> tuple[str, ...]:
        with ThreadPoolExecutor(len(self.processes)) as executor:
            columns, *_ = executor.map(RewardProcess.start, self.processes)
        return columns

    def check(self) -> None:
        self.start()

    def close(self) -> None:
        for process in self.processes:
            process.close()

    def score(self, columns: Mapping[str, Sequence[Any]], rows: Sequence[int]) -> list[float]:
        """Return one score per row, NaN for dropped rows."""
        size = self._section.rows_per_call
        parts = [slice(first, first + size) for first in range(0, len(rows), size)]
        idle = queue.SimpleQueue[RewardProcess]()
        for process in self.processes:
            idle.put(process)

        def score(part: slice) -> list[float]:
            process = idle.get()
            try:
                cut = {name: column[part] for name, column in columns.items()}
                return self._score_part(process, cut, rows[part])
            finally:
                idle.put(process)

        with ThreadPoolExecutor(len(self.processes)) as executor:
            calls = [executor.submit(score, part) for part in parts]
            wait(calls, return_when=FIRST_EXCEPTION)
            executor.shutdown(cancel_futures=True)
        # The error of a failed call is raised before that of cancelled ones.
        return [value for call in calls for value in call.result()]

    def _score_part(
        self, process: RewardProcess, columns: Mapping[str, Sequence[Any]], rows: Sequence[int]
    ) -> list[float]:
        section = self._section
        for retries_left in reversed(range(section.num_retries + 1)):
            began = time.monotonic()
            try:
                return process.call(columns, rows)
            except DataError as error:
                timeouts = int(isinstance(error, RewardTimeoutError))
                self._count(failures=1, timeouts=timeouts, retries=int(retries_left > 0))
                if retries_left:
                    _logger.warning("called again, %d more at most: %s", retries_left, error)
                elif section.on_failure == "drop":
                    _logger.warning("%d rows dropped: %s", len(rows), error)
                else:
                    raise
            finally:
                self._count(calls=1, call_s=time.monotonic() - began)
        self._count(dropped_rows=len(rows))
        return [DROPPED] * len(rows)

    def _count(self, **numbers: float) -> None:
        with self._lock:
            self.counts.update(numbers)  # type: ignore[arg-type]  # seconds are not int


def check_reward_functions(name: str, section: RewardSection, timeout_s: float = 60.0) -> None:
    """Load every function of a section as a run does and end its processes, and call every service; raise DataError for
    those that cannot be used."""
    one_each = section.model_copy(update={"num_processes": 1})
    with RewardFunctions(name, one_each, timeout_s) as functions:
        functions.check()


def score_column(section: str, term: str) -> str:
    """Return the column of a term's scores, such as `reward/style`; `scores` for the only scorer, whose name is ""."""
    return f"{section}/{term}" if term else "scores"


def scored_rows(column: str, scores_B: torch.Tensor) -> TensorDict:
    """Return scores, NaN for dropped rows, under the name of `score_column`; those of an only scorer with `dropped`."""
    columns = {column: scores_B}
    if column == "scores":
        columns["dropped"] = scores_B.isnan()
    return TensorDict(columns, batch_size=[len(scores_B)])  # pyright: ignore[reportArgumentType]


def combine_scores(rows: TensorDictBase, across: object, weights: Mapping[str, float]) -> TensorDict:
    """Return `scores` [B] float32, the weighted sum of the terms' columns, and `dropped` [B], True if one of them is NaN.

    A term of weight 0 is only a metric: it is not summed and drops no row. `across`, an argument of all functions of a
    compute group, is unused: rows are summed one by one.
    """
    total = torch.zeros(rows.batch_size, dtype=torch.float64)
    for column, weight in weights.items():
        if weight:
            total += weight * rows[column].double()
    return TensorDict({"scores": total.float(), "dropped": total.isnan()}, batch_size=rows.batch_size)  # type: ignore[arg-type]


def episode_scores(rows: TensorDictBase, across: object, weights: Mapping[str, float]) -> TensorDict:
    """Return `scores` [B] float32 and `dropped` [B] of episodes, without those that have failed.

    With `weights`, scores are those of `combine_scores`; otherwise `rows` have the column `scores`, and `dropped` if
    functions gave them.
    """
    found = combine_scores(rows, across, weights or {"scores": 1.0})
    dropped = found["dropped"] | (rows[EPISODE_FAILURE] > 0)
    if "dropped" in columns_of(rows):
        dropped |= rows["dropped"]
    scores = found["scores"].masked_fill(dropped, DROPPED)
    return TensorDict({"scores": scores, "dropped": dropped}, batch_size=rows.batch_size)  # type: ignore[arg-type]


def reward_texts(rollout: TensorDictBase, tokenizer: Decoder, columns: Sequence[str]) -> dict[str, list[Any]]:
    """Return the columns that functions take; responses are decoded without special tokens."""
    prompts, responses = rollout["prompt_lengths"].tolist(), rollout["response_lengths"].tolist()
    rows = list(zip(rollout["tokens"].tolist(), prompts, responses, strict=True))
    found: dict[str, list[Any]] = {"prompt_lengths": prompts, "response_lengths": responses}
    found["responses"] = tokenizer.batch_decode(
        [row[prompt : prompt + response] for row, prompt, response in rows], skip_special_tokens=True
    )
    if "answers" in columns:
        found["answers"] = list(rollout["answers"])
    if "prompts" in columns:
        found["prompts"] = tokenizer.batch_decode(
            [row[:prompt] for row, prompt, _ in rows], skip_special_tokens=False
        )
    return {name: found[name] for name in columns}

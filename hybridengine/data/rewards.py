"""Rewards that are Python functions: called in processes of their own, in parts, and put together from several terms.

A function is called as function(responses, answers, **columns) with lists of equal length and returns one finite number
for each row. Further columns are those of `EXTRA_COLUMNS` that its parameters name.
"""

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
from torch import Tensor

from hybridengine.config.reward_sections import RewardSection, scorer_key
from hybridengine.data.reward_process import RewardProcess, RewardTimeoutError
from hybridengine.errors import DataError, raise_all

EXTRA_COLUMNS = ("prompts", "prompt_lengths", "response_lengths")
"""Columns that a function can have besides responses and answers: the prompts as the model saw them, special tokens
included, and numbers of tokens."""

DROPPED = float("nan")

COUNTS = ("calls", "failures", "timeouts", "retries", "dropped_rows", "call_s")
"""Metrics of a section, from `RewardFunctions.take_metrics`."""

_logger = logging.getLogger(__name__)


class Decoder(Protocol):
    """The part of a tokenizer that turns tokens into texts."""

    def batch_decode(self, sequences: Any, *, skip_special_tokens: bool) -> list[str]: ...


class RewardFunctions:
    """The functions of a reward's (or a cost's) section, ready to score any number of rows; a context manager.

    Args:
        name: of the section, for keys in messages and metrics: "reward".
        start_timeout_s: time limit for loading a function.
    """

    def __init__(self, name: str, section: RewardSection, start_timeout_s: float = 600.0) -> None:
        self._name, self._section = name, section
        self._terms = {
            term: _Function(f"{scorer_key(name, term)}.function", path, section, start_timeout_s)
            for term, path in section.functions.items()
        }
        assert self._terms, f"{name} has models only, which have workers of their own"

    def start(self) -> tuple[str, ...]:
        """Start every process; return the columns that the functions want.

        Raises:
            DataError: functions that cannot be loaded, all of them.
        """
        columns, problems = dict[str, None](), []
        for function in self._terms.values():
            try:
                columns |= dict.fromkeys(function.start())
            except DataError as error:
                problems.append(str(error))
        raise_all(problems, DataError)
        return tuple(columns)

    def score(self, columns: Mapping[str, Sequence[Any]], rows: Sequence[int] | None = None) -> TensorDict:
        """Return `scores` [B] float32, `dropped` [B] bool, and each of several terms' own scores as `SECTION/NAME`.

        A row is dropped if its call failed, for a term that has a weight, and the section drops rows on a failure. Its
        scores are NaN, which must reach no loss, mean or variance: a dataflow masks the row.

        Args:
            columns: at least those that `start` returns, as lists of equal length.
            rows: numbers of the rows, for messages; from 0 if left out.

        Raises:
            DataError: a function failed, and the rows are not to be dropped.
        """
        num_rows = len(columns["responses"])
        numbers = range(num_rows) if rows is None else rows
        found: dict[str, Tensor] = {
            score_column(self._name, term): torch.tensor(
                function.score(columns, numbers), dtype=torch.float64
            )
            for term, function in self._terms.items()
        }
        result = TensorDict({name: scores.float() for name, scores in found.items()}, batch_size=[num_rows])  # type: ignore[arg-type]
        if self._section.terms:
            weights = {score_column(self._name, term): self._section.weights[term] for term in self._terms}
            return result.update(combine_scores(TensorDict(found, batch_size=[num_rows]), None, weights))  # type: ignore[arg-type]
        result["dropped"] = result["scores"].isnan()
        return result

    def take_metrics(self) -> dict[str, float]:
        """Return the counts since the last call, e.g. `reward/failures`: calls, failed ones (and one that ended `score`),
        those of them that did not return in time, repeated ones, rows without a score, and the seconds of all calls.

        A row that several terms could not score counts for each.
        """
        counts = Counter[str]()
        for function in self._terms.values():
            counts.update(function.take_counts())
        return {f"{self._name}/{count}": float(counts[count]) for count in COUNTS}

    def close(self) -> None:
        """End all processes."""
        for function in self._terms.values():
            function.close()

    def __enter__(self) -> RewardFunctions:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Function:
    """One function in one or more processes, which share its calls."""

    def __init__(self, key: str, path: str, section: RewardSection, start_timeout_s: float) -> None:
        self._section = section
        self._processes = [
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
        self._counts, self._lock = Counter[str](), threading.Lock()

    def start(self) -> tuple[str, ...]:
        with ThreadPoolExecutor(len(self._processes)) as executor:
            columns, *_ = executor.map(RewardProcess.start, self._processes)
        return columns

    def score(self, columns: Mapping[str, Sequence[Any]], rows: Sequence[int]) -> list[float]:
        """Return one score per row, NaN for dropped rows."""
        parts = [
            slice(first, first + self._section.rows_per_call)
            for first in range(0, len(rows), self._section.rows_per_call)
        ]
        idle = queue.SimpleQueue[RewardProcess]()
        for process in self._processes:
            idle.put(process)

        def score(part: slice) -> list[float]:
            process = idle.get()
            try:
                return self._score_part(
                    process, {name: column[part] for name, column in columns.items()}, rows[part]
                )
            finally:
                idle.put(process)

        with ThreadPoolExecutor(len(self._processes)) as executor:
            calls = [executor.submit(score, part) for part in parts]
            wait(calls, return_when=FIRST_EXCEPTION)
            executor.shutdown(cancel_futures=True)
        # A failed one comes before those that have not begun.
        return [value for call in calls for value in call.result()]

    def take_counts(self) -> Counter[str]:
        """Return the counts since the last call."""
        counts, self._counts = self._counts, Counter()
        return counts

    def close(self) -> None:
        for process in self._processes:
            process.close()

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
            self._counts.update(numbers)  # type: ignore[arg-type]  # seconds are no int


def check_reward_functions(name: str, section: RewardSection, timeout_s: float = 60.0) -> None:
    """Load every function of a section as a run will, and end its processes again.

    Raises:
        DataError: functions that cannot be loaded, or cannot be called with the columns that there are.
    """
    one_each = section.model_copy(update={"num_processes": 1})
    with RewardFunctions(name, one_each, timeout_s) as functions:
        functions.start()


def score_column(section: str, term: str) -> str:
    """Return the column of a term's own scores, e.g. `reward/style`; `scores` for the only scorer, whose name is ""."""
    return f"{section}/{term}" if term else "scores"


def combine_scores(rows: TensorDictBase, across: object, weights: Mapping[str, float]) -> TensorDict:
    """Return `scores` [B] float32, the weighted sum of terms' columns, and `dropped` [B], true if one of them is NaN.

    A term of weight 0 is a metric: it neither counts nor drops. `across` is an argument of every function of a
    compute group, and not used: rows are summed one by one.

    Args:
        weights: by column.
    """
    total = torch.zeros(rows.batch_size, dtype=torch.float64)
    for column, weight in weights.items():
        if weight:
            total += weight * rows[column].double()
    return TensorDict({"scores": total.float(), "dropped": total.isnan()}, batch_size=rows.batch_size)  # type: ignore[arg-type]


def reward_texts(rollout: TensorDictBase, tokenizer: Decoder, columns: Sequence[str]) -> dict[str, list[Any]]:
    """Return the columns that functions want; responses are without special tokens."""
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

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
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from typing import Any, Protocol

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from hybridengine.config.reward_sections import RewardSection, scorer_key
from hybridengine.data.reward_child import load_reward_function
from hybridengine.data.reward_process import RewardProcess, RewardTimeoutError
from hybridengine.errors import DataError, raise_all

__all__ = [
    "EXTRA_COLUMNS",
    "RewardFunctions",
    "check_reward_functions",
    "combine_scores",
    "load_reward_function",
    "reward_texts",
    "score_column",
]

EXTRA_COLUMNS = ("prompts", "prompt_lengths", "response_lengths")
"""What a function can have besides responses and answers: the prompts as the model saw them, special tokens included,
and numbers of tokens."""

DROPPED = float("nan")

COUNTS = ("calls", "failures", "timeouts", "retries", "dropped_rows", "call_s")
"""What `RewardFunctions.take_metrics` tells of a section."""

_logger = logging.getLogger(__name__)


class Decoder(Protocol):
    """The part of a tokenizer that turns tokens into texts."""

    def batch_decode(self, sequences: Any, *, skip_special_tokens: bool) -> list[str]: ...


class RewardFunctions:
    """The functions of a reward's (or a cost's) section, ready to score any number of rows; a context manager.

    Args:
        name: of the section, for keys in messages and metrics: "reward".
        start_timeout_s: until a function is loaded.
    """

    def __init__(self, name: str, section: RewardSection, start_timeout_s: float = 600.0) -> None:
        self._name, self._section = name, section
        self._terms = {
            term: _Function(f"{scorer_key(name, term)}.function", path, section, start_timeout_s)
            for term, path in section.functions.items()
        }
        assert self._terms, f"{name} has models only, which have workers of their own"

    def start(self) -> tuple[str, ...]:
        """Start every process; returns the columns that the functions want.

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
        """`scores` [B] float32, `dropped` [B] bool, and for several terms each term's own scores as `SECTION/NAME`.

        A row is dropped where the section says so on a failure and the call with it failed, for a term that has a
        weight. Its scores are NaN, which must reach no loss. A dataflow puts `scores.masked_fill(dropped, 0.0)` in their
        place, takes the row out of the response mask, `mask_BR & ~dropped_B[:, None]`, so that none of its tokens
        counts in a loss, a mean or a variance, and leaves it out of the statistics of its group.

        Args:
            columns: at least those that `start` returns, as lists of equal length.
            rows: numbers of the rows, for messages; from 0 where left out.

        Raises:
            DataError: a function failed, and the rows are not to be dropped.
        """
        num_rows = len(columns["responses"])
        numbers = range(num_rows) if rows is None else rows
        found: dict[str, Tensor] = {}
        for term, function in self._terms.items():
            found[score_column(self._name, term)] = torch.tensor(
                function.score(columns, numbers), dtype=torch.float64
            )
        result = TensorDict({name: scores.float() for name, scores in found.items()}, batch_size=[num_rows])  # type: ignore[arg-type]
        if self._section.terms:
            weights = {score_column(self._name, term): self._section.weights[term] for term in self._terms}
            return result.update(combine_scores(TensorDict(found, batch_size=[num_rows]), None, weights))  # type: ignore[arg-type]
        result["dropped"] = result["scores"].isnan()
        return result

    def take_metrics(self) -> dict[str, float]:
        """What has happened since the last time, e.g. `reward/failures`: calls, failed ones (and one that ended `score`),
        those of them that did not return in time, repeated ones, rows without a score, and the seconds of all calls.

        A row that several terms could not score counts for each.
        """
        counts = sum((function.take_counts() for function in self._terms.values()), Counter())
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
        self._counts = Counter[str]()
        self._counting = threading.Lock()

    def start(self) -> tuple[str, ...]:
        with ThreadPoolExecutor(len(self._processes)) as executor:
            columns, *_ = executor.map(RewardProcess.start, self._processes)
        return columns

    def score(self, columns: Mapping[str, Sequence[Any]], rows: Sequence[int]) -> list[float]:
        """One score per row, NaN for dropped rows."""
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

        if len(self._processes) == 1:
            results = [score(part) for part in parts]
        else:
            with ThreadPoolExecutor(len(self._processes)) as executor:
                results = _first_failure_ends([executor.submit(score, part) for part in parts])
        return [value for values in results for value in values]

    def take_counts(self) -> Counter[str]:
        """What has happened since the last time."""
        with self._counting:
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
                scores = process.call(columns, rows)
                self._count(calls=1, call_s=time.monotonic() - began)
                return scores
            except DataError as error:
                timeouts, retries = int(isinstance(error, RewardTimeoutError)), int(retries_left > 0)
                self._count(
                    calls=1,
                    call_s=time.monotonic() - began,
                    failures=1,
                    timeouts=timeouts,
                    retries=retries,
                )
                if retries_left:
                    _logger.warning("called again, %d more at most: %s", retries_left, error)
                elif section.on_failure == "drop":
                    _logger.warning("%d rows dropped: %s", len(rows), error)
                else:
                    raise
        self._count(dropped_rows=len(rows))
        return [DROPPED] * len(rows)

    def _count(self, **counts: float) -> None:
        """Calls of several processes end at the same time."""
        with self._counting:
            self._counts.update(counts)  # type: ignore[arg-type]  # seconds are no int


def _first_failure_ends(futures: Sequence[Future]) -> list[Any]:
    """Results in order; once a call has failed, those that have not begun are not made."""
    for future in as_completed(futures):
        if not future.cancelled() and future.exception() is not None:
            for other in futures:
                other.cancel()
    failed = [future for future in futures if not future.cancelled() and future.exception() is not None]
    if failed:
        failed[0].result()
    return [future.result() for future in futures]


def check_reward_functions(name: str, section: RewardSection, timeout_s: float = 60.0) -> None:
    """Load every function of a section as a run will, and let go of it again.

    Raises:
        DataError: functions that cannot be loaded, or cannot be called with the columns that there are.
    """
    one_each = section.model_copy(update={"num_processes": 1})
    with RewardFunctions(name, one_each, timeout_s) as functions:
        functions.start()


def score_column(section: str, term: str) -> str:
    """Column of a term's own scores, e.g. `reward/style`; of the only scorer, which has the name "", it is `scores`."""
    return f"{section}/{term}" if term else "scores"


def combine_scores(rows: TensorDictBase, across: object, weights: Mapping[str, float]) -> TensorDict:
    """`scores` [B] float32, the weighted sum of terms' columns, and `dropped` [B], where one of them is NaN.

    A term of weight 0 is a metric: it neither counts nor drops. `across` is what every function of a compute group
    gets; rows are summed one by one.

    Args:
        weights: by column.
    """
    total = torch.zeros(rows.batch_size, dtype=torch.float64)
    for column, weight in weights.items():
        if weight:
            total += weight * rows[column].double()
    return TensorDict({"scores": total.float(), "dropped": total.isnan()}, batch_size=rows.batch_size)  # type: ignore[arg-type]


def reward_texts(rollout: TensorDictBase, tokenizer: Decoder, columns: Sequence[str]) -> dict[str, list[Any]]:
    """Columns that functions want, of rows with tokens, lengths and answers; responses are without special tokens."""
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

"""The demo's verifiable task: chains of sums from reasoning-gym, with data files and reward."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hybridengine.errors import DataError

if TYPE_CHECKING:  # the reward does not need pydantic
    from hybridengine.config.sections import TaskSection

TRAIN_FILE, HELD_OUT_FILE = "train.jsonl", "held_out.jsonl"

SEED_STRIDE = 1_000_003
"""Distance between seeds: reasoning-gym draws entry i from seed s + i, so neighbouring seeds would share problems."""

NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?")

DRAWS_PER_PROBLEM = 50
"""Draws per requested problem after which the task is considered to have too few distinct ones."""


@dataclass(frozen=True)
class Problem:
    """A sum, "3 + 8 - 5" with single spaces, and its result."""

    expression: str
    answer: str

    @property
    def prompt(self) -> str:
        return f"{self.expression} ="

    @property
    def running_totals(self) -> list[str]:
        """Totals after the second term, the third and so on; the last one is the answer."""
        first, *rest = self.expression.split()
        total, totals = int(first), []
        for operator, term in zip(rest[::2], rest[1::2], strict=True):
            total += int(term) if operator == "+" else -int(term)
            totals.append(str(total))
        return totals

    @property
    def subtracts(self) -> bool:
        return "-" in self.expression.split()


def write_arithmetic_files(folder: str | Path, task: TaskSection) -> dict[str, Path]:
    """Write train and held-out files; return their paths under "train" and "held_out".

    The same task gives the same bytes. Problems are distinct. A row has a prompt and its answer, a demonstrated response,
    and a preference: all running totals are chosen over those without the last one.
    Raises DataError if the task has too few distinct problems, or reasoning-gym is not installed.
    """
    problems = _distinct_problems(task)
    held_out, train = problems[: task.eval_rows], problems[task.eval_rows :]
    rng = random.Random(task.seed)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    files = {TRAIN_FILE: train, HELD_OUT_FILE: held_out}
    for name, some in files.items():
        rows = [_row(problem, problem.subtracts and rng.random() < task.sloppy_fraction) for problem in some]
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {Path(name).stem: folder / name for name in files}


def _row(problem: Problem, is_sloppy: bool) -> dict[str, str]:
    return {
        "prompt": problem.prompt,
        "answer": problem.answer,
        "response": demonstrated_response(problem, is_sloppy),
        "chosen": demonstrated_response(problem, is_sloppy=False),
        "rejected": demonstrated_response(problem, is_sloppy=True),
    }


def demonstrated_response(problem: Problem, is_sloppy: bool) -> str:
    """Return the demonstrated running totals: "11 6" for 3 + 8 - 5, or "11" if the last term is omitted."""
    totals = problem.running_totals
    return " ".join(totals[:-1] if is_sloppy else totals)


def final_answer(response: str) -> str:
    """Return the last number in the response, as written; empty if there is none."""
    numbers = NUMBER.findall(response)
    return numbers[-1] if numbers else ""


def length_cost(
    responses: Sequence[str], answers: Sequence[str], response_lengths: Sequence[int]
) -> list[float]:
    """Return the number of tokens of each response: a cost for the demo."""
    return [float(length) for length in response_lengths]


def arithmetic_reward(responses: Sequence[str], answers: Sequence[str]) -> list[float]:
    """Return 1.0 for a fully correct final answer ("+06" for "6"), else 0.0: policies learn to exploit partial credit."""
    scorer = _chain_sum(size=1)
    return [
        float(scorer.score_answer(final_answer(response), {"answer": answer}) == 1.0)
        for response, answer in zip(responses, answers, strict=True)
    ]


def _distinct_problems(task: TaskSection) -> list[Problem]:
    wanted = task.train_rows + task.eval_rows
    found: dict[str, Problem] = {}
    source = _chain_sum(
        min_terms=task.min_terms,
        max_terms=task.max_terms,
        min_digits=task.min_digits,
        max_digits=task.max_digits,
        seed=task.seed * SEED_STRIDE,
        size=wanted * DRAWS_PER_PROBLEM,
    )
    for number in range(len(source)):
        entry = source[number]
        problem = Problem(entry["metadata"]["expression"], entry["answer"])
        found.setdefault(problem.expression, problem)
        if len(found) == wanted:
            return list(found.values())
    raise DataError(
        f"data.task needs train_rows + eval_rows = {wanted} distinct problems, and about {len(found)} exist;"
        " lower them, or raise max_terms or max_digits"
    )


def _chain_sum(**settings: int):
    try:
        import reasoning_gym
    except ModuleNotFoundError:
        raise DataError(
            "the arithmetic task needs reasoning-gym; install the extra hybridengine[tasks]"
        ) from None
    return reasoning_gym.create_dataset("chain_sum", **settings)

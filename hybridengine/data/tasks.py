"""The verifiable task of the demo: chains of sums from reasoning-gym, their files and their reward."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hybridengine.errors import DataError, raise_all

TRAIN_FILE, HELD_OUT_FILE, DEMONSTRATIONS_FILE = "train.jsonl", "held_out.jsonl", "demonstrations.jsonl"

SEED_STRIDE = 1_000_003
"""reasoning-gym draws entry i from the seed s + i, so that neighbouring seeds would share their problems."""

NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?")

DRAWS_PER_PROBLEM = 50
"""Draws per wanted problem after which the task is taken to have too few distinct ones."""


@dataclass(frozen=True)
class ArithmeticTask:
    """Which problems reasoning-gym's `chain_sum` draws, and how sloppy the demonstrations' teacher is."""

    min_terms: int = 3
    max_terms: int = 3
    min_digits: int = 1
    max_digits: int = 1
    sloppy_fraction: float = 0.67
    """Share of the problems with a subtraction whose demonstration stops before the last term, so that its final
    answer is wrong. The warmed-up model learns this habit together with the arithmetic; the reward unlearns it."""

    def __post_init__(self) -> None:
        """Raise one DataError with every bad value."""
        problems = []
        for low, high, least in (("min_terms", "max_terms", 3), ("min_digits", "max_digits", 1)):
            first, last = getattr(self, low), getattr(self, high)
            if not least <= first <= last:
                problems.append(f"{low}={first} and {high}={last} must satisfy {least} <= {low} <= {high}")
        if not 0.0 <= self.sloppy_fraction <= 1.0:
            problems.append(f"sloppy_fraction={self.sloppy_fraction} must lie between 0 and 1")
        raise_all(problems, DataError)


@dataclass(frozen=True)
class Problem:
    """One sum and its result."""

    expression: str
    """ "3 + 8 - 5": numbers and operators between single spaces."""
    answer: str

    @property
    def prompt(self) -> str:
        """What the user says."""
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
        """Whether a term is subtracted."""
        return "-" in self.expression.split()


def write_arithmetic_files(
    folder: str | Path,
    task: ArithmeticTask,
    seed: int,
    num_train: int = 2048,
    num_held_out: int = 256,
) -> dict[str, Path]:
    """Write train, held-out and demonstration files; returns their paths under "train", "held_out", "demonstrations".

    Guarantees: the same arguments give the same bytes; all problems are distinct, so that no held-out problem is in
    the other two files. Demonstrations are the training problems with a response.

    Raises:
        DataError: the task has too few distinct problems, or reasoning-gym is not installed.
    """
    problems = _distinct_problems(task, seed, num_train + num_held_out)
    held_out, train = problems[:num_held_out], problems[num_held_out:]
    rng = random.Random(seed)
    rows = {
        TRAIN_FILE: [{"prompt": problem.prompt, "answer": problem.answer} for problem in train],
        HELD_OUT_FILE: [{"prompt": problem.prompt, "answer": problem.answer} for problem in held_out],
        DEMONSTRATIONS_FILE: [
            {
                "prompt": problem.prompt,
                "answer": problem.answer,
                "response": demonstrated_response(
                    problem, is_sloppy=problem.subtracts and rng.random() < task.sloppy_fraction
                ),
            }
            for problem in train
        ],
    }
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name, file_rows in rows.items():
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in file_rows))
    return {Path(name).stem: folder / name for name in rows}


def demonstrated_response(problem: Problem, is_sloppy: bool) -> str:
    """The teacher's running totals: "11 6" for 3 + 8 - 5, or only "11" when it is sloppy and forgets the last term."""
    totals = problem.running_totals
    return " ".join(totals[:-1] if is_sloppy else totals)


def final_answer(response: str) -> str:
    """The last number in the response, as written there; empty where there is none."""
    numbers = NUMBER.findall(response)
    return numbers[-1] if numbers else ""


def exact_match(response: str, answer: str) -> float:
    """1.0 where the response's final answer is `answer` to the letter, else 0.0."""
    return float(final_answer(response) == answer.strip())


def length_cost(
    responses: Sequence[str], answers: Sequence[str], response_lengths: Sequence[int]
) -> list[float]:
    """A cost for the demo: the number of tokens of each response."""
    return [float(length) for length in response_lengths]


def arithmetic_reward(responses: Sequence[str], answers: Sequence[str]) -> list[float]:
    """1.0 for each response whose final answer reasoning-gym's scorer takes as fully right ("+06" for "6"), else 0.0.

    The scorer's partial credit for texts that contain the answer is left out: a policy learns to collect it.
    """
    if len(responses) != len(answers):
        raise DataError(
            f"{len(responses)} responses and {len(answers)} answers; a reward needs one answer each"
        )
    scorer = _chain_sum(ArithmeticTask(), seed=0, size=1)
    return [
        float(scorer.score_answer(final_answer(response), {"answer": answer}) == 1.0)
        for response, answer in zip(responses, answers, strict=True)
    ]


def _distinct_problems(task: ArithmeticTask, seed: int, wanted: int) -> list[Problem]:
    found: dict[str, Problem] = {}
    for problem in _drawn_problems(task, seed, wanted * DRAWS_PER_PROBLEM):
        found.setdefault(problem.expression, problem)
        if len(found) == wanted:
            return list(found.values())
    raise DataError(
        f"{wanted} distinct problems wanted, {task} has about {len(found)};"
        " ask for fewer, or for more terms or digits"
    )


def _drawn_problems(task: ArithmeticTask, seed: int, num_draws: int) -> Iterator[Problem]:
    source = _chain_sum(task, seed, num_draws)
    for index in range(num_draws):
        entry = source[index]
        yield Problem(entry["metadata"]["expression"], entry["answer"])


def _chain_sum(task: ArithmeticTask, seed: int, size: int):
    """reasoning-gym's procedural data set of `size` entries."""
    try:
        import reasoning_gym
    except ModuleNotFoundError:
        raise DataError(
            "the arithmetic task needs reasoning-gym; install the extra hybridengine[tasks]"
        ) from None
    return reasoning_gym.create_dataset(
        "chain_sum",
        min_terms=task.min_terms,
        max_terms=task.max_terms,
        min_digits=task.min_digits,
        max_digits=task.max_digits,
        seed=seed * SEED_STRIDE,
        size=size,
    )

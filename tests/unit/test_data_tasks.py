"""The arithmetic task: its files, its demonstrations and its reward."""

from __future__ import annotations

import json

import pytest

from hybridengine.config.sections import TaskSection
from hybridengine.data import tasks
from hybridengine.data.tasks import (
    Problem,
    arithmetic_reward,
    demonstrated_response,
    final_answer,
    write_arithmetic_files,
)
from hybridengine.errors import DataError


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_files_hold_distinct_correct_problems_and_disjoint_held_out_ones(tmp_path):
    task = TaskSection(max_terms=5, max_digits=2, sloppy_fraction=0.3, seed=4, train_rows=400, eval_rows=100)
    paths = write_arithmetic_files(tmp_path / "new", task)
    train, held_out = demonstrations, _ = read(paths["train"]), read(paths["held_out"])
    prompts = [row["prompt"] for row in train + held_out]
    assert (len(train), len(held_out), len(set(prompts))) == (400, 100, 500)
    for row in train + held_out:
        assert row["prompt"].endswith(" =")
        assert int(row["answer"]) == eval(row["prompt"][:-2])
    assert {len(prompt.split()) for prompt in prompts} == {6, 8, 10}
    complete = [len(row["response"].split()) == len(row["prompt"].split()) // 2 - 1 for row in demonstrations]
    for row, is_complete in zip(demonstrations, complete, strict=True):
        terms = row["prompt"].split()[:-1]
        totals = [str(eval(" ".join(terms[: 2 * n + 1]))) for n in range(1, len(terms) // 2 + 1)]
        assert row["response"].split() == (totals if is_complete else totals[:-1])
        assert (row["chosen"].split(), row["rejected"].split()) == (totals, totals[:-1])
    assert all(
        is_complete
        for row, is_complete in zip(demonstrations, complete, strict=True)
        if "-" not in row["prompt"]
    )
    subtracting = sum("-" in row["prompt"] for row in demonstrations)
    assert 0.2 < complete.count(False) / subtracting < 0.4


def test_the_same_seed_gives_the_same_bytes(tmp_path):
    def contents(name, seed):
        paths = write_arithmetic_files(tmp_path / name, TaskSection(seed=seed, train_rows=50, eval_rows=20))
        return [path.read_bytes() for path in paths.values()]

    first = contents("a", 1)
    assert contents("b", 1) == first
    assert not set(contents("c", 2)[0].splitlines()) & set(first[0].splitlines()[:5])


def test_a_task_with_too_few_problems_is_refused(tmp_path, monkeypatch):
    """There are 4000 sums of three digits, of which few draws miss some."""
    monkeypatch.setattr(tasks, "DRAWS_PER_PROBLEM", 6)
    with pytest.raises(DataError, match=r"eval_rows = 4050 distinct problems, and about 39\d\d exist"):
        write_arithmetic_files(tmp_path, TaskSection(train_rows=4000, eval_rows=50))
    assert not list(tmp_path.iterdir())


def test_demonstrated_responses():
    problem = Problem("3 - 8 + 5 - 1", "-1")
    assert problem.prompt == "3 - 8 + 5 - 1 ="
    assert problem.subtracts and not Problem("3 + 4 + 0", "7").subtracts
    assert demonstrated_response(problem, is_sloppy=False) == "-5 0 -1"
    assert demonstrated_response(problem, is_sloppy=True) == "-5 0"


@pytest.mark.parametrize(
    ("response", "found"),
    [
        ("12", "12"),
        (" 12\n", "12"),
        ("4 -3 12", "12"),
        ("12 -3", "-3"),
        ("The answer is 12.", "12"),
        ("3 + 9 = 12", "12"),
        ("12.5", "12.5"),
        ("1,012", "1,012"),
        ("12 4", "4"),
        ("twelve", ""),
        ("", ""),
    ],
)
def test_the_final_answer_is_the_last_number(response, found):
    assert final_answer(response) == found


def test_the_reward_is_full_or_nothing():
    cases = [
        ("6", "6", 1.0),
        ("7 6", "6", 1.0),
        ("+06", "6", 1.0),
        ("6.0", "6", 1.0),
        ("-6", "6", 0.0),
        ("16", "6", 0.0),
        ("6 16", "6", 0.0),
        ("0123456789", "6", 0.0),
        ("six", "6", 0.0),
        ("", "6", 0.0),
    ]
    responses, answers, wanted = zip(*cases, strict=True)
    assert arithmetic_reward(responses, answers) == list(wanted)

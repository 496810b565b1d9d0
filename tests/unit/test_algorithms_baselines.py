"""Baselines of groups beyond the mean, compared with loops over Python floats: OPO, pass@k, the optimal token baseline,
REINFORCE++ with a group baseline, and GPG's rescaling; with dropped rows, groups of one, holes and many ranks.
"""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hybridengine.algorithms.across import ONE_PROCESS, Across
from hybridengine.algorithms.group_advantages import (
    equal_rescaling,
    length_weighted,
    optimal_token_baseline,
    pass_at_k,
    whitened_differences,
)
from hybridengine.algorithms.masking import over_tokens
from tests.unit.test_algorithms_across import cut, joined, on_ranks

WIDTH = 4
Row = tuple[float, int, bool, list[float | None]]
"""(score, group, True if kept, energy of each token, None for a hole)."""

ROWS: list[Row] = [
    (1.0, 3, True, [0.5, 0.25, 1.0]),
    (0.25, 0, True, [0.125, None, 0.75, 0.5]),
    (-2.0, 3, True, [None, 0.5]),
    (math.nan, 3, False, [1.0, 1.0, 1.0]),
    (4.5, 0, True, [1.5, 0.0]),
    (7.0, 5, True, [0.5, 0.5]),
    (4.5, 0, True, []),
    (9.0, 0, False, [1.0]),
    (0.5, 3, True, [0.75, 0.5, None, 0.25]),
    (math.nan, 6, False, [0.5]),
    (2.0, 7, True, [0.5, 0.5]),
    (2.0, 7, True, [0.25]),
]
"""Group 5 has one member, group 6 no kept row, group 7 equal scores; the best two of group 0 are equal."""


def peers(rows: list[Row], number: int) -> list[Row]:
    """Return the kept rows of a row's group; none if it is not kept itself."""
    _, group, keep, _ = rows[number]
    return [row for row in rows if row[1] == group and row[2]] if keep else []


def valid(row: Row) -> list[float]:
    return [energy for energy in row[3] if energy is not None]


def by_length(rows: list[Row], number: int) -> float:
    """Return OPO's advantage: r - sum(l·r)/sum(l)."""
    group = peers(rows, number)
    total = sum(len(valid(row)) for row in group)
    if not group or len(group) == 1 or not total:
        return math.nan if group and not total else 0.0
    return rows[number][0] - math.fsum(len(valid(row)) * row[0] for row in group) / total


def by_best(rows: list[Row], number: int, normalize_std: bool) -> float:
    """Return max over the group minus max over its other rows, by default over the deviation."""
    group = peers(rows, number)
    if len(group) < 2:
        return 0.0
    others = [row[0] for row in rows[:number] + rows[number + 1 :] if row[2] and row[1] == rows[number][1]]
    lead = max(row[0] for row in group) - max(others)
    return lead / (statistics.stdev(row[0] for row in group) + 1e-6) if normalize_std else lead


def by_token(rows: list[Row], number: int) -> list[float]:
    """Return r - B_t of each place of a row, with B_t from all rows that have a t-th valid token."""
    group, found, count = peers(rows, number), [0.0] * WIDTH, 0
    for place, energy in enumerate(rows[number][3]):
        if energy is None or len(group) < 2:
            continue
        count += 1
        sums = [(row[0], math.fsum(valid(row)[:count])) for row in group if len(valid(row)) >= count]
        baseline = 0.0
        if len(sums) > 1:
            baseline = math.fsum(r * w for r, w in sums) / (math.fsum(w for _, w in sums) + 1e-8)
        found[place] = rows[number][0] - baseline
    return found


def columns(rows: list[Row]) -> dict[str, Tensor]:
    """Return the columns of rows; energies at masked entries are NaN."""
    padded = [[*row[3], *[None] * (WIDTH - len(row[3]))] for row in rows]
    return {
        "scores": torch.tensor([row[0] for row in rows], dtype=torch.float64),
        "groups": torch.tensor([row[1] for row in rows], dtype=torch.int64),
        "keep": torch.tensor([row[2] for row in rows], dtype=torch.bool),
        "mask": torch.tensor([[e is not None for e in row] for row in padded], dtype=torch.bool).reshape(
            -1, WIDTH
        ),
        "energies": torch.tensor(
            [[math.nan if e is None else e for e in row] for row in padded], dtype=torch.float64
        ).reshape(-1, WIDTH),
    }


def estimates(name: str, part: dict[str, Tensor], across: Across = ONE_PROCESS) -> Tensor:
    """Return the advantages [B, R] by an estimator."""
    scores, mask = part["scores"], part["mask"]
    group = part["groups"], part["keep"], across
    if name == "token":
        return optimal_token_baseline(scores, part["energies"], mask, *group)
    if name == "length":
        return over_tokens(length_weighted(scores, mask.sum(1), *group), mask)
    return over_tokens(pass_at_k(scores, *group, normalize_std=name == "best_std"), mask)


def expected(name: str, rows: list[Row]) -> list[list[float]]:
    if name == "token":
        return [by_token(rows, number) for number in range(len(rows))]
    by_row = [
        by_length(rows, number) if name == "length" else by_best(rows, number, name == "best_std")
        for number in range(len(rows))
    ]
    mask = columns(rows)["mask"].tolist()
    return [[one if m else 0.0 for m in marks] for one, marks in zip(by_row, mask, strict=True)]


NAMES = ("length", "best", "best_std", "token")


@pytest.mark.parametrize("name", NAMES)
def test_against_loops(name: str) -> None:
    found = estimates(name, columns(ROWS))
    for row, (values, wanted) in enumerate(zip(found.tolist(), expected(name, ROWS), strict=True)):
        assert values == pytest.approx(wanted, rel=1e-12, abs=1e-14), row
    assert not found[[3, 5, 7, 9]].any(), "dropped rows, and the group of one"
    assert found.any()


def test_by_hand() -> None:
    scores, groups = torch.tensor([1.0, 0.0, 0.5, 1.0, 1.0]), torch.tensor([0, 0, 0, 1, 1])
    assert pass_at_k(scores, groups, normalize_std=False).tolist() == [0.5, 0.0, 0.0, 0.0, 0.0]
    dropped = torch.tensor([True, True, False, True, True])
    equal = torch.tensor([1.0, 0.5, 1.0, 0.0, 0.0])
    assert pass_at_k(equal, torch.zeros(5, dtype=torch.int64), dropped, normalize_std=False).tolist() == [
        *(0.5, 0.0, 0.0, 0.0, 0.0)
    ]
    lengths = torch.tensor([1, 2, 1, 7, 9])
    assert length_weighted(scores, lengths, groups).tolist() == [0.625, -0.375, 0.125, 0.0, 0.0]


def test_pass_at_k_is_the_policy_gradient_of_the_best_score() -> None:
    """Over all pairs of draws from a small policy, the mean of the sum of A·grad log pi is the gradient of E[max r]."""
    logits = torch.tensor([0.2, -0.4, 0.7], dtype=torch.float64, requires_grad=True)
    rewards = torch.tensor([0.0, 1.0, 3.0], dtype=torch.float64)
    policy = logits.log_softmax(0)
    best = torch.zeros((), dtype=torch.float64)
    mean = torch.zeros_like(logits)
    for one in range(3):
        for two in range(3):
            probability = policy[one].exp() * policy[two].exp()
            best = best + probability * max(rewards[one].item(), rewards[two].item())
            found = pass_at_k(rewards[[one, two]], torch.zeros(2, dtype=torch.int64), normalize_std=False)
            gain = (found * policy[[one, two]]).sum()
            (gradient,) = torch.autograd.grad(gain, logits, retain_graph=True)
            mean += probability.detach() * gradient
    (exact,) = torch.autograd.grad(best, logits)
    assert mean.tolist() == pytest.approx(exact.tolist(), rel=1e-12)


@pytest.mark.parametrize("name", ["length", "best", "best_std"])
@pytest.mark.parametrize("score", [0.1, -1e6 / 3])
def test_equal_scores_give_exactly_zero(name: str, score: float) -> None:
    rows: list[Row] = [(score, 0, True, [0.5] * length) for length in (1, 3, 2, 4, 3)]
    assert not estimates(name, columns(rows)).any()


@pytest.mark.parametrize("name", NAMES)
def test_rows_of_nothing(name: str) -> None:
    dropped: list[Row] = [(math.nan, 0, False, [0.5]), (math.inf, 0, False, []), (1.0, 1, False, [0.5])]
    assert not estimates(name, columns(dropped)).any()
    assert estimates(name, columns([])).shape == (0, WIDTH)


@pytest.mark.parametrize("name", NAMES)
def test_float32_columns_stay_float32_without_gradient(name: str) -> None:
    part = columns(ROWS)
    part |= {key: part[key].float().requires_grad_() for key in ("scores", "energies")}
    found = estimates(name, part)
    assert found.dtype == torch.float32
    assert not found.requires_grad
    for values, wanted in zip(found.tolist(), expected(name, ROWS), strict=True):
        assert values == pytest.approx(wanted, rel=1e-6)


energies = st.lists(st.sampled_from([None, 0.125, 0.5, 1.25]), min_size=1, max_size=WIDTH)
rows_with_owners = st.lists(
    st.tuples(
        st.integers(-2, 2).map(float) | st.floats(-9, 9, width=32),
        st.integers(0, 3),
        st.booleans(),
        energies,
        st.integers(0, 3),
    ),
    min_size=1,
    max_size=10,
)


@pytest.mark.parametrize("name", NAMES)
@given(drawn=rows_with_owners)
@settings(deadline=None, max_examples=15)
def test_rows_anywhere_give_what_the_loops_give(
    name: str, drawn: list[tuple[float, int, bool, list, int]]
) -> None:
    rows: list[Row] = [(score if keep else math.nan, group, keep, e) for score, group, keep, e, _ in drawn]
    everything, places = columns(rows), cut([owner for *_, owner in drawn])
    parts = on_ranks(
        places,
        lambda part, across: estimates(name, {key: c[part] for key, c in everything.items()}, across),
    )
    found = joined(places, parts)
    for values, wanted in zip(found.tolist(), expected(name, rows), strict=True):
        assert values == pytest.approx(wanted, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("owners", [[0] * len(ROWS), [2, 0, 0, 3, 2, 0, 2, 2, 0, 3, 2, 0]])
def test_reinforce_plus_plus_with_a_group_baseline(owners: list[int]) -> None:
    """The mean of a group of one is itself, here as in `grpo`; row 6 has no token and counts in its group alone."""
    everything, places = columns(ROWS), cut(owners)
    differences = []
    for number, (score, _, keep, _) in enumerate(ROWS):
        group = peers(ROWS, number)
        differences.append(score - statistics.fmean(row[0] for row in group) if keep else 0.0)
    mask = everything["mask"] & everything["keep"][:, None]
    tokens = [d for d, marks in zip(differences, mask.tolist(), strict=True) for m in marks if m]
    mean, deviation = statistics.fmean(tokens), math.sqrt(statistics.pvariance(tokens) + 1e-8)

    def one(part: list[int], across: Across) -> Tensor:
        rows = {key: column[part] for key, column in everything.items()}
        return whitened_differences(rows["scores"], rows["groups"], mask[part], rows["keep"], across)

    found = joined(places, on_ranks(places, one))
    for values, marks, difference in zip(found.tolist(), mask.tolist(), differences, strict=True):
        wanted = [(difference - mean) / deviation if m else 0.0 for m in marks]
        assert values == pytest.approx(wanted, rel=1e-9, abs=1e-12)


def test_rescaling_makes_up_for_rows_of_equal_scores() -> None:
    """9 rows are kept; group 5 (one row) and group 7 (two rows) have no advantages: 9/6."""
    part = columns(ROWS)
    assert equal_rescaling(part["scores"], part["groups"], part["keep"]) == 9 / 6
    places = cut([0, 2, 1, 0, 2, 0, 2, 1, 1, 0, 2, 1])
    found = on_ranks(
        places,
        lambda rows, across: equal_rescaling(
            part["scores"][rows], part["groups"][rows], part["keep"][rows], across
        ),
    )
    assert found == [9 / 6] * 3
    equal = torch.ones(4), torch.tensor([0, 0, 1, 1])
    assert equal_rescaling(*equal) == 1.0, "nothing to rescale"
    assert equal_rescaling(torch.ones(0), torch.ones(0, dtype=torch.int64)) == 1.0

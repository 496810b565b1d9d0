"""Ages of tokens: the mask of fresh ones, the update's refusal, and metrics, compared with loops over Python numbers."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from hybridengine.algorithms.masking import response_mask
from hybridengine.algorithms.staleness import check_ages, fresh_tokens, staleness_metrics
from hybridengine.errors import HybridEngineError, StalenessError
from hybridengine.rows.protocols import ROW_NUMBERS
from tests.unit.test_algorithms_across import cut, on_ranks

WIDTH = 6
NO_VERSION = 999
"""Version at masked entries, which nothing may read."""

rows_of_versions = st.lists(st.lists(st.integers(0, 6), max_size=WIDTH), min_size=1, max_size=6)


def _columns(rows: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return versions [B, R], int32 as engines give them, and the mask of responses."""
    padded = [row + [NO_VERSION] * (WIDTH - len(row)) for row in rows]
    return torch.tensor(padded, dtype=torch.int32), response_mask(
        torch.tensor([len(row) for row in rows], dtype=torch.int64), WIDTH
    )


@pytest.mark.parametrize("max_versions", [0, 1, 4])
def test_fresh_tokens_of_every_age(max_versions: int) -> None:
    """A token from the future stays in the mask, where the update finds it."""
    versions_BR, mask_BR = _columns([[9, 8, 7, 6, 5], [4, 3, 10]])
    fresh_BR = fresh_tokens(versions_BR, mask_BR, 9, max_versions)
    expected = [[age <= max_versions for age in ages] for ages in ([0, 1, 2, 3, 4], [5, 6, -1])]
    assert fresh_BR.tolist() == [row + [False] * (WIDTH - len(row)) for row in expected]


def _update_rows(rows: list[list[int]], **columns: Any) -> TensorDict:
    versions_BR, mask_BR = _columns(rows)
    lengths_B = mask_BR.sum(1)
    return TensorDict({"versions": versions_BR, "response_lengths": lengths_B, **columns}, [len(rows)])


@given(rows=rows_of_versions, data=st.data(), version=st.integers(0, 6), max_versions=st.integers(0, 4))
@settings(deadline=None, max_examples=150)
def test_an_update_refuses_exactly_the_tokens_in_its_loss_beyond_the_bound(
    rows: list[list[int]], data: st.DataObject, version: int, max_versions: int
) -> None:
    flags = st.lists(st.booleans(), min_size=len(rows), max_size=len(rows))
    keep = data.draw(flags)
    trained = torch.tensor([data.draw(flags) for _ in range(WIDTH)]).T
    batch = _update_rows(rows, keep=torch.tensor(keep), trained=trained)
    wrong = [
        (row, place, version - drawn)
        for row, versions in enumerate(rows)
        for place, drawn in enumerate(versions)
        if keep[row] and trained[row, place] and not 0 <= version - drawn <= max_versions
    ]
    if not wrong:
        check_ages(batch, version, max_versions)
        return
    row, place, age = wrong[0]
    with pytest.raises(StalenessError) as caught:
        check_ages(batch, version, max_versions)
    rule = (
        "must be at least 0; call the update with the version that it starts from"
        if age < 0
        else f"exceeds staleness.max_versions={max_versions}; mask older tokens (pass the column"
        " `fresh` to the advantages), or raise the bound"
    )
    assert str(caught.value) == (
        f"response token {place} of row {row} was drawn by version {version - age} of the weights, and version {version}"
        f" is trained ({len(wrong)} such tokens here): its age of {age} {rule}"
    )


@given(rows=rows_of_versions, version=st.integers(6, 9), max_versions=st.integers(0, 6))
@settings(deadline=None, max_examples=50)
def test_what_fresh_tokens_leaves_is_never_refused(
    rows: list[list[int]], version: int, max_versions: int
) -> None:
    fresh_BR = fresh_tokens(*_columns(rows), version, max_versions)
    check_ages(_update_rows(rows, trained=fresh_BR), version, max_versions)


def test_the_refusal_names_the_row_of_the_batch_and_crosses_processes() -> None:
    batch = _update_rows([[3, 3], [3, 1]], **{ROW_NUMBERS: torch.tensor([40, 41])})
    with pytest.raises(StalenessError, match="response token 1 of row 41 was drawn by version 1") as caught:
        check_ages(batch, 3, 1)
    assert isinstance(caught.value, HybridEngineError)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_an_age_that_is_unknown_is_refused() -> None:
    with_versions = _update_rows([[3, 3]])
    without = with_versions.exclude("versions")
    check_ages(without, None, 0)
    with pytest.raises(
        StalenessError, match="an update of version None was called with rows with the column"
    ):
        check_ages(with_versions, None, 9)
    with pytest.raises(
        StalenessError, match="an update of version 3 was called with rows without the column"
    ):
        check_ages(without, 3, 9)


def _expected_metrics(rows: list[list[int]], version: int, max_versions: int) -> dict[str, float]:
    tokens = [(place, version - drawn) for row in rows for place, drawn in enumerate(row)]
    ages = [age for _, age in tokens]
    # Quarters of 6 positions: {0, 1}, {2}, {3, 4}, {5}.
    quarters = [[age for place, age in tokens if place in own] for own in ((0, 1), (2,), (3, 4), (5,))]

    def share(some: list[int], older: bool = True, age: int = 0) -> float:
        hits = sum(one > max_versions if older else one == age for one in some)
        return hits / max(len(some), 1)

    return {
        "staleness/age_mean": sum(ages) / max(len(ages), 1),
        "staleness/age_max": max(ages, default=0),
        **{f"staleness/age_{age}_share": share(ages, False, age) for age in range(max_versions + 1)},
        "staleness/older_share": share(ages),
        **{f"staleness/older_share_quarter_{n}": share(some) for n, some in enumerate(quarters, start=1)},
    }


@given(rows=rows_of_versions, data=st.data(), version=st.integers(6, 8), max_versions=st.integers(0, 4))
@settings(deadline=None, max_examples=40)
def test_metrics_of_rows_anywhere(
    rows: list[list[int]], data: st.DataObject, version: int, max_versions: int
) -> None:
    versions_BR, mask_BR = _columns(rows)
    expected = _expected_metrics(rows, version, max_versions)
    owners = data.draw(st.lists(st.integers(0, 2), min_size=len(rows), max_size=len(rows)))
    everywhere = on_ranks(
        cut(owners),
        lambda part, across: staleness_metrics(
            versions_BR[part], mask_BR[part], version, max_versions, across
        ),
    )
    for found in [staleness_metrics(versions_BR, mask_BR, version, max_versions), *everywhere]:
        assert found == pytest.approx(expected, abs=1e-12)
    shares = [value for name, value in expected.items() if name.endswith("_share")]
    assert sum(shares) == pytest.approx(1.0 if any(rows) else 0.0)

"""Distributions of lengths, compared with sums over all lengths and with samples, and errors in their descriptions."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridengine.errors import ConfigError
from hybridengine.planning.costs.lengths import Lengths, counted

counts = st.lists(st.integers(0, 60), min_size=1, max_size=30)


@given(counts, st.integers(1, 50), st.integers(1, 40))
def test_counted_lengths(lengths: list[int], max_tokens: int, count: int) -> None:
    """Mean, mean square, survival and quantiles, compared with those of the lengths, cut as generation cuts them."""
    found = Lengths("some", counted(lengths, max_tokens))
    cut = sorted(min(max(length, 1), max_tokens) for length in lengths)
    assert found.mean == pytest.approx(sum(cut) / len(cut))
    assert found.mean_square == pytest.approx(sum(length**2 for length in cut) / len(cut))
    for token in range(max_tokens):
        assert found.survival_T[token] == pytest.approx(sum(length > token for length in cut) / len(cut))
    expected = [cut[math.ceil(round((k + 0.5) / count * len(cut), 9)) - 1] for k in range(count)]
    assert found.spread(count).tolist() == expected
    assert set(found.sample(np.random.default_rng(1), 50).tolist()) <= set(cut)


@pytest.mark.parametrize(
    ("text", "mean", "variance"),
    [
        ("constant:512", 512, 0),
        ("uniform:1-1024", 512.5, (1024**2 - 1) / 12),
        ("uniform:7-7", 7, 0),
        ("lognormal:mean=400,cv=0.5", 400.5, 200**2),  # rounded up: half a token longer
    ],
)
def test_known_distributions(text: str, mean: float, variance: float) -> None:
    found = Lengths.of(text, 100_000 if "lognormal" in text else 2048)
    assert found.mean == pytest.approx(mean, rel=1e-3)
    assert found.mean_square - found.mean**2 == pytest.approx(variance, rel=1e-2, abs=1e-6)
    drawn = found.sample(np.random.default_rng(7), 40_000)
    assert drawn.mean() == pytest.approx(found.mean, rel=0.02)
    assert found.mean_position == pytest.approx(
        (drawn.astype(float) ** 2).mean() / drawn.mean() / 2, rel=0.03
    )


def test_responses_are_cut_where_generation_stops() -> None:
    found = Lengths.of("uniform:1-100", 10)
    assert found.survival_T.tolist() == pytest.approx([1 - 0.01 * token for token in range(10)])
    assert found.spread(10).tolist() == [5, 10, 10, 10, 10, 10, 10, 10, 10, 10]
    assert found.cut_share == pytest.approx(0.9)
    assert str(found) == "uniform:1-100 (mean 10, 90% cut to 10)"
    assert str(Lengths.of("constant:10", 10)) == "constant:10 (mean 10, at most 10)"


def test_lengths_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text("3\n\n5\n 4.0\n")
    assert Lengths.of(str(file), 100).spread(3).tolist() == [3, 4, 5]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("constant:0", "constant:0.* must have N and LOW from 1 on"),
        ("constant:1.5", "must have N and LOW from 1 on"),
        ("uniform:9-3", "HIGH no lower than LOW"),
        ("uniform:0-3", "N and LOW from 1 on"),
        ("lognormal:mean=0,cv=1", "M from 1 to 1e9"),
        ("lognormal:mean=100,cv=0", "C above 0 and at most 20; write constant:N"),
        ("lognormal:mean=100", "lognormal:mean=M,cv=C, or a file"),
        ("", "no such form, and no such file; write"),
        ("nowhere.txt", r"nowhere.txt\": no such form, and no such file; write constant:N"),
    ],
)
def test_what_is_no_distribution(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Lengths.of(text, 100)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "the file has no lengths; write one a line"),
        ("3\n-1\n", "line 2: .* is not a number of tokens"),
        ("true\n", "line 1"),
        ('{"size": 3}\n', "line 1: .* is not a number of tokens; write a number from 0 on"),
        ("[1, 2]\n", "line 1"),
        ("NaN\n", "line 1"),
        ("\xff\xfe", "is not UTF-8 text"),
    ],
)
def test_files_that_have_no_lengths(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "lengths.txt"
    file.write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigError, match=message):
        Lengths.of(str(file), 100)

"""Figures that a benchmark derives from its samples: formulas, ratios, medians, maxima over ranks, and the JSON form."""

from __future__ import annotations

import json
from fractions import Fraction

import pytest

from hybridengine.bench.reshard.results import Sample, formula, ratio, report, spread, summarise
from hybridengine.bench.reshard.spec import DEFAULT_MODEL, BenchSpec, LayoutPair, MethodName

M = 960

PAIR = LayoutPair.parse("1-4-2:1-2")


# Fractions of M that a rank receives, holds at most, and holds twice: table 2 of the paper, worked out by hand.
@pytest.mark.parametrize(
    ("pair", "method", "received", "peak", "redundant"),
    [
        ("1-4-2:1-2", MethodName.FULL, Fraction(7, 8), 1, Fraction(1, 8)),
        ("1-4-2:1-2", MethodName.MODEL_PARALLEL, Fraction(3, 4), 1, Fraction(1, 4)),
        ("1-4-2:1-2", MethodName.MICRO_DP, Fraction(1, 4), Fraction(1, 2), 0),
        ("2-4-1:1-2", MethodName.FULL, Fraction(7, 8), 1, Fraction(1, 8)),
        ("2-4-1:1-2", MethodName.MODEL_PARALLEL, Fraction(7, 8), 1, Fraction(1, 8)),
        ("2-4-1:1-2", MethodName.MICRO_DP, Fraction(3, 8), Fraction(1, 2), 0),
        ("2-2-2:1-1", MethodName.MICRO_DP, Fraction(3, 4), 1, 0),
        ("2-4-1:2-4", MethodName.MICRO_DP, 0, Fraction(1, 8), 0),
        # Not in the paper: every rank receives the full tensor except for its own part; two models stay.
        ("1-4-2:1-2", MethodName.PER_TENSOR, Fraction(3, 4), Fraction(1, 4) + Fraction(1, 2), Fraction(1, 4)),
        ("1-4-2:1-2", MethodName.MEGATRON_CORE, None, Fraction(1, 4) + Fraction(1, 2), Fraction(1, 4)),
    ],
)
def test_formulas(
    pair: str, method: MethodName, received: Fraction | None, peak: Fraction, redundant: Fraction
) -> None:
    found = formula(method, LayoutPair.parse(pair), M)
    assert found["received_bytes"] == (None if received is None else received * M)
    assert found["peak_weight_bytes"] == peak * M
    assert found["redundant_bytes"] == redundant * M


def test_no_formula_where_sizes_do_not_nest() -> None:
    found = formula(MethodName.MICRO_DP, LayoutPair.parse("1-2-2:1-4"), M)
    assert set(found.values()) == {None}


@pytest.mark.parametrize(
    ("measured", "expected", "result"), [(3, 2.0, 1.5), (0, 0, 1.0), (5, 0, None), (5, None, None)]
)
def test_ratio(measured: float, expected: float | None, result: float | None) -> None:
    assert ratio(measured, expected) == result


def sample(there: float, back: float, received: int, peak: int, redundant: int, raw: float = 1.0) -> Sample:
    return Sample(there, back, raw, received, 0, peak, redundant, 100)


def test_a_repetition_takes_as_long_as_its_slowest_rank() -> None:
    repetitions = [[1.0, 4.0], [5.0, 3.0], [2.0, 1.0]]  # slowest: 4, 5, 2
    found = spread("seconds_there", [[sample(one, 0, 0, 0, 0) for one in ranks] for ranks in repetitions])
    assert found == {"seconds_there": 4.0, "seconds_there_min": 2.0, "seconds_there_max": 5.0}


@pytest.fixture
def spec() -> BenchSpec:
    return BenchSpec(DEFAULT_MODEL, (PAIR,), (MethodName.MICRO_DP, MethodName.FULL), repetitions=3)


def test_results_are_maxima_over_ranks_and_ratios_of_medians(spec: BenchSpec) -> None:
    samples = {
        "micro-dp": [[sample(1.0, 0.2, 30, 70, 0, 2.0), sample(2.0, 0.1, 40, 60, 1, 4.0)]] * 3,
        "full": [[sample(6.0, 0.4, 90, 50, 8, 2.0), sample(5.0, 0.3, 80, 99, 7, 4.0)]] * 3,
        "micro-dp (verify: always)": [[sample(5.0, 0.1, 0, 0, 0, 4.0)]],
        "micro-dp (verify: never)": [[sample(4.0, 0.1, 0, 0, 0, 4.0)]],
    }
    result = summarise(spec, PAIR, samples)
    ours, full = result.results
    names = ("received_bytes_max", "peak_weight_bytes_max", "redundant_bytes_max")
    assert [ours[name] for name in names] == [40, 70, 1]
    assert [full[name] for name in names] == [90, 99, 8]
    assert (ours["seconds_there"], ours["seconds_back"]) == (2.0, 0.2)
    assert full["seconds_there_over_micro_dp"] == 3.0
    # 40 bytes in 2 s, compared with 100 bytes in 4 s; 90 in 6.
    assert ours["raw_all_gather_fraction"] == pytest.approx(20 / 25)
    assert full["raw_all_gather_fraction"] == pytest.approx(15 / 25)
    assert result.figures["verify_always_over_never"] == 1.25


def test_without_micro_dp_or_groups_there_is_nothing_to_compare_with() -> None:
    spec = BenchSpec(DEFAULT_MODEL, (PAIR,), (MethodName.FULL,))
    alone = Sample(6.0, 0.4, 1.0, 90, 0, 50, 8, raw_received_bytes=0)
    result = summarise(spec, PAIR, {"full": [[alone]]})
    (full,) = result.results
    assert (full["seconds_there_over_micro_dp"], full["raw_all_gather_fraction"]) == (None, None)
    assert result.figures["raw_all_gather_seconds"] is result.figures["verify_always_over_never"] is None


def test_json_form_has_an_entry_for_every_method_and_pair(spec: BenchSpec) -> None:
    one = sample(1.0, 0.25, spec.weight_bytes // 4, spec.weight_bytes, 0)
    pairs = [summarise(spec, PAIR, {label: [[one]] for label in spec.contestants})] * 2
    found = json.loads(json.dumps(report(spec, pairs)))
    assert [entry["method"] for entry in found["results"]] == ["micro-dp", "full"] * 2
    entry = found["results"][0]
    assert (entry["train"], entry["gen"], entry["seconds_there"], entry["seconds_back"]) == (
        "1-4-2",
        "1-2",
        1.0,
        0.25,
    )
    assert entry["received_bytes_over_formula"] == 1.0
    assert entry["peak_weight_bytes_over_formula"] == 2.0  # M instead of M/2
    assert found["pairs"][0]["num_ranks"] == 8
    assert found["weight_bytes"] == DEFAULT_MODEL.weight_bytes("float32") >= 120e6
    assert {"cpus", "torch", "megatron-core"} <= found["machine"].keys()

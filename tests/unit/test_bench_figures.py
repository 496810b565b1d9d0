"""What a benchmark makes of its samples: formulas, ratios, medians, maxima over ranks, and the JSON form."""

from __future__ import annotations

import json
from fractions import Fraction

import pytest

from hybridengine.bench.formulas import formula, ratio
from hybridengine.bench.results import RankSamples, RawAllGather, Timing, report_as_dict, summarise
from hybridengine.bench.spec import DEFAULT_MODEL, BenchSpec, LayoutPair, MethodName

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
        # No paper: a full tensor reaches every rank, but for the part that the rank has; two models stay.
        ("1-4-2:1-2", MethodName.PER_TENSOR, Fraction(3, 4), Fraction(1, 4) + Fraction(1, 2), Fraction(1, 4)),
        ("1-4-2:1-2", MethodName.MEGATRON_CORE, None, Fraction(1, 4) + Fraction(1, 2), Fraction(1, 4)),
    ],
)
def test_formulas(
    pair: str, method: MethodName, received: Fraction | None, peak: Fraction, redundant: Fraction
) -> None:
    found = formula(method, LayoutPair.parse(pair), M)
    assert found.received_bytes == (None if received is None else received * M)
    assert found.peak_weight_bytes == peak * M
    assert found.redundant_bytes == redundant * M


def test_no_formula_where_sizes_do_not_nest() -> None:
    found = formula(MethodName.MICRO_DP, LayoutPair.parse("1-2-2:1-4"), M)
    assert (found.received_bytes, found.peak_weight_bytes, found.redundant_bytes) == (None, None, None)


@pytest.mark.parametrize(
    ("measured", "expected", "result"), [(3, 2.0, 1.5), (0, 0, 1.0), (5, 0, None), (5, None, None)]
)
def test_ratio(measured: float, expected: float | None, result: float | None) -> None:
    assert ratio(measured, expected) == result


def test_a_repetition_takes_as_long_as_its_slowest_rank() -> None:
    timing = Timing.of([[1.0, 5.0, 2.0], [4.0, 3.0, 1.0]])  # slowest: 4, 5, 2
    assert (timing.lowest, timing.median, timing.highest) == (2.0, 4.0, 5.0)


def samples(there: float, back: float, received: int, peak: int, redundant: int) -> RankSamples:
    return RankSamples((there, there, there), (back, back, back), received, 0, peak, redundant)


@pytest.fixture
def spec() -> BenchSpec:
    return BenchSpec(DEFAULT_MODEL, (PAIR,), (MethodName.MICRO_DP, MethodName.FULL), repetitions=3)


def test_results_are_maxima_over_ranks_and_ratios_of_medians(spec: BenchSpec) -> None:
    measured = {
        MethodName.MICRO_DP: [samples(1.0, 0.2, 30, 70, 0), samples(2.0, 0.1, 40, 60, 1)],
        MethodName.FULL: [samples(6.0, 0.4, 90, 50, 8), samples(5.0, 0.3, 80, 99, 7)],
    }
    raw = RawAllGather(100, Timing.of([[2.0], [4.0]]))
    result = summarise(spec, PAIR, measured, raw, 1.25)
    ours, full = result.results
    assert (ours.received_bytes_max, ours.peak_weight_bytes_max, ours.redundant_bytes_max) == (40, 70, 1)
    assert (full.received_bytes_max, full.peak_weight_bytes_max, full.redundant_bytes_max) == (90, 99, 8)
    assert (ours.there.median, ours.back.median) == (2.0, 0.2)
    assert (full.seconds_there_over_micro_dp, full.seconds_back_over_micro_dp) == (3.0, 2.0)
    # 40 bytes in 2 s against 100 bytes in 4 s; 90 in 6.
    assert ours.raw_all_gather_fraction == pytest.approx(20 / 25)
    assert full.raw_all_gather_fraction == pytest.approx(15 / 25)


def test_without_micro_dp_or_groups_there_is_nothing_to_compare_with(spec: BenchSpec) -> None:
    result = summarise(spec, PAIR, {MethodName.FULL: [samples(6.0, 0.4, 90, 50, 8)]}, None, None)
    (full,) = result.results
    assert (full.seconds_there_over_micro_dp, full.raw_all_gather_fraction) == (None, None)


def test_json_form_has_an_entry_for_every_method_and_pair(spec: BenchSpec) -> None:
    measured = {
        method: [samples(1.0, 0.25, spec.weight_bytes // 4, spec.weight_bytes, 0)] for method in spec.methods
    }
    pairs = [summarise(spec, PAIR, measured, RawAllGather(8, Timing.of([[2.0]])), 1.5)] * 2
    report = json.loads(json.dumps(report_as_dict(spec, pairs, {"cpus": 2})))
    assert [entry["method"] for entry in report["results"]] == ["micro-dp", "full"] * 2
    assert {
        "method",
        "train",
        "gen",
        "seconds_there",
        "seconds_back",
        "received_bytes_max",
        "peak_weight_bytes_max",
        "redundant_bytes_max",
        "raw_all_gather_fraction",
    } <= set(report["results"][0])
    entry = report["results"][0]
    assert (entry["train"], entry["gen"], entry["seconds_there"], entry["seconds_back"]) == (
        "1-4-2",
        "1-2",
        1.0,
        0.25,
    )
    assert entry["received_bytes_over_formula"] == 1.0
    assert entry["peak_weight_bytes_over_formula"] == 2.0  # M instead of M/2
    assert report["pairs"][0]["verify_always_over_never"] == 1.5
    assert report["weight_bytes"] == DEFAULT_MODEL.weight_bytes("float32") >= 120e6
    assert report["machine"] == {"cpus": 2}

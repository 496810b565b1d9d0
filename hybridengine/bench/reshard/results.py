"""Figures of `hybridengine reshard bench`: medians and ranges, and maxima over ranks. Units: seconds and bytes."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hybridengine.bench.machine import machine_figures
from hybridengine.bench.reshard.formulas import formula, ratio
from hybridengine.bench.reshard.spec import VERIFYING, BenchSpec, LayoutPair, MethodName


@dataclass(frozen=True)
class Sample:
    """Measurements of one repetition of a method on one rank."""

    seconds_there: float
    seconds_back: float
    raw_all_gather_seconds: float
    """Seconds of a bare all-gather of training shards in the micro-DP group."""
    received_bytes: int
    received_back_bytes: int
    peak_weight_bytes: int
    """Peak bytes of weights, in either direction."""
    redundant_bytes: int
    """Bytes of training weights that are still held while generating."""
    raw_received_bytes: int
    """Bytes received in the bare all-gather; 0 if the micro-DP group has one rank."""


@dataclass(frozen=True)
class PairResult:
    """Figures of all methods on one pair of layouts, as written to JSON."""

    figures: Mapping[str, Any]
    """Figures of the pair that are independent of the method."""
    results: Sequence[Mapping[str, Any]]


def spread(name: str, repetitions: Iterable[Iterable[Sample]]) -> dict[str, float]:
    """Return the median, minimum and maximum of repetitions, each measured by its slowest rank."""
    seconds = [max(getattr(sample, name) for sample in ranks) for ranks in repetitions]
    return {name: statistics.median(seconds), f"{name}_min": min(seconds), f"{name}_max": max(seconds)}


def summarise(
    spec: BenchSpec, pair: LayoutPair, samples: Mapping[str, Sequence[Sequence[Sample]]]
) -> PairResult:
    """Return the results of a pair.

    Args:
        samples: samples of each contestant by label, then by repetition and rank.
    """
    layouts = {"train": str(pair.train), "gen": str(pair.gen)}
    there = {label: spread("seconds_there", measured) for label, measured in samples.items()}
    medians = {label: found["seconds_there"] for label, found in there.items()}
    every = [ranks for measured in samples.values() for ranks in measured]
    raw_bytes = max(sample.raw_received_bytes for ranks in every for sample in ranks)
    raw = spread("raw_all_gather_seconds", every)
    if not raw_bytes:
        raw = dict.fromkeys(raw)
    ours = medians.get(MethodName.MICRO_DP.value)
    results = []
    for method in spec.methods:
        measured = samples[method.value]
        most = {
            f"{name}_max": max(getattr(sample, name) for ranks in measured for sample in ranks)
            for name in ("received_bytes", "received_back_bytes", "peak_weight_bytes", "redundant_bytes")
        }
        seconds, expected = medians[method.value], formula(method, pair, spec.weight_bytes)
        rate, raw_seconds = most["received_bytes_max"] / seconds, raw["raw_all_gather_seconds"]
        results.append(
            {
                "method": method.value,
                **layouts,
                **there[method.value],
                **spread("seconds_back", measured),
                **most,
                "raw_all_gather_fraction": rate * raw_seconds / raw_bytes if raw_seconds else None,
                "seconds_there_over_micro_dp": seconds / ours if ours else None,
                **{f"formula_{name}": value for name, value in expected.items()},
                **{
                    f"{name}_over_formula": ratio(most[f"{name}_max"], value)
                    for name, value in expected.items()
                },
            }
        )
    always, never = (medians.get(VERIFYING.format(verify)) for verify in ("always", "never"))
    figures = {
        **layouts,
        "num_ranks": pair.train.num_ranks,
        "raw_all_gather_received_bytes": raw_bytes or None,
        **raw,
        "verify_always_over_never": always / never if always and never else None,
    }
    return PairResult(figures, results)


def report(spec: BenchSpec, pairs: Sequence[PairResult]) -> dict[str, Any]:
    """Return the JSON form of a whole benchmark: `results` has one entry per method and pair."""
    return {
        "results": [entry for pair in pairs for entry in pair.results],
        "pairs": [pair.figures for pair in pairs],
        "model": asdict(spec.shape),
        "weight_bytes": spec.weight_bytes,
        **{name: getattr(spec, name) for name in ("dtype", "repetitions", "bucket_bytes", "verify")},
        "machine": machine_figures(),
    }

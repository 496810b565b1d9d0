"""Figures of `hybridengine reshard bench`: medians and ranges, and maxima over ranks. Units: seconds and bytes."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any

from hybridengine.bench.reshard.spec import VERIFYING, BenchSpec, LayoutPair, MethodName
from hybridengine.machine import machine_figures


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
    """Return the results of a pair from the samples of each contestant, by repetition and rank."""
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
        seconds = medians[method.value]
        # The weights of a mixture of experts are not evenly divided.
        expected = (
            formula(method, pair, spec.weight_bytes) if spec.shape.experts is None else dict.fromkeys(FIGURES)
        )
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


FIGURES = ("received_bytes", "peak_weight_bytes", "redundant_bytes")


def formula(method: MethodName, pair: LayoutPair, weight_bytes: int) -> dict[str, float | None]:
    """Return the bytes of one rank by formula for evenly divided weights of M bytes; None for figures without a formula.

    per-tensor receives as much as model-parallel; it and megatron-core hold two copies, and buffers without a formula.
    Source: HybridFlow, arXiv 2409.19256, table 2, for micro-dp, model-parallel and full.
    """
    if method is MethodName.MICRO_DP and not pair.gen.nests_in(pair.train):
        return dict.fromkeys(FIGURES)
    model_parallel, ranks = pair.train.model_parallel_size, pair.train.num_ranks
    shard = Fraction(1, model_parallel)
    gen_shard = Fraction(1, pair.gen.num_ranks)
    rest_of_model = 1 - shard
    fractions: dict[MethodName, tuple[Fraction | int | None, Fraction | int, Fraction | int]] = {
        MethodName.MICRO_DP: ((Fraction(model_parallel, pair.gen.num_ranks) - 1) * shard, gen_shard, 0),
        MethodName.MODEL_PARALLEL: (rest_of_model, 1, shard),
        MethodName.FULL: (1 - Fraction(1, ranks), 1, Fraction(1, ranks)),
        MethodName.PER_TENSOR: (rest_of_model, shard + gen_shard, shard),
        MethodName.MEGATRON_CORE: (None, shard + gen_shard, shard),
    }
    values = (None if part is None else float(part * weight_bytes) for part in fractions[method])
    return dict(zip(FIGURES, values, strict=True))


def ratio(measured: float, expected: float | None) -> float | None:
    """Return measured / expected; 1 if both are 0, None if the ratio is undefined."""
    if expected is None:
        return None
    if expected == 0:
        return 1.0 if measured == 0 else None
    return measured / expected


def report(spec: BenchSpec, pairs: Sequence[PairResult]) -> dict[str, Any]:
    """Return the JSON form of a whole benchmark: `results` has one entry per method and pair."""
    return {
        "results": [entry for pair in pairs for entry in pair.results],
        "pairs": [pair.figures for pair in pairs],
        "model": asdict(spec.shape),
        "weight_bytes": spec.weight_bytes,
        **{name: getattr(spec, name) for name in ("dtype", "repetitions", "bucket_bytes")},
        "verify": "first",
        "machine": machine_figures(),
    }

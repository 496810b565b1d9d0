"""What was measured: samples of all ranks, boiled down to medians with spread and to maxima over ranks."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hybridengine.bench.formulas import Formula, formula, ratio
from hybridengine.bench.spec import BenchSpec, LayoutPair, MethodName


@dataclass(frozen=True)
class RankSamples:
    """What one rank measured of one method."""

    seconds_there: tuple[float, ...]
    """Counted repetitions, in order."""
    seconds_back: tuple[float, ...]
    received_bytes: int
    """Most in any switch there."""
    received_back_bytes: int
    """Most in any switch back."""
    peak_weight_bytes: int
    """Most at any moment, there or back."""
    redundant_bytes: int
    """Training weights that are still held while generating."""


@dataclass(frozen=True)
class Timing:
    """Seconds of the slowest rank, over the counted repetitions."""

    median: float
    lowest: float
    highest: float

    @classmethod
    def of(cls, by_rank: Sequence[Sequence[float]]) -> Timing:
        """Timing of samples [rank][repetition]: a repetition takes as long as its slowest rank."""
        slowest = [max(seconds) for seconds in zip(*by_rank, strict=True)]
        return cls(statistics.median(slowest), min(slowest), max(slowest))


@dataclass(frozen=True)
class RawAllGather:
    """A bare all-gather of training shards in the micro-DP group, into memory that is there already."""

    received_bytes: int
    seconds: Timing

    @property
    def bytes_per_second(self) -> float:
        return self.received_bytes / self.seconds.median


@dataclass(frozen=True)
class MethodResult:
    """One method on one pair of layouts; bytes are those of the rank with the most."""

    method: MethodName
    there: Timing
    back: Timing
    received_bytes_max: int
    received_back_bytes_max: int
    peak_weight_bytes_max: int
    redundant_bytes_max: int
    formula: Formula
    raw_all_gather_fraction: float | None
    """Received bytes per second over those of the raw all-gather; None where the micro-DP group has one rank."""
    seconds_there_over_micro_dp: float | None
    seconds_back_over_micro_dp: float | None

    def as_dict(self, pair: LayoutPair) -> dict[str, Any]:
        """JSON form."""
        expected = asdict(self.formula)
        return {
            "method": self.method.value,
            "train": str(pair.train),
            "gen": str(pair.gen),
            "seconds_there": self.there.median,
            "seconds_there_min": self.there.lowest,
            "seconds_there_max": self.there.highest,
            "seconds_back": self.back.median,
            "seconds_back_min": self.back.lowest,
            "seconds_back_max": self.back.highest,
            "received_bytes_max": self.received_bytes_max,
            "received_back_bytes_max": self.received_back_bytes_max,
            "peak_weight_bytes_max": self.peak_weight_bytes_max,
            "redundant_bytes_max": self.redundant_bytes_max,
            "raw_all_gather_fraction": self.raw_all_gather_fraction,
            "seconds_there_over_micro_dp": self.seconds_there_over_micro_dp,
            "seconds_back_over_micro_dp": self.seconds_back_over_micro_dp,
            **{f"formula_{name}": value for name, value in expected.items()},
            **{
                f"{name}_over_formula": ratio(getattr(self, f"{name}_max"), value)
                for name, value in expected.items()
            },
        }


@dataclass(frozen=True)
class PairResult:
    """All methods on one pair of layouts."""

    pair: LayoutPair
    results: tuple[MethodResult, ...]
    raw: RawAllGather | None
    """None where the micro-DP group has one rank."""
    verify_always_over_never: float | None
    """Seconds there of micro-dp with every move checked over those without; None where micro-dp did not run."""

    def as_dict(self) -> dict[str, Any]:
        """JSON form of what belongs to the pair and to no method."""
        raw = self.raw
        return {
            "train": str(self.pair.train),
            "gen": str(self.pair.gen),
            "num_ranks": self.pair.train.num_ranks,
            "raw_all_gather_received_bytes": raw.received_bytes if raw else None,
            "raw_all_gather_seconds": raw.seconds.median if raw else None,
            "raw_all_gather_seconds_min": raw.seconds.lowest if raw else None,
            "raw_all_gather_seconds_max": raw.seconds.highest if raw else None,
            "verify_always_over_never": self.verify_always_over_never,
        }


def summarise(
    spec: BenchSpec,
    pair: LayoutPair,
    samples: Mapping[MethodName, Sequence[RankSamples]],
    raw: RawAllGather | None,
    verify_always_over_never: float | None = None,
) -> PairResult:
    """Results of a pair from the samples of every rank."""
    there = {m: Timing.of([rank.seconds_there for rank in ranks]) for m, ranks in samples.items()}
    back = {m: Timing.of([rank.seconds_back for rank in ranks]) for m, ranks in samples.items()}
    ours = MethodName.MICRO_DP if MethodName.MICRO_DP in samples else None
    results = []
    for method, ranks in samples.items():
        received = max(rank.received_bytes for rank in ranks)
        rate = received / there[method].median
        results.append(
            MethodResult(
                method=method,
                there=there[method],
                back=back[method],
                received_bytes_max=received,
                received_back_bytes_max=max(rank.received_back_bytes for rank in ranks),
                peak_weight_bytes_max=max(rank.peak_weight_bytes for rank in ranks),
                redundant_bytes_max=max(rank.redundant_bytes for rank in ranks),
                formula=formula(method, pair, spec.weight_bytes),
                raw_all_gather_fraction=rate / raw.bytes_per_second if raw else None,
                seconds_there_over_micro_dp=there[method].median / there[ours].median if ours else None,
                seconds_back_over_micro_dp=back[method].median / back[ours].median if ours else None,
            )
        )
    return PairResult(pair, tuple(results), raw, verify_always_over_never)


def report_as_dict(
    spec: BenchSpec, pairs: Sequence[PairResult], machine: Mapping[str, Any]
) -> dict[str, Any]:
    """JSON form of a whole benchmark: `results` has one entry per method and pair."""
    return {
        "results": [result.as_dict(pair.pair) for pair in pairs for result in pair.results],
        "pairs": [pair.as_dict() for pair in pairs],
        "model": asdict(spec.shape),
        "weight_bytes": spec.weight_bytes,
        "dtype": spec.dtype,
        "repetitions": spec.repetitions,
        "bucket_bytes": spec.bucket_bytes,
        "verify": spec.verify,
        "machine": dict(machine),
    }

"""`hybridengine reshard bench`: measure the switch on real ranks, beside the methods that others use."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hybridengine.bench.formulas import ratio
from hybridengine.bench.joined import check_world, is_rank, measure_joined
from hybridengine.bench.machine import available_bytes, check_machine, num_gpus
from hybridengine.bench.ranks import RankStarter
from hybridengine.bench.results import MethodResult, PairResult, Timing, report_as_dict
from hybridengine.bench.spec import DEFAULT_MODEL, VERIFY_TIMES, BenchSpec, LayoutPair, MethodName
from hybridengine.cli.figure_tables import aligned
from hybridengine.cli.options import (
    DTYPES,
    add_json_option,
    between,
    byte_size,
    gen_sizes,
    parsed,
    train_sizes,
)
from hybridengine.cli.outputs import check_outputs, emit, machine_figures, progress_printer
from hybridengine.errors import ConfigError
from hybridengine.metrics.formatting import format_bytes, format_seconds
from hybridengine.model_presets import resolve_model

DESCRIPTION = """Measure what switching the actor's weights from training to generation and back costs.

Starts p·t·d ranks on this machine (one per GPU over NCCL, or processes over gloo where there is no GPU), builds a real
Megatron model of the given shape on them, and lets every method move the same weights in turn:

  micro-dp        this project: gather in place inside micro-DP groups, one copy of the weights, back without the network
  model-parallel  all-gather over the model-parallel group, then cut (HybridFlow-V)
  full            all-gather over all ranks, then cut (DeepSpeed-Chat)
  per-tensor      stream every full Hugging Face tensor to every rank, each copies its slice (verl and most others)
  megatron-core   megatron.core.resharding, between two models that both stay in memory

The first repetition warms up and is checked: a method that delivers a wrong bit ends the benchmark. The others are
interleaved (all methods once, then all again), each starts at a barrier, and counts as long as its slowest rank."""

EPILOG = """examples:
  hybridengine reshard bench                                          1-4-2 to 1-2 on 8 ranks, every method
  hybridengine reshard bench --pair 1-4-2:1-2 --pair 2-4-1:1-2 --json bench.json --plot bench.svg
  torchrun --nnodes 2 --nproc-per-node 8 ... --no-python hybridengine reshard bench --train 2-8-1 --gen 1-4

docs/how-to/benchmarks.md explains the columns."""
DEFAULT_PAIR = LayoutPair.parse("1-4-2:1-2")


def add_bench_command(subparsers: Any) -> None:
    """Add `bench` to the sub-commands of `hybridengine reshard`."""
    parser = subparsers.add_parser(
        "bench",
        help="measure the switch on real ranks, beside the methods that others use",
        description=DESCRIPTION,
        epilog=EPILOG,
    )
    parser.set_defaults(run=run_bench)
    option = parser.add_argument
    option("--train", type=train_sizes, metavar="P-T-D", help="training sizes (default 1-4-2)")
    option("--gen", type=gen_sizes, metavar="PG-TG", help="generation sizes (default 1-2)")
    option(
        "--pair", type=parsed(LayoutPair.parse), action="append", default=[], metavar="TRAIN:GEN",
        help="a pair of layouts such as 2-4-1:1-2; can be repeated",
    )  # fmt: skip
    option(
        "--model", metavar="PRESET_OR_FILE",
        help="a preset, a Hugging Face config.json or a folder with one; weights are made up (default: a Llama of"
        f" {format_bytes(DEFAULT_MODEL.weight_bytes('float32'))} in float32)",
    )  # fmt: skip
    option("--dtype", choices=DTYPES, default=DTYPES[0], help=f"of the weights (default {DTYPES[0]})")
    option(
        "--methods", type=method_names, default=tuple(MethodName), metavar="NAMES",
        help="comma-separated, of those above (default all)",
    )  # fmt: skip
    option("--repetitions", type=between(1, 10_000), default=7, metavar="N", help="counted ones (default 7)")
    option(
        "--verify", choices=VERIFY_TIMES, default=VERIFY_TIMES[0],
        help="when micro-dp checks digests of what arrives (default first); `always` is measured in any case",
    )  # fmt: skip
    option(
        "--bucket-bytes", type=byte_size, default="16MiB", metavar="BYTES",
        help="weights that move together, in every method that has buckets (default 16MiB)",
    )  # fmt: skip
    option(
        "--timeout", type=between(1, 86400, float), default=120.0, metavar="SECONDS",
        help="longest that any wait may take (default 120)",
    )  # fmt: skip
    add_json_option(parser)
    option("--plot", type=Path, metavar="FILE", help="draw seconds and bytes to FILE (.png, .svg, .pdf)")


@parsed
def method_names(text: str) -> tuple[MethodName, ...]:
    """Return the methods of a comma-separated list, in the order in which they run.

    Raises:
        ConfigError: a name that does not exist, or none.
    """
    names = {name.strip() for name in text.split(",")}
    known = [method.value for method in MethodName]
    if not names <= set(known):
        raise ConfigError(f"{text!r} does not name methods; choose from {', '.join(known)}")
    return tuple(method for method in MethodName if method.value in names)


def run_bench(options: argparse.Namespace) -> int:
    """Carry out the command; return the exit status."""
    spec = spec_of(options)
    check_outputs({"--json": options.json, "--plot": options.plot}, {"--model": options.model})
    joined = is_rank()
    if joined:
        check_world(spec)
    else:
        check_machine(spec, num_gpus(), available_bytes())
    say = progress_printer()
    measured: list[PairResult] = []

    def draw(place: Path) -> None:
        from hybridengine.bench.plot import draw

        draw(spec, measured, place)

    try:
        for pair in measure_joined(spec, say) if joined else _measure_here(spec, say):
            measured.append(pair)
    finally:  # pairs that have been measured are kept if a later one fails
        if measured and not (joined and os.environ["RANK"] != "0"):
            lines = [line for pair in measured for line in pair_lines(spec, pair)]
            report = report_as_dict(spec, measured, machine_figures(cpus=os.cpu_count()))
            emit(options, report, lines, {"--plot": (options.plot, draw)})
    return 0


def _measure_here(spec: BenchSpec, say: Callable[[str], None]) -> Iterator[PairResult]:
    """Yield the result of each pair, on ranks that are started for it."""
    say("loading torch and Megatron-core, once for all ranks")
    starter = RankStarter("hybridengine.cli.main")
    for pair in spec.pairs:
        say(spec.describe(pair))
        yield starter.measure(spec, pair, say)


def spec_of(options: argparse.Namespace) -> BenchSpec:
    """Return the benchmark that the options describe.

    Raises:
        ConfigError, TopologyError: a model or layouts that break a rule.
    """
    pairs = list(options.pair)
    if options.train or options.gen or not pairs:
        pairs.insert(0, LayoutPair(options.train or DEFAULT_PAIR.train, options.gen or DEFAULT_PAIR.gen))
    return BenchSpec(
        shape=DEFAULT_MODEL if options.model is None else resolve_model(options.model),
        pairs=tuple(dict.fromkeys(pairs)),
        methods=options.methods,
        dtype=options.dtype,
        repetitions=options.repetitions,
        bucket_bytes=options.bucket_bytes,
        verify=options.verify,
        timeout_s=options.timeout,
    )


def pair_lines(spec: BenchSpec, pair: PairResult) -> list[str]:
    """Return the table of one pair, and the notes beneath it."""
    headings = ["method", "there", "back", "received", "peak weights", "redundant", "vs ours", "raw"]
    lines = [
        f"{pair.pair} on {pair.pair.train.num_ranks} ranks, M = {format_bytes(spec.weight_bytes)}, medians of"
        f" {spec.repetitions} repetitions",
        *aligned([headings, *(row for result in pair.results for row in _rows(result))]),
    ]
    lines += [
        f"{result.method.value} received {format_bytes(result.received_back_bytes_max)} on the way back"
        for result in pair.results
        if result.received_back_bytes_max
    ]
    if pair.raw:
        lines.append(
            f"raw all-gather: {format_bytes(pair.raw.received_bytes)} per rank in"
            f" {format_seconds(pair.raw.seconds.median)} ({_range(pair.raw.seconds)}),"
            f" {format_bytes(pair.raw.bytes_per_second)}/s"
        )
    if pair.verify_always_over_never is not None:
        lines.append(
            f"verify=always takes x{pair.verify_always_over_never:.2f} of verify=never (micro-dp, there)"
        )
    return [*lines, ""]


def _rows(result: MethodResult) -> tuple[list[str], list[str]]:
    """Return the medians and bytes of a method, and beneath them ranges and ratios to the paper's formulas."""
    timings, formula = (result.there, result.back), result.formula
    sizes = (
        (result.received_bytes_max, formula.received_bytes),
        (result.peak_weight_bytes_max, formula.peak_weight_bytes),
        (result.redundant_bytes_max, formula.redundant_bytes),
    )
    return [
        result.method.value,
        *(format_seconds(timing.median) for timing in timings),
        *(format_bytes(measured) for measured, _ in sizes),
        _number(result.seconds_there_over_micro_dp, "x{:.2f}"),
        _number(result.raw_all_gather_fraction, "{:.0%}"),
    ], ["", *map(_range, timings), *(_number(ratio(*size), "x{:.2f}") for size in sizes), "", ""]


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _range(timing: Timing) -> str:
    return f"{timing.lowest * 1000:.0f}-{timing.highest * 1000:.0f} ms"

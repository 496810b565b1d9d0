"""`hybridengine reshard bench`: measure the switch on real ranks, beside the methods that others use."""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from hybridengine.bench.formulas import ratio
from hybridengine.bench.joined import check_world, is_rank, measure_joined
from hybridengine.bench.machine import available_bytes, check_machine, num_gpus
from hybridengine.bench.ranks import RankStarter
from hybridengine.bench.results import MethodResult, PairResult, Timing, report_as_dict
from hybridengine.bench.spec import (
    DEFAULT_MODEL,
    DTYPES,
    VERIFY_TIMES,
    BenchSpec,
    LayoutPair,
    MethodName,
    parse_choices,
)
from hybridengine.cli.options import once
from hybridengine.cli.output_files import check_output_files, check_picture, output, write_output
from hybridengine.config.values import parse_bytes
from hybridengine.metrics.formatting import format_bytes, format_seconds
from hybridengine.model_presets import resolve_model
from hybridengine.topology.sizes import GenSizes, TrainSizes

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
  hybridengine reshard bench --train 2-2-1 --gen 1-1 --methods micro-dp,megatron-core
  hybridengine reshard bench --pair 1-4-2:1-2 --pair 2-4-1:1-2 --pair 2-2-2:1-1 --json bench.json --plot bench.svg
  hybridengine reshard bench --model path/to/config.json --dtype bfloat16 --repetitions 20
  torchrun --nnodes 2 --nproc-per-node 8 ... --no-python hybridengine reshard bench --train 2-8-1 --gen 1-4

reading the table: bytes are those of the rank with the most; "x1.02" beneath them is the ratio to the formula of the
paper's table 2 (HybridFlow, arXiv 2409.19256), beneath seconds are the fastest and the slowest repetition. "vs ours" is
seconds there over those of micro-dp. "raw" is the rate at which bytes arrive, over that of a bare all-gather of the
training shards inside the micro-DP group, measured in the same run; it says nothing about how many bytes are sent."""


DEFAULTS = "1-4-2", "1-2"
"""Training and generation sizes where none are given."""


def add_bench_command(subparsers: Any) -> None:
    """Add `bench` to the sub-commands of `hybridengine reshard`."""
    parser = subparsers.add_parser(
        "bench",
        help="measure the switch on real ranks, beside the methods that others use",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )

    option = once(parser)

    option("--train", metavar="P-T-D", help="training sizes: stages, tensor shards, replicas (default 1-4-2)")
    option("--gen", metavar="PG-TG", help="generation sizes: stages, tensor shards (default 1-2)")
    option(
        "--pair", action="append", default=[], metavar="TRAIN:GEN",
        help="a pair of layouts such as 2-4-1:1-2; give it several times for several pairs in one run",
    )  # fmt: skip
    option(
        "--model", metavar="PRESET_OR_FILE",
        help="a preset, a Hugging Face config.json or a folder with one; weights are made up (default: a Llama of"
        f" {format_bytes(DEFAULT_MODEL.weight_bytes('float32'))} in float32)",
    )  # fmt: skip
    option("--dtype", default=DTYPES[0], metavar="TYPE", help=f"{' or '.join(DTYPES)} (default {DTYPES[0]})")
    option(
        "--methods", default=",".join(method.value for method in MethodName), metavar="NAMES",
        help="comma-separated, of those above (default all)",
    )  # fmt: skip
    option("--repetitions", type=int, default=7, metavar="N", help="counted repetitions (default 7)")
    option(
        "--verify", default=VERIFY_TIMES[0], metavar="WHEN",
        help="when micro-dp checks digests of what arrives: first, always or never (default first). What `always` costs"
        " is measured in any case",
    )  # fmt: skip
    option(
        "--bucket-bytes", default="16MiB", metavar="BYTES",
        help="weights that move together, in every method that has buckets (default 16MiB)",
    )  # fmt: skip
    option(
        "--timeout",
        type=float,
        default=120.0,
        metavar="SECONDS",
        help="longest that any wait may take (default 120)",
    )
    option("--json", type=Path, metavar="FILE", help="write everything that was measured to FILE")
    option("--plot", type=Path, metavar="FILE", help="draw seconds and bytes to FILE (.png, .svg, .pdf)")
    parser.set_defaults(run=run_bench)


def run_bench(options: argparse.Namespace) -> int:
    """Carry out the command; returns the exit status."""
    spec = spec_of(options)
    check_picture("--plot", options.plot)
    check_output_files({"--json": options.json, "--plot": options.plot}, {"--model": options.model})
    joined = is_rank()
    if joined:
        check_world(spec)
    else:
        check_machine(spec, num_gpus(), available_bytes())
    console = _console()
    started = time.perf_counter()

    def say(text: str) -> None:
        console.print(
            f"[{time.perf_counter() - started:6.1f}s] {text}", markup=False, highlight=False, soft_wrap=True
        )

    measured: list[PairResult] = []
    try:
        for pair in measure_joined(spec, say) if joined else _measure_here(spec, say):
            measured.append(pair)
            if joined and os.environ["RANK"] != "0":
                continue
            print_pair(console, spec, pair)
            if options.json:  # after every pair: what has been measured is not lost where a later one fails
                report = json.dumps(report_as_dict(spec, measured, _machine()), indent=2) + "\n"
                write_output("--json", options.json, report)
                say(f"written: {options.json}")
    finally:
        if options.plot and measured and not (joined and os.environ["RANK"] != "0"):
            from hybridengine.bench.plot import draw

            with output("--plot", options.plot) as place:
                draw(spec, measured, place)
            say(f"drawn: {options.plot}")
    return 0


def _measure_here(spec: BenchSpec, say: Callable[[str], None]) -> Iterator[PairResult]:
    """Results of each pair, on ranks that are started for it."""
    say("loading torch and Megatron-core, once for all ranks")
    starter = RankStarter("hybridengine.cli.main")
    for pair in spec.pairs:
        say(spec.describe(pair))
        yield starter.measure(spec, pair, say)


def spec_of(options: argparse.Namespace) -> BenchSpec:
    """The benchmark that the options describe.

    Raises:
        ConfigError, TopologyError: options that cannot be.
    """
    pairs = [LayoutPair.parse(text) for text in options.pair]
    given = options.train, options.gen
    if given != (None, None) or not pairs:
        train, gen = (
            default if text is None else text for text, default in zip(given, DEFAULTS, strict=True)
        )
        pairs.insert(0, LayoutPair(TrainSizes.parse(train), GenSizes.parse(gen)))
    return BenchSpec(
        shape=DEFAULT_MODEL if options.model is None else resolve_model(options.model),
        pairs=tuple(dict.fromkeys(pairs)),
        methods=parse_choices(options.methods, MethodName, "method"),
        dtype=options.dtype,
        repetitions=options.repetitions,
        bucket_bytes=parse_bytes("--bucket-bytes", options.bucket_bytes),
        verify=options.verify,
        timeout_s=options.timeout,
    )


def print_pair(console: Console, spec: BenchSpec, pair: PairResult) -> None:
    """Print the table of one pair and what belongs to it."""
    table = Table(
        title=f"{pair.pair} on {pair.pair.train.num_ranks} ranks, M = {format_bytes(spec.weight_bytes)}, medians of"
        f" {spec.repetitions} repetitions",
        title_justify="left",
    )
    table.add_column("method")
    for heading in ("there", "back", "received", "peak weights", "redundant", "vs ours", "raw"):
        table.add_column(heading, justify="right", no_wrap=True)
    for result in pair.results:
        table.add_row(*_row(result))
    console.print(table)
    for line in notes(pair):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def notes(pair: PairResult) -> list[str]:
    """What belongs to a pair and to no row."""
    lines = []
    received = [result for result in pair.results if result.received_back_bytes_max]
    lines += [
        f"{result.method.value} received {format_bytes(result.received_back_bytes_max)} on the way back"
        for result in received
    ]
    if pair.raw:
        lines.append(
            f"raw all-gather: {format_bytes(pair.raw.received_bytes)} per rank in {_spread(pair.raw.seconds)},"
            f" {format_bytes(pair.raw.bytes_per_second)}/s"
        )
    if pair.verify_always_over_never is not None:
        lines.append(
            f"verify=always takes x{pair.verify_always_over_never:.2f} of verify=never (micro-dp, there)"
        )
    return lines


def _row(result: MethodResult) -> list[str]:
    expected = result.formula
    return [
        result.method.value,
        *(f"{format_seconds(timing.median)}\n{_range(timing)}" for timing in (result.there, result.back)),
        _bytes(result.received_bytes_max, expected.received_bytes),
        _bytes(result.peak_weight_bytes_max, expected.peak_weight_bytes),
        _bytes(result.redundant_bytes_max, expected.redundant_bytes),
        _number(result.seconds_there_over_micro_dp, "x{:.2f}"),
        _number(result.raw_all_gather_fraction, "{:.0%}"),
    ]


def _bytes(measured: int, expected: float | None) -> str:
    return f"{format_bytes(measured)}\n{_number(ratio(measured, expected), 'x{:.2f}')}"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _range(timing: Timing) -> str:
    return f"{timing.lowest * 1000:.0f}-{timing.highest * 1000:.0f} ms"


def _spread(timing: Timing) -> str:
    return f"{format_seconds(timing.median)} ({_range(timing)})"


def _console() -> Console:
    """Wide enough for the table where the output is no terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=max(console.width, 110))


def _machine() -> dict[str, Any]:
    names: Sequence[str] = ("torch", "megatron-core")
    return {
        "cpus": os.cpu_count(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        **{name: version(name) for name in names},
    }

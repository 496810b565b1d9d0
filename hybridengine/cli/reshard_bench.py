"""`hybridengine reshard bench`: measure the switch on real ranks, and compare it with methods of other systems."""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path
from typing import Any

from hybridengine.bench.machine import check_memory, num_gpus
from hybridengine.bench.reshard.results import PairResult, report
from hybridengine.bench.reshard.spec import DEFAULT_MODEL, VERIFY_TIMES, BenchSpec, LayoutPair, MethodName
from hybridengine.cli.options import (
    DTYPES,
    add_json_option,
    between,
    byte_size,
    gen_sizes,
    parsed,
    train_sizes,
)
from hybridengine.cli.outputs import check_outputs, emit, progress_printer
from hybridengine.figure_tables import cell, table
from hybridengine.formatting import format_bytes
from hybridengine.models.presets import resolve_model
from hybridengine.topology.sizes import GenSizes, TrainSizes

DESCRIPTION = """Measure what switching the actor's weights from training to generation and back costs.

Starts p·t·d ranks on this machine, or on the Ray cluster that RAY_ADDRESS names (one per GPU over NCCL, or processes over
gloo where there is no GPU), builds a real Megatron model of the given shape on them, and lets every method move the same
weights in turn: micro-dp (this project), model-parallel (HybridFlow-V), full (DeepSpeed-Chat), per-tensor (verl and most
others) and megatron-core (megatron.core.resharding). A method that delivers a wrong bit ends the benchmark.

Bytes are those of the rank with the most, "formula" is the ratio to table 2 of the paper (HybridFlow, arXiv 2409.19256),
"ours" seconds there over those of micro-dp, and "raw" the rate at which bytes arrive over that of a bare all-gather of
the training shards inside the micro-DP group. docs/how-to/benchmarks.md describes the methods."""

EPILOG = """examples:
  hybridengine reshard bench                                          1-4-2 to 1-2 on 8 ranks, every method
  hybridengine reshard bench --train 2-2-1 --gen 1-1 --methods micro-dp megatron-core
  hybridengine reshard bench --pair 1-4-2:1-2 --pair 2-4-1:1-2 --model path/to/config.json --dtype bfloat16
  RAY_ADDRESS=auto hybridengine reshard bench --nodes 2 --train 2-8-1 --gen 1-4"""

COLUMNS = {
    "method": "method",
    "seconds_there": "there",
    "seconds_there_min": "fastest",
    "seconds_there_max": "slowest",
    "seconds_back": "back",
    "received_back_bytes_max": "received back",
    "received_bytes_max": "received",
    "received_bytes_over_formula": "formula",
    "peak_weight_bytes_max": "peak weights",
    "peak_weight_bytes_over_formula": "formula",
    "redundant_bytes_max": "redundant",
    "seconds_there_over_micro_dp": "ours",
    "raw_all_gather_fraction": "raw",
}


def add_bench_command(subparsers: Any) -> None:
    """Add `bench` to the sub-commands of `hybridengine reshard`."""
    parser = subparsers.add_parser(
        "bench",
        help="measure the switch on real ranks, beside the methods that others use",
        description=DESCRIPTION,
        epilog=EPILOG,
    )
    parser.set_defaults(run=run_bench)
    option, names = parser.add_argument, [method.value for method in MethodName]
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
    option("--methods", nargs="+", choices=names, default=names, metavar="NAME", help="(default all)")
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
        "--nodes", type=between(1, 10_000), default=1, metavar="N",
        help="nodes of the Ray cluster, with equally many ranks each (default 1)",
    )  # fmt: skip
    option(
        "--timeout", type=between(1, 86400, float), default=120.0, metavar="SECONDS",
        help="longest that a method may take there and back (default 120)",
    )  # fmt: skip
    add_json_option(parser)
    option("--plot", type=Path, metavar="FILE", help="draw seconds and bytes to FILE (.png, .svg, .pdf)")


def run_bench(options: argparse.Namespace) -> int:
    """Carry out the command; return the exit status."""
    spec = spec_of(options)
    check_outputs({"--json": options.json, "--plot": options.plot}, {"--model": options.model})
    for pair in () if num_gpus() else spec.pairs:
        check_memory(
            f"{pair}: {pair.train.num_ranks} ranks with {format_bytes(spec.weight_bytes)} of weights",
            spec.needed_bytes(pair),
            "choose a smaller model, --dtype bfloat16 or fewer methods",
        )
    # Megatron-core warns for every GPU package that is not installed; on a machine without a GPU that is expected.
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")
    from hybridengine.bench.reshard.measurement import measure_switches

    measured: list[PairResult] = []

    def draw(place: Path) -> None:
        from hybridengine.bench.reshard.plot import draw

        draw(spec, measured, place)

    try:
        for result in measure_switches(spec, progress_printer()):
            measured.append(result)
    finally:  # measured pairs are reported even if a later one fails
        if measured:
            lines = [line for result in measured for line in pair_lines(spec, result)]
            emit(options, report(spec, measured), lines, {"--plot": (options.plot, draw)})
    return 0


def spec_of(options: argparse.Namespace) -> BenchSpec:
    """Return the benchmark that the options describe.

    Raises:
        ConfigError, TopologyError: invalid options.
    """
    pairs = list(options.pair)
    if options.train or options.gen or not pairs:
        pairs.insert(0, LayoutPair(options.train or TrainSizes(1, 4, 2), options.gen or GenSizes(1, 2)))
    return BenchSpec(
        shape=DEFAULT_MODEL if options.model is None else resolve_model(options.model),
        pairs=tuple(dict.fromkeys(pairs)),
        methods=tuple(MethodName(name) for name in dict.fromkeys(options.methods)),
        dtype=options.dtype,
        repetitions=options.repetitions,
        bucket_bytes=options.bucket_bytes,
        verify=options.verify,
        timeout_s=options.timeout,
        num_nodes=options.nodes,
    )


def pair_lines(spec: BenchSpec, pair: PairResult) -> list[str]:
    """Return the lines of a table of one pair, followed by notes."""
    figures, notes = pair.figures, ("raw_all_gather_seconds", "verify_always_over_never")
    return [
        f"{figures['train']} -> {figures['gen']} on {figures['num_ranks']} ranks, M = {format_bytes(spec.weight_bytes)},"
        f" medians of {spec.repetitions} repetitions",
        *table(pair.results, COLUMNS),
        *(
            f"{name.replace('_', ' ')}: {cell(name, figures[name])}"
            for name in notes
            if figures[name] is not None
        ),
        "",
    ]

"""`hybridengine reshard bench`: measure the switch on real ranks, and compare it with methods of other systems."""

from __future__ import annotations

import argparse
from pathlib import Path

from hybridengine.bench.reshard.results import PairResult, report
from hybridengine.bench.reshard.spec import DEFAULT_MODEL, BenchSpec, LayoutPair, MethodName, methods_for
from hybridengine.cli.options import DTYPES, add_json_option, between, byte_size
from hybridengine.cli.outputs import check_outputs, emit, progress_printer
from hybridengine.formatting import cell, format_bytes, table
from hybridengine.machine import check_memory, num_gpus
from hybridengine.models.presets import resolve_model
from hybridengine.topology.sizes import GenSizes, TrainSizes

DESCRIPTION = """Measure what switching the actor's weights from training to generation and back costs.

Starts p·t·d ranks on this machine, or on the Ray cluster that RAY_ADDRESS names (one per GPU over NCCL, or processes over
gloo where there is no GPU), builds a real Megatron model of the given shape on them, and lets every method move the same
weights in turn: micro-dp (this project), model-parallel (HybridFlow-V), full (DeepSpeed-Chat), per-tensor (verl and most
others) and megatron-core (megatron.core.resharding). A method that delivers a wrong bit ends the benchmark. Mixtures of
experts are moved by micro-dp and megatron-core.

docs/how-to/benchmarks.md describes the methods and the figures."""

EPILOG = """examples:
  hybridengine reshard bench                                          1-4-2 to 1-2 on 8 ranks, every method
  hybridengine reshard bench --train 2-2-1 --gen 1-1 --methods micro-dp megatron-core
  hybridengine reshard bench --pair 1-4-2:1-2 --pair 2-4-1:1-2 --model path/to/config.json --dtype bfloat16
  hybridengine reshard bench --model path/to/moe.json --train "1-2-2 e=2 etp=1" --gen "1-2 e=2"
  RAY_ADDRESS=auto hybridengine reshard bench --nodes 2 --train 2-4-1 --gen 1-4"""

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


def add_options(parser: argparse.ArgumentParser) -> None:
    option, names, many = parser.add_argument, [method.value for method in MethodName], between(1, 10_000)
    seconds, parse_pair = between(1, 86400, float), LayoutPair.parse
    option("--train", type=TrainSizes.parse, metavar="P-T-D", help="training sizes (default 1-4-2)")
    option("--gen", type=GenSizes.parse, metavar="PG-TG", help="generation sizes (default 1-2)")
    option("--pair", type=parse_pair, action="append", metavar="TRAIN:GEN", help="2-4-1:1-2; repeatable")
    option(
        "--model", metavar="PRESET_OR_FILE",
        help="a preset, a Hugging Face config.json or a folder with one; weights are made up (default: a Llama of"
        f" {format_bytes(DEFAULT_MODEL.weight_bytes('float32'))} in float32)",
    )  # fmt: skip
    option("--dtype", choices=DTYPES, default=DTYPES[0], help=f"of the weights (default {DTYPES[0]})")
    option("--methods", nargs="+", choices=names, metavar="NAME", help="methods (default all)")
    option("--repetitions", type=many, default=7, metavar="N", help="counted ones")
    option("--bucket-bytes", type=byte_size, default="16MiB", metavar="BYTES", help="that move together")
    option("--nodes", type=many, default=1, metavar="N", help="nodes with equally many ranks")
    option("--timeout", type=seconds, default=120.0, metavar="SECONDS", help="longest way there and back")
    add_json_option(parser)
    option("--plot", type=Path, metavar="FILE", help="draw seconds and bytes to FILE (.png, .svg, .pdf)")


def run(options: argparse.Namespace) -> int:
    spec = spec_of(options)
    check_outputs({"--json": options.json, "--plot": options.plot}, {"--model": options.model})
    for pair in () if num_gpus() else spec.pairs:
        check_memory(
            f"{pair}: {pair.train.num_ranks} ranks with {format_bytes(spec.weight_bytes)} of weights",
            spec.needed_bytes(pair),
            "choose a smaller model, --dtype bfloat16 or fewer methods",
        )
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
    """Return the benchmark that the options describe."""
    pairs: list[LayoutPair] = [*(options.pair or ())]
    if options.train or options.gen or not pairs:
        pairs.insert(0, LayoutPair(options.train or TrainSizes(1, 4, 2), options.gen or GenSizes(1, 2)))
    shape = DEFAULT_MODEL if options.model is None else resolve_model(options.model)
    named = tuple(MethodName(name) for name in dict.fromkeys(options.methods or ()))
    return BenchSpec(
        shape=shape,
        pairs=tuple(dict.fromkeys(pairs)),
        methods=named or methods_for(shape),
        dtype=options.dtype,
        repetitions=options.repetitions,
        bucket_bytes=options.bucket_bytes,
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

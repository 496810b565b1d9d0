"""`hybridengine bench serve`: measure the Tinker server's own time per request."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from hybridengine.bench.serve.spec import ServeSpec, serve_figures
from hybridengine.cli.options import add_json_option, between
from hybridengine.cli.outputs import check_outputs, emit, progress_printer
from hybridengine.formatting import table
from hybridengine.importing import import_module
from hybridengine.topology.sizes import GenSizes, TrainSizes

COLUMNS = {
    "request": "request",
    "sdk_s": "by the SDK",
    "ranks_s": "on the ranks",
    "server_ms": "server's ms",
    "step_share": "of a step",
    "num_switches": "switches",
    "num_calls": "calls",
}

DESCRIPTION = """Measure what the Tinker server adds to the work of the ranks. It starts `hybridengine serve` on the model
of a configuration and sends it requests with the Tinker SDK, each kind in turn: one sample, many samples together,
log-probs of a prompt, forward_backward, optim_step, and a whole step of these.

The server's own time is the SDK's, from the call to its result, minus that of the calls on the ranks, which the server
writes to a file (`serve.calls_file`). It has SDK, HTTP, database, 50 ms of waiting for more samples, and the controller.
Samples that are asked for together take one switch."""

EPILOG = """examples:
  hybridengine bench serve configs/bench-small.yaml                              32 samples of 32 tokens, two ranks
  hybridengine bench serve configs/smollm2.yaml --response-tokens 64 --parallel 1-1-1 --repetitions 3
  hybridengine bench serve configs/bench-small.yaml --json serve.json"""


def add_options(parser: argparse.ArgumentParser) -> None:
    option, seconds = parser.add_argument, between(10, 86400, float)
    option("config", metavar="CONFIG", help="configuration with the model and the prompts")
    option("--samples", type=between(2, 1024), default=32, metavar="N", help="at once, and rows of a step")
    option("--response-tokens", type=between(1, 65_536), default=32, metavar="N", help="of every response")
    option("--parallel", type=TrainSizes.parse, default="1-2-1", metavar="P-T-D", help="sizes of training")
    option("--generate", type=GenSizes.parse, default="1-1", metavar="P_G-T_G", help="sizes of generation")
    option("--repetitions", type=between(1, 1000), default=9, metavar="N", help="counted ones")
    option("--timeout", type=seconds, default=900.0, metavar="SECONDS", help="longest start or call")
    add_json_option(parser)


def run(options: argparse.Namespace) -> int:
    spec = ServeSpec(
        options.samples,
        options.response_tokens,
        options.parallel,
        options.generate,
        options.repetitions,
        options.timeout,
    )
    check_outputs({"--json": options.json}, {"CONFIG": options.config})
    measure = import_module("hybridengine.bench.serve.measure")
    figures = serve_figures(
        spec, options.config, measure.measure_serve(options.config, spec, progress_printer())
    )
    emit(options, figures, result_lines(figures))
    return 0


def result_lines(figures: Mapping[str, Any]) -> list[str]:
    """Return the lines of a table of all kinds of requests, followed by notes."""
    rows = [
        {"request": kind, **found, "step_share": found["server_over_step_share"]}
        for kind, found in figures["kinds"].items()
    ]
    return [
        f"{figures['num_samples']} samples of {figures['response_tokens']} tokens, {figures['parallel']} /"
        f" {figures['generate']}, medians of {figures['repetitions']} rounds",
        *table(rows, COLUMNS),
        f"{figures['num_samples']} samples together: switches {figures['switches_of_samples_together']};"
        f" a step: switches {figures['switches_of_step']}, the server's own time"
        f" {figures['server_share_of_step']:.1%}",
    ]

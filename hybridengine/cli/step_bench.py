"""`hybridengine bench step`: measure a GRPO step, and compare it with one of TRL."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybridengine.bench.step.spec import PRECISIONS, OwnWay, StepSpec, own_ways, step_figures, trl_ways
from hybridengine.cli.options import DTYPES, add_json_option, between
from hybridengine.cli.outputs import check_outputs, emit, progress_printer
from hybridengine.errors import ConfigError, raise_all
from hybridengine.formatting import cell, table
from hybridengine.machine import num_gpus
from hybridengine.topology.sizes import GenSizes, TrainSizes

CACHE = Path("~/.cache/hybridengine")
COLUMNS = {
    "side": "",
    "tokens_per_s": "tokens/s",
    "step_s": "step",
    "step_s_min": "fastest",
    "step_s_max": "slowest",
    "way": "way",
}

DESCRIPTION = """Measure steps of GRPO on this machine, this project's and TRL's in turn: responses to every prompt,
rewards, the reference's log-probs, one update. Each side does them the way that is fastest here.

Both do the same work, on the same cores or on one GPU; of the configuration, the model and the prompts count. The
environment for TRL, which the command makes once, needs 3 GB and pip. docs/explanation/performance.md has the method and
results."""

EPILOG = """examples:
  hybridengine bench step configs/bench-small.yaml                                    128 responses of 32 tokens
  hybridengine bench step configs/smollm2.yaml --prompts 2 --response-tokens 64 --dtype bfloat16 --repetitions 5
  hybridengine bench step configs/bench-small.yaml --only hybridengine --parallel 1-1-2 --json step.json"""


def add_options(parser: argparse.ArgumentParser) -> None:
    option, many, seconds = parser.add_argument, between(1, 65_536), between(10, 86400, float)
    option("config", metavar="CONFIG", help="configuration with the model and the prompts")
    option("--prompts", type=many, default=16, metavar="N", help="prompts of a step")
    option("--samples", type=between(2, 1024), default=8, metavar="N", help="of each prompt")
    option("--response-tokens", type=many, default=32, metavar="N", help="of every response")
    option("--dtype", choices=DTYPES, help="of the weights (default float32, on GPUs bfloat16)")
    option("--repetitions", type=between(1, 1000), default=9, metavar="N", help="counted ones")
    option("--only", choices=["hybridengine"], help="measure without TRL")
    option("--parallel", type=TrainSizes.parse, metavar="P-T-D", help="our sizes (default: the fastest)")
    option("--generate", type=GenSizes.parse, metavar="P_G-T_G", help="sizes, with --parallel (default 1-1)")
    option(
        "--trl-precision", choices=tuple(PRECISIONS),
        help="TRL's: float32, autocast (to bfloat16), or weights (in bfloat16, which is other training);"
        " by default float32, or with --dtype bfloat16 the faster of the first two",
    )  # fmt: skip
    option("--environment", type=Path, default=CACHE, metavar="FOLDER", help="where TRL is, or is installed")
    option("--timeout", type=seconds, default=900.0, metavar="SECONDS", help="longest step or start")
    add_json_option(parser)


def run(options: argparse.Namespace) -> int:
    dtype = options.dtype or ("bfloat16" if num_gpus() else "float32")
    work = options.prompts, options.samples, options.response_tokens, dtype, options.repetitions
    spec = StepSpec(*work, options.timeout)
    ours = chosen_own_ways(options, spec)
    if options.only and options.trl_precision:
        raise ConfigError(
            f"--only {options.only} measures without TRL, whose way --trl-precision sets; leave out one of them"
        )
    theirs = [] if options.only else trl_ways(spec, options.trl_precision)
    check_outputs({"--json": options.json}, {"CONFIG": options.config})
    from hybridengine.bench.step.measure import measure_steps

    environment = options.environment.expanduser().absolute()
    own, trl = measure_steps(options.config, spec, ours, theirs, environment, progress_printer())
    figures = step_figures(spec, options.config, own, trl)
    emit(options, figures, result_lines(spec, figures))
    return 0


def chosen_own_ways(options: argparse.Namespace, spec: StepSpec) -> list[OwnWay]:
    """Return our ways to try: those with the sizes that the options name, or all."""
    train, gen = options.parallel, options.generate or GenSizes(1, 1)
    if train is None and options.generate:
        raise ConfigError("--generate needs the training sizes; add --parallel")
    if train is not None:
        raise_all([f"--generate {gen}: {problem}" for problem in gen.problems_over(train)])
        if spec.num_prompts < train.num_ranks or spec.num_rows * gen.num_ranks % train.num_ranks:
            raise ConfigError(
                f"--parallel {train}: {spec.num_prompts} prompts and {spec.num_rows} rows do not split over its"
                f" {train.num_ranks} ranks; choose more --prompts, a multiple of {train.num_ranks}, or fewer ranks"
            )
    gpus = num_gpus()
    if gpus and not options.only:  # as many as TRL's process uses
        gpus = 1
        if train is not None and train.num_ranks > gpus:
            raise ConfigError(
                f"--parallel {train} takes {train.num_ranks} GPUs, and TRL's process takes one; compare on one, or add"
                " --only hybridengine"
            )
    return own_ways(spec, len(os.sched_getaffinity(0)), gpus, train, gen)


def result_lines(spec: StepSpec, figures: Mapping[str, Any]) -> list[str]:
    """Return the lines of a table of both sides, followed by notes."""
    sides = [
        {"side": name, **figures[key]}
        for name, key in (("ours", "hybridengine"), ("TRL", "trl"))
        if figures[key]
    ]
    lines = [
        f"{spec.num_rows} responses of {spec.response_tokens} tokens in {spec.dtype}, medians of {spec.repetitions}"
        " steps",
        *table(sides, COLUMNS),
    ]
    for side in sides:
        phases = (f"{phase} {cell('phase_s', seconds)}" for phase, seconds in side["phases_s"].items())
        lines.append(f"{side['side']}: {', '.join(phases)}")
    lines.append(f"controller: {figures['controller_overhead_share']:.1%} of our step")
    if figures["ratio"] is not None:
        lines.append(f"ratio: {figures['ratio']:.2f} of TRL's tokens per second")
    return lines

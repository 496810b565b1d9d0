"""`hybridengine bench step`: measure a GRPO step, and compare it with one of TRL."""

from __future__ import annotations

import argparse
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridengine.bench.machine import num_gpus
from hybridengine.bench.step.environment import make_environment
from hybridengine.bench.step.spec import (
    PRECISIONS,
    OwnWay,
    StepSpec,
    TrlWay,
    own_ways,
    step_figures,
    trl_ways,
)
from hybridengine.cli.options import DTYPES, add_json_option, between, gen_sizes, train_sizes
from hybridengine.cli.outputs import check_outputs, emit, progress_printer
from hybridengine.errors import ConfigError, raise_all
from hybridengine.figure_tables import cell, table
from hybridengine.temporary import temporary_folder
from hybridengine.topology.sizes import GenSizes

if TYPE_CHECKING:
    from hybridengine.bench.step.own import StepFiles

DEFAULT_ENVIRONMENT = Path("~/.cache/hybridengine")
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

Both start from the same weights and take the same prompts, samples per prompt, lengths, precision, optimizer and reward.
Every response has all its tokens. Of the configuration, the model and the prompts count. The environment for TRL, which
the command makes once, needs 3 GB and pip. docs/explanation/performance.md has results."""

EPILOG = """examples:
  hybridengine bench step configs/bench-small.yaml                                    128 responses of 32 tokens
  hybridengine bench step configs/smollm2.yaml --prompts 2 --response-tokens 64 --dtype bfloat16 --repetitions 5
  hybridengine bench step configs/bench-small.yaml --only hybridengine --parallel 1-1-2 --json step.json"""


def add_step_command(subparsers: Any) -> None:
    """Add `step` to the sub-commands of `hybridengine bench`."""
    parser = subparsers.add_parser(
        "step",
        help="a step of GRPO, and one of TRL's in turn",
        description=DESCRIPTION,
        epilog=EPILOG,
    )
    parser.set_defaults(run=run_step)
    option, many = parser.add_argument, between(1, 65_536)
    option("config", metavar="CONFIG", help="configuration with the model and the prompts")
    option("--prompts", type=many, default=16, metavar="N", help="prompts of a step (default 16)")
    option("--samples", type=between(2, 1024), default=8, metavar="N", help="of each prompt (default 8)")
    option("--response-tokens", type=many, default=32, metavar="N", help="of every response (default 32)")
    option("--dtype", choices=DTYPES, default=DTYPES[0], help=f"of the weights (default {DTYPES[0]})")
    option("--repetitions", type=between(1, 1000), default=9, metavar="N", help="counted ones (default 9)")
    option("--only", choices=["hybridengine"], help="measure without TRL")
    option("--parallel", type=train_sizes, metavar="P-T-D", help="our training sizes (default: the fastest)")
    option(
        "--generate", type=gen_sizes, metavar="P_G-T_G",
        help="our generation sizes (with --parallel; default 1-1)",
    )  # fmt: skip
    option(
        "--micro-rows", type=many, metavar="N", help="our rows per micro-batch (with --parallel; default all)"
    )
    option("--trl-rows", type=many, metavar="N", help="TRL's rows per batch (default: the fastest)")
    option(
        "--trl-precision", choices=tuple(PRECISIONS),
        help="TRL's: float32, autocast (to bfloat16), or weights (in bfloat16, which is other training);"
        " by default float32, or with --dtype bfloat16 the faster of the first two",
    )  # fmt: skip
    option(
        "--environment", type=Path, default=DEFAULT_ENVIRONMENT, metavar="FOLDER",
        help=f"where TRL's environment is, or is made (default {DEFAULT_ENVIRONMENT})",
    )  # fmt: skip
    option(
        "--timeout", type=between(10, 86400, float), default=900.0, metavar="SECONDS",
        help="longest that a step or a start may take (default 900)",
    )  # fmt: skip
    add_json_option(parser)


def run_step(options: argparse.Namespace) -> int:
    """Carry out the command; return the exit status."""
    spec = StepSpec(
        options.prompts,
        options.samples,
        options.response_tokens,
        options.dtype,
        options.repetitions,
        options.timeout,
    )
    num_cores = len(os.sched_getaffinity(0))
    ours, theirs = chosen_own_ways(options, spec, num_cores), chosen_trl_ways(options, spec)
    check_outputs({"--json": options.json}, {"CONFIG": options.config})
    say = progress_printer()
    with temporary_folder("step") as folder:
        # Megatron-core warns for every GPU package that is not installed.
        warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")
        files = prepare_step(options.config, spec, folder)
        from hybridengine.bench.step.measure import StepBench

        python = None
        if options.only is None:
            python = make_environment(options.environment.expanduser().absolute(), say)
        own, trl = StepBench(spec, files, folder, num_cores, python, say).measure(ours, theirs)
    figures = step_figures(spec, options.config, own, trl)
    emit(options, figures, result_lines(spec, figures))
    return 0


def chosen_own_ways(options: argparse.Namespace, spec: StepSpec, num_cores: int) -> list[OwnWay]:
    """Return our ways to try: the one that the options name, or all.

    Raises:
        ConfigError: the sizes do not fit the work.
    """
    train, gen = options.parallel, options.generate or GenSizes(1, 1)
    if train is None:
        if options.generate or options.micro_rows:
            raise ConfigError("--generate and --micro-rows need the training sizes; add --parallel")
        return own_ways(spec, num_cores, num_gpus())
    raise_all([f"--generate {gen}: {problem}" for problem in gen.problems_over(train)])
    if spec.num_prompts < train.num_ranks or spec.num_rows * gen.num_ranks % train.num_ranks:
        raise ConfigError(
            f"--parallel {train}: {spec.num_prompts} prompts and {spec.num_rows} rows do not split over its"
            f" {train.num_ranks} ranks; choose more --prompts, a multiple of {train.num_ranks}, or fewer ranks"
        )
    rows = spec.num_rows // train.dp_size
    micro_rows = options.micro_rows or rows
    if micro_rows > rows:
        raise ConfigError(f"--micro-rows {micro_rows}: a replica has {rows} rows; choose 1 to {rows}")
    return [OwnWay(train, gen, max(1, num_cores // train.num_ranks), micro_rows)]


def chosen_trl_ways(options: argparse.Namespace, spec: StepSpec) -> list[TrlWay]:
    """Return TRL's ways to try: those that the options name, or all.

    Raises:
        ConfigError: `--trl-rows` does not divide the rows, or conflicts with `--only`.
    """
    rows = options.trl_rows
    if options.only and (rows or options.trl_precision):
        raise ConfigError(
            f"--only {options.only} measures without TRL, and --trl-rows and --trl-precision set TRL's way; leave out"
            " the one or the other"
        )
    if rows is not None and spec.num_rows % rows:
        raise ConfigError(
            f"--trl-rows {rows} must divide the {spec.num_rows} rows of a step; choose a divisor"
        )
    return trl_ways(spec, rows, options.trl_precision)


def prepare_step(config_file: str, spec: StepSpec, folder: Path) -> StepFiles:
    """Return the model and the prompts of a configuration, building them if it says so.

    Raises:
        ConfigError, CheckpointError, DataError: they cannot be read or built.
    """
    from hybridengine.bench.step.own import StepFiles, copy_without_end
    from hybridengine.config import load_config
    from hybridengine.training.files import claim_run, prepare_files

    config, _ = claim_run(load_config(config_file, [f"run.folder={folder}", "run.name=files", "warmup=null"]))
    read = prepare_files(config)
    if len(read.prompts) < spec.num_prompts:
        raise ConfigError(
            f"--prompts {spec.num_prompts} is more than the {len(read.prompts)} prompts of {config_file}; choose fewer"
        )
    return StepFiles(
        model=copy_without_end(config.model_folder, folder / "endless"),
        tokenizer=config.tokenizer_folder,
        train_file=config.train_file.absolute(),
        prompts=read.prompts,
        texts=read.tokenizer.batch_decode(read.prompts.tokens),
    )


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

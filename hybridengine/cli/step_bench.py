"""`hybridengine bench step`: measure a step of GRPO, and beside it one of TRL's."""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from hybridengine.bench.machine import num_gpus
from hybridengine.bench.step_environment import make_environment, requirements
from hybridengine.bench.step_result import CONTROLLER, Side, StepResult
from hybridengine.bench.step_spec import DTYPES, PRECISIONS, OwnWay, StepSpec, TrlWay, own_ways, trl_ways
from hybridengine.cli.options import once
from hybridengine.cli.output_files import check_output_files, write_output
from hybridengine.errors import ConfigError, raise_all
from hybridengine.metrics.formatting import format_seconds
from hybridengine.temporary import temporary_folder
from hybridengine.topology.sizes import GenSizes, TrainSizes

if TYPE_CHECKING:
    from hybridengine.bench.step_own import StepFiles

DEFAULT_ENVIRONMENT = Path("~/.cache/hybridengine")
SIDES = ("both", "hybridengine")

DESCRIPTION = """Measure steps of GRPO on this machine: responses to every prompt, rewards, the reference's log-probs, one
update.

  ours    this project's dataflow on real ranks, the way that is fastest here: how many ranks, how large micro-batches
  TRL     GRPOTrainer in an environment of its own, which the command makes once; with all cores, and the batches that are
          fastest here

Both start from the same weights and take the same prompts, samples per prompt, lengths, precision, optimizer and reward,
step by step in turn; while one works, the other waits. Every response has all its tokens."""

EPILOG = """examples:
  hybridengine bench step configs/bench-small.yaml                                    128 responses of 32 tokens
  hybridengine bench step configs/smollm2.yaml --prompts 2 --response-tokens 64 --dtype bfloat16 --repetitions 5
  hybridengine bench step configs/bench-small.yaml --only hybridengine --parallel 1-1-2 --json step.json

Of the configuration, the model and the prompts count. Tokens per second are prompt and response tokens over the seconds
of a step; "ratio" is ours over TRL's, medians. "controller" is the part of our step in which no rank was in a call.
The environment for TRL needs 3 GB and pip; PIP_EXTRA_INDEX_URL and pip's other variables count."""


def add_step_command(subparsers: Any) -> None:
    """Add `step` to the sub-commands of `hybridengine bench`."""
    parser = subparsers.add_parser(
        "step",
        help="a step of GRPO, and one of TRL's in turn",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )

    option = once(parser)

    parser.add_argument("config", metavar="CONFIG", help="configuration with the model and the prompts")
    option("--prompts", type=int, default=16, metavar="N", help="prompts of a step (default 16)")
    option("--samples", type=int, default=8, metavar="N", help="responses to each prompt (default 8)")
    option("--response-tokens", type=int, default=32, metavar="N", help="of every response (default 32)")
    option("--dtype", default="float32", metavar="TYPE", help=f"{' or '.join(DTYPES)} (default float32)")
    option("--repetitions", type=int, default=9, metavar="N", help="counted steps of each (default 9)")
    option("--only", default="both", metavar="SIDE", help="hybridengine measures without TRL")
    option("--parallel", metavar="P-T-D", help="our training sizes, in place of the fastest")
    option("--generate", metavar="P_G-T_G", help="our generation sizes (with --parallel; default 1-1)")
    option(
        "--micro-rows", type=int, metavar="N", help="our rows per micro-batch (with --parallel; default all)"
    )
    option("--trl-rows", type=int, metavar="N", help="TRL's rows per batch, in place of the fastest")
    option(
        "--trl-precision",
        metavar="KIND",
        help="TRL's: float32, autocast (to bfloat16), or weights (in bfloat16, which is other training);"
        " by default float32, or with --dtype bfloat16 the faster of the first two",
    )
    option(
        "--environment",
        type=Path,
        default=DEFAULT_ENVIRONMENT,
        metavar="FOLDER",
        help=f"where TRL's environment is, or is made (default {DEFAULT_ENVIRONMENT})",
    )
    option(
        "--timeout",
        type=float,
        default=900.0,
        metavar="SECONDS",
        help="longest that a step or a start may take (default 900)",
    )
    option("--json", type=Path, metavar="FILE", help="write everything that was measured to FILE")
    parser.set_defaults(run=run_step)


def run_step(options: argparse.Namespace) -> int:
    """Carry out the command; returns the exit status."""
    spec = spec_of(options)
    num_cores = len(os.sched_getaffinity(0))
    ours, theirs = chosen_own_ways(options, spec, num_cores), chosen_trl_ways(options, spec)
    check_output_files({"--json": options.json}, {"CONFIG": options.config})
    console, started = Console(), time.perf_counter()

    def say(text: str) -> None:
        seconds = time.perf_counter() - started
        console.print(f"[{seconds:6.1f}s] {text}", markup=False, highlight=False, soft_wrap=True)

    with temporary_folder("step") as folder:
        # Megatron-core warns for every GPU package that is not installed.
        warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")
        files = prepare_step(options.config, spec, folder)
        from hybridengine.bench.step_measure import StepBench

        python = None
        if options.only == "both":
            python = make_environment(options.environment.expanduser().absolute(), say)
        result = StepBench(spec, files, folder, num_cores, python, say).measure(ours, theirs)
    print_result(console, spec, result)
    if options.json:
        report = result.as_dict(spec, options.config, _machine(num_cores))
        write_output("--json", options.json, json.dumps(report, indent=2) + "\n")
        say(f"written: {options.json}")
    return 0


def spec_of(options: argparse.Namespace) -> StepSpec:
    """The work that the options describe.

    Raises:
        ConfigError: values that cannot be.
    """
    if options.only not in SIDES:
        raise ConfigError(f"--only {options.only} is not known; write --only hybridengine, or leave it out")
    unread = [name for name in ("trl_rows", "trl_precision") if getattr(options, name) is not None]
    if options.only != "both" and unread:
        named = " and ".join(f"--{name.replace('_', '-')}" for name in unread)
        raise ConfigError(
            f"{named} is not read with --only {options.only}, which leaves TRL out; leave one of them out"
        )
    return StepSpec(
        num_prompts=options.prompts,
        samples_per_prompt=options.samples,
        response_tokens=options.response_tokens,
        dtype=options.dtype,
        repetitions=options.repetitions,
        timeout_s=options.timeout,
    )


def chosen_own_ways(options: argparse.Namespace, spec: StepSpec, num_cores: int) -> list[OwnWay]:
    """Our ways to try; the one that the options name.

    Raises:
        ConfigError, TopologyError: sizes that cannot be.
    """
    if options.parallel is None:
        for name in ("generate", "micro_rows"):
            if getattr(options, name) is not None:
                raise ConfigError(
                    f"--{name.replace('_', '-')} belongs to a way that --parallel names; add --parallel"
                )
        return own_ways(spec, num_cores, num_gpus())
    train, gen = TrainSizes.parse(options.parallel), GenSizes.parse(options.generate or "1-1")
    raise_all([f"--generate {gen}: {problem}" for problem in gen.problems_over(train)])
    if spec.num_prompts < train.num_ranks or spec.num_rows * gen.num_ranks % train.num_ranks:
        raise ConfigError(
            f"--parallel {train}: {spec.num_prompts} prompts and {spec.num_rows} rows do not split over its"
            f" {train.num_ranks} ranks; choose more --prompts, a multiple of {train.num_ranks}, or fewer ranks"
        )
    rows = spec.num_rows // train.dp_size
    micro_rows = rows if options.micro_rows is None else options.micro_rows
    if not 1 <= micro_rows <= rows:
        raise ConfigError(
            f"--micro-rows {micro_rows} is out of range; a replica has {rows} rows, choose 1 to {rows}"
        )
    return [OwnWay(train, gen, max(1, num_cores // train.num_ranks), micro_rows)]


def chosen_trl_ways(options: argparse.Namespace, spec: StepSpec) -> list[TrlWay]:
    """TRL's ways to try; the one that the options name.

    Raises:
        ConfigError: rows that TRL cannot cut so.
    """
    rows = options.trl_rows
    if rows is not None and (rows < 1 or spec.num_rows % rows):
        raise ConfigError(
            f"--trl-rows {rows} must divide the {spec.num_rows} rows of a step; choose a divisor"
        )
    precision = options.trl_precision
    if precision is not None and precision not in PRECISIONS:
        raise ConfigError(f"--trl-precision {precision} is not known; choose {', '.join(PRECISIONS)}")
    return trl_ways(spec, rows, precision)


def prepare_step(config_file: str, spec: StepSpec, folder: Path) -> StepFiles:
    """Model and prompts of a configuration, written or found.

    Raises:
        ConfigError, CheckpointError, DataError: they cannot be had.
    """
    from hybridengine.bench.step_own import StepFiles, copy_without_end
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


def print_result(console: Console, spec: StepSpec, result: StepResult) -> None:
    """Print the table and what belongs to it."""
    sides: dict[str, Side] = {"ours": result.own} | ({"TRL": result.trl} if result.trl else {})
    table = Table(
        title=f"{spec.num_rows} responses of {spec.response_tokens} tokens in {spec.dtype}, medians of"
        f" {spec.repetitions} steps",
        title_justify="left",
    )
    table.add_column("")
    for heading in ("tokens/s", "step", "spread"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("way")
    for name, side in sides.items():
        seconds = [step.seconds for step in side.steps]
        spread = f"{format_seconds(min(seconds))} to {format_seconds(max(seconds))}"
        table.add_row(name, f"{side.tokens_per_s:.0f}", format_seconds(side.step_s), spread, str(side.way))
    console.print(table)
    lines = [
        f"{name}: " + ", ".join(f"{phase} {format_seconds(s)}" for phase, s in side.phases_s.items())
        for name, side in sides.items()
    ]
    lines.append(f"{CONTROLLER}: {100 * result.controller_share:.1f}% of our step")
    if result.ratio is not None:
        lines.append(f"ratio: {result.ratio:.2f} of TRL's tokens per second")
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _machine(num_cores: int) -> dict[str, Any]:
    return {
        "cores": num_cores,
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "megatron-core": version("megatron-core"),
        "trl_environment": list(requirements()),
    }

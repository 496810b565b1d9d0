"""`hybridengine launch slurm`: write a batch script for SLURM, or submit it."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence

from hybridengine.cli.launch_options import (
    RETRIES,
    add_network_options,
    add_output_options,
    add_run_options,
    add_size_options,
    add_start_limit,
    deliver,
    node_options,
    note,
)
from hybridengine.cli.options import between
from hybridengine.errors import ConfigError
from hybridengine.launch.shape import launched_config, shape_of
from hybridengine.launch.slurm import SlurmJob, script, submit

DESCRIPTION = """Write a batch script for SLURM that carries out a run: it asks for the nodes that the configuration
needs, starts Ray on all of them with a token of its own, waits, trains, and ends Ray. The job is requeued when SLURM
loses a node, when Ray loses one, and at the time limit, and resumes from its last checkpoint on the nodes that SLURM then
gives.

Standard output has the script unless --output or --submit is given. Logs: slurm-NAME-JOB.log here, and one file for each
node in RUN/launch/JOB.START/."""

EPILOG = """examples:
  hybridengine launch slurm configs/llama3-70b-16nodes.yaml --time 24:00:00 --partition gpu --submit
  hybridengine launch slurm configs/qwen3-235b.yaml --account rl --cpus-per-node 96 --output job.sh
  hybridengine launch slurm configs/arithmetic.yaml run.steps=10 --setup 'source /etc/profile.d/cuda.sh' --interface ib0
  hybridengine launch slurm CONFIG --python python --srun-option container-image=team/hybridengine:1    with pyxis
"""
DIRECTIVES = ("time", "partition", "account", "qos", "constraint", "mem")


def add_options(parser: argparse.ArgumentParser) -> None:
    add_run_options(parser)
    option = parser.add_argument
    option(
        "--time", type=_time_limit, default="24:00:00", metavar="LIMIT",
        help="time limit of one start, as SLURM writes it: minutes, H:MM:SS, D-H:MM:SS or UNLIMITED",
    )  # fmt: skip
    option("--partition", metavar="NAME", help="partition (default: SLURM's)")
    option("--account", metavar="NAME", help="account that is charged")
    option("--qos", metavar="NAME", help="quality of service")
    option("--constraint", metavar="FEATURES", help="features of nodes, such as h100")
    option("--mem", default="0", metavar="SIZE", help="memory of each node; 0 is all of it")
    option("--job-name", metavar="NAME", help="name of the job (default: run.name)")
    option("--shared", action="store_true", help="accept nodes that other jobs use as well")
    option("--signal-before", type=between(30, 65_535), default=300, metavar="SECONDS",
           help="time before the limit at which the run is asked to save its step")  # fmt: skip
    option(
        "--retries", type=between(0, 1000), default=RETRIES, metavar="N", help="starts after the first one"
    )
    option("--sbatch-option", action="append", default=[], metavar="NAME[=VALUE]",
           help="further option of sbatch, such as reservation=NAME; may be repeated")  # fmt: skip
    option("--srun-option", action="append", default=[], metavar="NAME[=VALUE]",
           help="further option of srun, such as container-image=IMAGE; may be repeated")  # fmt: skip
    option("--folder", default=os.getcwd(), metavar="FOLDER", help="folder in which all nodes start")
    option("--python", default=sys.executable, metavar="FILE", help="Python of the installation")
    option("--setup", default="", metavar="COMMANDS", help="shell commands that are carried out first")
    add_size_options(parser)
    add_network_options(parser)
    add_start_limit(parser)
    add_output_options(parser, "sbatch")


def run(options: argparse.Namespace) -> int:
    config = launched_config(options.config, options.overrides)
    shape = shape_of(config, options.gpus_per_node)
    given = {name: value for name in DIRECTIVES if (value := getattr(options, name))}
    job = SlurmJob(
        name=options.job_name or config.run.name,
        shape=shape,
        run_folder=str(config.run_folder),
        folder=options.folder,
        python=options.python,
        arguments=["launch", "node", options.config, *options.overrides, *node_options(options)],
        setup=options.setup,
        exclusive=not options.shared,
        directives=given | _pairs("--sbatch-option", options.sbatch_option),
        step_options=_pairs("--srun-option", options.srun_option),
        cpus_per_node=options.cpus_per_node,
        signal_before_s=options.signal_before,
        retries=options.retries,
    )
    text = script(job)
    note(f"{config.run.name}: {shape}")
    if min(shape.ranks) < shape.most_ranks:
        note(f"SLURM gives equal nodes: each has room for {shape.most_ranks} ranks, also those with fewer")
    deliver(options, text, lambda text: note(submit(text)))
    return 0


def _pairs(option: str, texts: Sequence[str]) -> dict[str, str]:
    """Return the options of SLURM in `texts` by name, without dashes."""
    found = dict[str, str]()
    for text in texts:
        name, _, value = text.lstrip("-").partition("=")
        if not name:
            raise ConfigError(f"{option} {text!r} has no name; write NAME=VALUE, such as reservation=team")
        found[name] = value
    return found


def _time_limit(text: str) -> str:
    """Return the text; argparse.ArgumentTypeError unless SLURM takes it as a time limit."""
    if not re.fullmatch(r"(\d+-)?\d+(:\d\d){0,2}|UNLIMITED", text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no time limit of SLURM; write minutes, H:MM:SS, D-H:MM:SS or UNLIMITED"
        )
    return text

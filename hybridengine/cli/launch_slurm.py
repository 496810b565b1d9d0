"""`hybridengine launch slurm`: write a batch script for SLURM, or submit it."""

from __future__ import annotations

import argparse
import math
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence

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
from hybridengine.errors import ConfigError, shown
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
  hybridengine launch slurm CONFIG --python python --srun-option container-image=team/hybridengine:1 \\
      --srun-option container-mounts=/lustre:/lustre                             with pyxis, here below /lustre
"""
DIRECTIVES = ("time", "partition", "account", "qos", "constraint")
SIGNAL_BEFORE_S, LEAST_SIGNAL_BEFORE_S = 1800, 30
SET_HERE = {
    "nodes": "cluster.ranks_per_node and --gpus-per-node",
    "ntasks": "cluster.ranks_per_node",
    "ntasks-per-node": "one process, which starts the ranks",
    "cpus-per-task": "--cpus-per-node",
    "array": "the run, which one job at a time carries out",
    "wrap": "the run, which this script carries out",
    "signal": "--signal-before",
    "requeue": "--retries",
    "no-requeue": "--retries 0",
    **{name: f"--{name}" for name in (*DIRECTIVES, "mem", "job-name")},
}
"""Options of sbatch that this command writes itself, and what they follow from."""
SET_IN_STEP = {name: SET_HERE[name] for name in ("nodes", "ntasks", "ntasks-per-node", "cpus-per-task")} | {
    "output": "run.folder, below which each node has a log"
}
"""Options of srun that this command writes itself, and what they follow from."""
TIME_LIMIT = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d\d))?(?::(\d\d))?")
MEMORY_SIZE = re.compile(r"\d+([KMGT]B?)?", re.IGNORECASE)


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
    option("--mem", type=_memory_size, metavar="SIZE",
           help="memory of each node, such as 500G (default: all of it)")  # fmt: skip
    option("--job-name", metavar="NAME", help="name of the job and of its log (default: run.name)")
    option("--shared", action="store_true", help="accept nodes that other jobs use as well; needs --mem")
    option("--signal-before", type=between(LEAST_SIGNAL_BEFORE_S, 65_535), metavar="SECONDS",
           help="time before the limit at which the run is asked to end its step and save it; more than the longest"
           " time/step_s with an evaluation, and a save. A run that is late loses the steps after its last checkpoint"
           f" (default: {SIGNAL_BEFORE_S}, at most half of --time)")  # fmt: skip
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
    shape = shape_of(config, options.gpus_per_node, options.cpus_per_node)
    given = {name: value for name in DIRECTIVES if (value := getattr(options, name))}
    further = _pairs("--sbatch-option", options.sbatch_option)
    in_step = _pairs("--srun-option", options.srun_option)
    for option, names, set_here in (
        ("--sbatch-option", further, SET_HERE),
        ("--srun-option", in_step, SET_IN_STEP),
    ):
        for name in names:
            if name in set_here:
                raise ConfigError(
                    f"{option} {name} is set by this command, from {set_here[name]}; change that instead"
                )
    if options.setup:
        _check_setup(options.setup)
    name = options.job_name or config.run.name
    if "/" in name:
        raise ConfigError(f"--job-name {name} has a slash, and the log is named after it; write it without")
    folder = os.path.abspath(options.folder)
    _check_folder(folder, options.config, setup=options.setup)
    job = SlurmJob(
        name=name,
        shape=shape,
        run_folder=str(config.run_folder),
        folder=folder,
        python=options.python,
        arguments=["launch", "node", options.config, *options.overrides, *node_options(options)],
        setup=options.setup,
        exclusive=not options.shared,
        directives=given | _memory(options, further) | further,
        step_options=in_step,
        cpus_per_node=options.cpus_per_node or (shape.default_cpus if options.shared else None),
        signal_before_s=_signal_before_s(options.time, options.signal_before),
        retries=options.retries,
    )
    text = script(job)
    note(f"{config.run.name}: {shape}")
    if min(shape.ranks) < shape.most_ranks:
        note(f"SLURM gives equal nodes: each has room for {shape.most_ranks} ranks, also those with fewer")
    deliver(options, text, lambda text: note(submit(text)))
    return 0


def _check_setup(commands: str) -> None:
    """Raise ConfigError if bash cannot read the commands."""
    checked = subprocess.run(["bash", "-n"], input=commands, capture_output=True, text=True, check=False)
    if checked.returncode:
        raise ConfigError(f"--setup {shown(commands)} is not valid: {checked.stderr.strip()}; correct it")


def _check_folder(folder: str, config: str, *, setup: str) -> None:
    """Raise ConfigError if nodes that start in a folder will not find the configuration; warn where that is unknown."""
    file = os.path.join(folder, config)
    if os.path.exists(file):
        return
    # Nodes may have a folder that is not here, and the commands of --setup may write the file.
    if not os.path.isdir(folder) or setup:
        note(f"{file}, which the nodes will read, is not on this machine; see that it is on theirs")
        return
    raise ConfigError(
        f"--folder {folder} does not have {config}, which nodes read there; write the absolute path of the"
        " configuration, or its path in that folder"
    )


def _pairs(option: str, texts: Sequence[str]) -> dict[str, str]:
    """Return the options of SLURM in `texts` by name, without dashes."""
    found = dict[str, str]()
    for text in texts:
        name, _, value = text.lstrip("-").partition("=")
        if not name:
            raise ConfigError(f"{option} {text!r} has no name; write NAME=VALUE, such as reservation=team")
        if len(name) == 1:
            raise ConfigError(
                f"{option} {text!r} has the short name of an option; write the long one, such as nodes for N"
            )
        found[name] = value
    return found


def _memory(options: argparse.Namespace, further: Mapping[str, str]) -> dict[str, str]:
    """Return the directive for memory, unless `further` has one of another kind."""
    if any(name.startswith("mem-per-") for name in further) and options.mem is None:
        return {}
    if options.shared and options.mem in (None, "0"):
        raise ConfigError(
            "--shared without --mem would ask for all memory of each node, which leaves none to other jobs; add --mem"
            " SIZE, such as 500G"
        )
    return {"mem": options.mem or "0"}


def _signal_before_s(limit: str, given: int | None) -> int:
    """Return the seconds before a time limit of SLURM at which the run is asked to save its step.

    Raises:
        ConfigError: they are not less than the limit.
    """
    limit_s = _seconds(limit)
    seconds = given or max(LEAST_SIGNAL_BEFORE_S, int(min(SIGNAL_BEFORE_S, limit_s / 2)))
    if seconds >= limit_s:
        raise ConfigError(
            f"--signal-before {seconds} is not less than --time {limit}, {limit_s:g} s, so that each start would be"
            " stopped at once; lower the one or raise the other"
        )
    return seconds


def _seconds(limit: str) -> float:
    """Return the seconds of a time limit as SLURM reads it; infinite for UNLIMITED and 0.

    Source: sbatch(1), --time: minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes,
    days-hours:minutes:seconds.
    """
    match = TIME_LIMIT.fullmatch(limit)
    if match is None:
        return math.inf
    days, *fields = (None if field is None else int(field) for field in match.groups())
    first, *rest = (field for field in fields if field is not None)
    if days is None and len(rest) < 2:  # minutes come first
        return (60 * first + (rest[0] if rest else 0)) or math.inf
    minutes, seconds = [*rest, 0, 0][:2]
    return (86_400 * (days or 0) + 3600 * first + 60 * minutes + seconds) or math.inf


def _memory_size(text: str) -> str:
    """Return the text; argparse.ArgumentTypeError unless SLURM takes it as a size of memory."""
    if not MEMORY_SIZE.fullmatch(text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no size of memory of SLURM; write megabytes, or a number with K, M, G or T, such as 500G"
        )
    return text


def _time_limit(text: str) -> str:
    """Return the text; argparse.ArgumentTypeError unless SLURM takes it as a time limit."""
    if text != "UNLIMITED" and not TIME_LIMIT.fullmatch(text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no time limit of SLURM; write minutes, H:MM:SS, D-H:MM:SS or UNLIMITED"
        )
    return text

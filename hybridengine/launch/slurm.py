"""Batch scripts of SLURM: every node of the job runs `hybridengine launch node`."""

from __future__ import annotations

import itertools
import os
import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hybridengine.errors import ConfigError, shown
from hybridengine.launch.meeting import END, LOST, STOP, TOKEN
from hybridengine.launch.node import NODE_LOST
from hybridengine.launch.shape import Shape

SUBMIT_LIMIT_S = 120.0

SCRIPT = """#!/bin/bash
# {name}: {shape}.
# Written by `hybridengine launch slurm`; submit it with sbatch.
{directives}

cd {folder} || exit 2
{setup}launch={run_folder}/launch/$SLURM_JOB_ID.${{SLURM_RESTART_COUNT:-0}}
mkdir -p -m 700 "$launch" || exit 2
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | paste -sd, -)
echo "$(date +%FT%T) job $SLURM_JOB_ID, start $((${{SLURM_RESTART_COUNT:-0}} + 1)), on $hosts; logs in $launch"

# A container (pyxis) would start in the folder of its image.
srun --kill-on-bad-exit=0 --wait=0 --cpu-bind=none --input=none --output="$launch/%N.log" --open-mode=append{srun} \\
  env --chdir={folder} {command} \\
  --hosts "$hosts" --launch-folder "$launch" &
step=$!

# SLURM does not answer while its controller is busy, or another one takes its place.
insist() {{
  local pause
  for pause in 1 2 4 8 16 32 64 128; do
    "$@" && return
    sleep "$pause"
  done
  "$@"
}}
show() {{ insist squeue --noheader --job "$SLURM_JOB_ID" --format="$1"; }}

# Start again on nodes that SLURM chooses, from the last checkpoint.
start_again() {{
  if [ "${{SLURM_RESTART_COUNT:-0}}" -ge {retries} ]; then
    echo "$(date +%FT%T) not requeued: --retries {retries} is used up; submit the script again"
    return
  fi
  trap '' TERM # which SLURM sends to the processes of a requeued job
  if ! insist scontrol requeue "$SLURM_JOB_ID"; then
    echo "$(date +%FT%T) not requeued: scontrol has failed; submit the script again"
    return
  fi
  echo "$(date +%FT%T) requeued"
  [ ! -s "$launch/{lost}" ] || exclude_lost
  sleep 60
}}

# Exclude nodes that have left Ray, which SLURM may still take for healthy, unless this job could not start on the others:
# it would wait for ever.
exclude_lost() {{
  local before excluded option value said options=()
  before=$(show %x | sed 's/(null)//')
  excluded=$(scontrol show hostnames "${{before:+$before,}}$(paste -sd, "$launch/{lost}")" | paste -sd,)
  for option in account=%a constraint=%f nodelist=%n partition=%P qos=%q reservation=%v time=%l; do
    value=$(show "${{option#*=}}")
    [ "${{value:-(null)}}" = "(null)" ] || options+=("--${{option%%=*}}=$value")
  done
  if said=$(unset "${{!SBATCH_@}}"; sbatch --test-only --exclude="$excluded" "${{options[@]}}" "$0" 2>&1); then
    scontrol update JobId="$SLURM_JOB_ID" ExcNodeList="$excluded" \\
      && echo "$(date +%FT%T) excluded from the next start: $excluded"
  else
    echo "$(date +%FT%T) not excluded from the next start: $excluded, as SLURM starts no job without: $said"
  fi
}}

# SLURM signals this script alone, before the time limit. A file tells the first node, and the run saves its step: SLURM
# would signal each process of the nodes, and srun would kill them. At the limit it signals all, and kills them soon.
signals=0 requeue=0
trap 'signals=$((signals + 1)); requeue=1; touch "$launch/{stop}"' TERM
trap 'signals=$((signals + 1)); requeue=0; trap "" TERM; touch "$launch/{stop}"' USR1
while :; do
  before=$signals
  wait "$step"
  status=$?
  [ "$status" -eq 0 ] || [ "$(show %T)" != COMPLETING ] || rm -f "$launch/{token}" # the node may be killed first
  if [ "$requeue" -eq 1 ] && [ "$(show %r)" = TimeLimit ]; then
    echo "$(date +%FT%T) the time limit came before the step was saved; raise --signal-before"
    start_again
    exit "$status"
  fi
  [ "$before" -eq "$signals" ] && break
done
# The status of srun is the largest of all nodes: 137 if one was killed. The first node writes that of the run.
status=$(sed -nE 's/^[{{]"status": ([0-9]+),.*/\\1/p' "$launch/{end}" 2> /dev/null | grep . || echo "$status")
echo "$(date +%FT%T) the run has ended with status $status"
[ "$status" -eq 0 ] || tail -n 20 "$launch/${{hosts%%,*}}.log"

# The nodes have had a signal that this script has not: SLURM takes them for another job, and gives the run time to save.
[ "$signals" -gt 0 ] || ! grep -q '"asked": true' "$launch/{end}" 2> /dev/null || requeue=1
# Not if the user has cancelled the job.
if [ "$requeue" -eq 1 ] || [ "$status" -eq {node_lost} ]; then
  case $(show %T) in
    RUNNING | SIGNALING) start_again ;;
    *) echo "$(date +%FT%T) not requeued: SLURM ends the job, or does not answer" ;;
  esac
fi
exit "$status"
"""


@dataclass(frozen=True)
class SlurmJob:
    """What a batch script says besides the run."""

    name: str
    shape: Shape
    run_folder: str
    folder: str
    """Folder in which all nodes start; an absolute path."""
    python: str
    """Python of the installation."""
    arguments: Sequence[str]
    """Arguments of `hybridengine` on every node, but for hosts and the folder of the launch."""
    setup: str
    """Shell commands carried out first; empty for none."""
    exclusive: bool
    directives: Mapping[str, str]
    """Further options of sbatch, by long name; an empty value is a flag."""
    step_options: Mapping[str, str]
    """Further options of srun, by long name."""
    cpus_per_node: int | None
    signal_before_s: int
    """Seconds before the time limit at which the run is asked to save its step."""
    retries: int
    """Starts after the first one."""


def script(job: SlurmJob) -> str:
    """Return the batch script of a job.

    Raises:
        ConfigError: a value has a character that would end a directive, or that SLURM takes out of it.
    """
    directives = {
        "job-name": job.name,
        "nodes": str(job.shape.num_nodes),
        "ntasks-per-node": "1",
        **({"cpus-per-task": str(job.cpus_per_node)} if job.cpus_per_node else {}),
        **({"gpus-per-node": str(job.shape.num_gpus)} if job.shape.num_gpus else {}),
        **({"exclusive": ""} if job.exclusive else {}),
        "requeue": "",
        "open-mode": "append",
        "output": "slurm-%x-%j.log",
        "signal": f"B:TERM@{job.signal_before_s}",
        **job.directives,
    }
    steps = {**({"cpus-per-task": str(job.cpus_per_node)} if job.cpus_per_node else {}), **job.step_options}
    for name, value in [*directives.items(), *steps.items()]:
        if name != shlex.quote(name) or re.search(r"""[\s#"'\\]""", value):
            raise ConfigError(
                f"--{name} {shown(value)} has blanks, line breaks, quotes, # or \\, which SLURM does not take as a part"
                " of an option; write it without"
            )
    return SCRIPT.format(
        name=job.name,
        shape=job.shape,
        directives="\n".join(f"#SBATCH {_option(*item)}" for item in directives.items()),
        folder=shlex.quote(job.folder),
        setup=f"{{\n{job.setup}\n}} || exit 2\n" if job.setup else "",  # it may end in a comment
        run_folder=shlex.quote(os.path.join(job.folder, job.run_folder)),
        srun="".join(f" {shlex.quote(_option(*item))}" for item in steps.items()),
        command=shlex.join([job.python, "-m", "hybridengine.cli.main", *job.arguments]),
        node_lost=NODE_LOST,
        end=END,
        stop=STOP,
        token=TOKEN,
        lost=LOST,
        retries=job.retries,
    )


def submit(text: str) -> str:
    """Submit a batch script, and return what sbatch says; raise ConfigError if it refuses.

    Its directives are arguments as well, since variables of the shell (SBATCH_PARTITION) would replace directives.
    """
    header = itertools.takewhile(lambda line: line.startswith("#"), text.splitlines())
    options = [line.removeprefix("#SBATCH ") for line in header if line.startswith("#SBATCH ")]
    remedy = "submit the script where SLURM's commands are"
    return run_program(["sbatch", *options], text, "SLURM's sbatch", remedy)


def run_program(command: Sequence[str], text: str, program: str, remedy: str) -> str:
    """Return the output of a scheduler's program that reads `text`; raise ConfigError if it is missing or refuses."""
    try:
        done = subprocess.run(
            command, input=text, capture_output=True, text=True, timeout=SUBMIT_LIMIT_S, check=False
        )
    except FileNotFoundError:
        raise ConfigError(
            f"{program} is not installed on this machine; {remedy}, written with --output FILE"
        ) from None
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"{program} has not answered within {SUBMIT_LIMIT_S:g} s; see whether the scheduler runs"
        ) from None
    if done.returncode:
        said = done.stderr.strip() or done.stdout.strip() or f"status {done.returncode}"
        raise ConfigError(f"{program} refuses the job: {said}; correct the options, or the cluster")
    return done.stdout.strip()


def _option(name: str, value: str) -> str:
    return f"--{name}={value}" if value else f"--{name}"

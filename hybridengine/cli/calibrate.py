"""`hybridengine calibrate`: measure this machine, fit the cost model to it, and write a cluster file."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import yaml

from hybridengine.bench.calibration.check import check_lines, check_run
from hybridengine.bench.calibration.fitting import MeasuredRun, fit
from hybridengine.bench.calibration.measured_run import read_run
from hybridengine.cli.options import between
from hybridengine.cli.outputs import check_outputs, progress_printer, write_outputs
from hybridengine.cli.run_request import CALIBRATED
from hybridengine.errors import ConfigError
from hybridengine.machine import num_gpus
from hybridengine.planning.costs.clusters import Cluster
from hybridengine.temporary import temporary_folder

DEFAULT_RANKS = 4

DESCRIPTION = """Measure the machine that this runs on, and write it as a cluster file for `plan` and `simulate`.

First what ranks can do by themselves: matrices, memory, links and empty calls. Then short runs of PPO with several
layouts, model sizes and batch sizes, to whose phases the coefficients of the cost model are fitted. `hybridengine plan
--check runs/NAME` then says how well the model predicts a run that it has not seen.

Takes some 20 minutes on two cores. Nothing else should run meanwhile."""

EPILOG = """examples:
  hybridengine calibrate                                          4 ranks on a CPU, one for each GPU
  hybridengine calibrate --out here.yaml --ranks 2
  hybridengine calibrate --runs runs/a runs/b runs/c              fit to existing runs instead"""


def add_options(parser: argparse.ArgumentParser) -> None:
    option, file, many = parser.add_argument, Path(CALIBRATED), between(1, 64)
    option("--out", type=Path, default=file, metavar="FILE", help="cluster file to write, which plan reads")
    option("--ranks", type=many, metavar="N", help=f"ranks (default {DEFAULT_RANKS}, or one per GPU)")
    option("--runs", nargs="+", metavar="FOLDER", help="fit to these runs instead of short runs of its own")


def run(options: argparse.Namespace) -> int:
    gpus = num_gpus()
    ranks = options.ranks if options.ranks is not None else gpus or DEFAULT_RANKS
    if gpus and ranks > gpus:
        raise ConfigError(f"--ranks {ranks} is more than the {gpus} GPUs; choose another number")
    check_outputs({"--out": options.out}, {})
    runs = [read_run(folder) for folder in options.runs or ()]
    say = progress_printer()
    say(f"measuring {ranks} ranks: matrices, memory, links")
    from hybridengine.bench.calibration.machine_rates import measured_cluster

    cluster = measured_cluster(ranks, bool(gpus))
    runs = runs or list(_measured_runs(ranks, bool(gpus), say))
    say(f"fitting coefficients to {len(runs)} runs")
    cluster = fit(cluster, runs)
    for line in check_lines(runs, [check_run(run, cluster) for run in runs], cluster):
        print(line)
    write_outputs({"--out": (options.out, cluster_text(cluster))})
    print(f"written: {options.out}")
    return 0


def _measured_runs(ranks: int, on_gpus: bool, say: Callable[[str], None]) -> Iterator[MeasuredRun]:
    """Carry out the runs of all cases and yield their measurements; their folders are removed."""
    from hybridengine.bench.calibration.cases import case_configs, cases_for
    from hybridengine.training.run import train

    cases, dtype = cases_for(ranks, on_gpus), "bfloat16" if on_gpus else "float32"
    for number, case in enumerate(cases, start=1):
        say(f"case {number} of {len(cases)}: {case.name}")
        with temporary_folder("calibrate") as folder:
            for config in case_configs(case, ranks, dtype, folder):
                train(config)
                yield read_run(config.run_folder)


def cluster_text(cluster: Cluster) -> str:
    """Return the text of the cluster file."""
    head = (
        "# Written by `hybridengine calibrate`: rates are measured, the coefficients of compute are fitted.\n"
    )
    rounded = json.loads(
        cluster.model_dump_json(exclude_none=True), parse_float=lambda text: float(f"{float(text):.4g}")
    )
    return head + yaml.safe_dump(rounded, sort_keys=False, width=110)

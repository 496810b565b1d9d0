"""`hybridengine calibrate`: measure this machine, fit the cost model to it, and write a cluster file."""

from __future__ import annotations

import argparse
import json
import os
import platform
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from hybridengine.bench.calibration.check import check_lines, check_run
from hybridengine.bench.calibration.fitting import MeasuredRun, fit
from hybridengine.bench.calibration.measured_run import read_run
from hybridengine.bench.machine import num_gpus
from hybridengine.cli.options import between
from hybridengine.cli.outputs import check_outputs, progress_printer, write_outputs
from hybridengine.cli.run_request import CALIBRATED
from hybridengine.errors import ConfigError
from hybridengine.planning.costs.clusters import Cluster
from hybridengine.temporary import temporary_folder

DEFAULT_RANKS = 4
"""Default number of ranks on a CPU."""
MOST_RANKS = 64

DESCRIPTION = """Measure the machine that this runs on, and write it as a cluster file for `plan` and `simulate`.

First what ranks can do by themselves: matrices, memory, links, empty calls, each by one rank alone and by all at the same
time. Then short runs of PPO, Megatron-core, vLLM and all, with several layouts, model sizes and batch sizes; the
coefficients of the cost model are fitted to what their phases take. How well they fit is printed, as by `plan --check`.
`hybridengine plan --check runs/NAME` then says how well the model predicts a run that it has not seen.

Takes some 20 minutes on two cores. Nothing else should run meanwhile."""

EPILOG = """examples:
  hybridengine calibrate                                          4 ranks on a CPU, one for each GPU
  hybridengine calibrate --out here.yaml --ranks 2
  hybridengine calibrate --runs runs/a runs/b runs/c              fit to runs of yours instead"""


def add_calibrate_command(subparsers: Any) -> None:
    """Add `calibrate` to the commands of `hybridengine`."""
    parser = subparsers.add_parser(
        "calibrate",
        help="measure this machine and fit the planner's cost model to it",
        description=DESCRIPTION,
        epilog=EPILOG,
    )

    option = parser.add_argument
    option(
        "--out",
        type=Path,
        default=Path(CALIBRATED),
        metavar="FILE",
        help=f"cluster file to write (default {CALIBRATED}, which plan and simulate read by default)",
    )
    option(
        "--ranks",
        type=between(1, MOST_RANKS),
        metavar="N",
        help=f"ranks (default: {DEFAULT_RANKS}, or as many as there are GPUs)",
    )
    option("--runs", nargs="+", metavar="FOLDER", help="fit to these runs instead of short runs of its own")
    parser.set_defaults(run=run_calibrate)


def run_calibrate(options: argparse.Namespace) -> int:
    """Carry out the command; return the exit status."""
    gpus = num_gpus()
    ranks = options.ranks if options.ranks is not None else gpus or DEFAULT_RANKS
    if gpus and ranks > gpus:
        raise ConfigError(f"--ranks {ranks} is more than the {gpus} GPUs; choose another number")
    check_outputs({"--out": options.out}, {})
    runs = [read_run(folder) for folder in options.runs or ()]
    # Megatron-core warns for every GPU package that is not installed; on a machine without a GPU that is expected.
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")
    say = progress_printer()
    say(f"measuring {ranks} ranks: matrices, memory, links")
    cluster = _measured_cluster(ranks, bool(gpus))
    runs = runs or list(_measured_runs(ranks, bool(gpus), say))
    say(f"fitting coefficients to {len(runs)} runs")
    cluster = fit(cluster, runs)
    for line in check_lines(runs, [check_run(run, cluster) for run in runs], cluster):
        print(line)
    write_outputs({"--out": (options.out, cluster_text(cluster))})
    print(f"written: {options.out}")
    return 0


def _measured_cluster(ranks: int, on_gpus: bool) -> Cluster:
    """Return the machine as a cluster with measured rates and unfitted coefficients."""
    import torch

    from hybridengine.backends.vllm.environment import rank_environment
    from hybridengine.bench.calibration.machine_rates import measure_machine
    from hybridengine.controller.cluster import start_ray
    from hybridengine.controller.pool import ResourcePool

    start_ray(num_cpus=ranks)
    dtypes = ("bfloat16", "float32") if on_gpus else ("float32", "bfloat16")
    with ResourcePool([ranks], use_gpus=on_gpus, env=rank_environment(use_gpus=on_gpus)) as pool:
        rates = measure_machine(pool, ranks, dtypes)
    host_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    memory = torch.cuda.get_device_properties(0).total_memory if on_gpus else host_bytes // ranks
    machine = f"{ranks} GPUs" if on_gpus else f"{os.cpu_count()} cores of {platform.machine()}"
    return Cluster.model_validate(
        {
            "name": f"{machine}, {ranks} ranks",
            "source": f"Measured by hybridengine calibrate with {ranks} ranks on {machine}.",
            "nodes": 1,
            "devices_per_node": ranks,
            "device_memory_bytes": memory,
            "links": rates["links"],
            "compute": rates["compute"] | {"kv_block_tokens": 16 if on_gpus else 128},
        }
    )


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

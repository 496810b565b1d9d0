"""`hybridengine calibrate`: measure this machine, fit the cost model to it, and write both as a cluster file."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import platform
import statistics
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from hybridengine.bench.machine import num_gpus
from hybridengine.cli.figure_tables import aligned
from hybridengine.cli.options import DTYPES, add_json_option, between, byte_size
from hybridengine.cli.outputs import check_outputs, emit, progress_printer
from hybridengine.cli.run_request import CALIBRATED
from hybridengine.errors import ConfigError
from hybridengine.metrics.formatting import format_seconds
from hybridengine.metrics.measured_run import read_run
from hybridengine.planning.clusters import Cluster
from hybridengine.planning.fitting import LIGHT_SHARE, RANGES, Fit, Observation, fit
from hybridengine.temporary import temporary_folder

DEFAULT_RANKS = 4
"""On a CPU."""
MOST_RANKS = 64
DIGITS = 4

DESCRIPTION = """Measure the machine that this runs on, and write it as a cluster file for `plan` and `simulate`.

First what ranks can do by themselves: matrices, memory, links, empty calls, each by one rank alone and by all at the same
time. Then steps of PPO on real ranks, Megatron-core, vLLM and all, with several layouts, model sizes and batch sizes; the
coefficients of the cost model are fitted to what their phases take. How well they fit is printed, and --json has every
phase. `hybridengine plan --check runs/NAME` then says how well the model predicts a run that it has not seen.

Takes about nine minutes on two cores. Nothing else should run meanwhile."""

EPILOG = """examples:
  hybridengine calibrate                                          4 ranks on a CPU, one for each GPU
  hybridengine calibrate --out here.yaml --ranks 2 --json fit.json
  hybridengine calibrate --runs runs/a runs/b                     fit to runs of yours instead"""


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
    option("--dtype", choices=DTYPES, help="of the weights (default: float32 on a CPU, bfloat16 on GPUs)")
    option(
        "--memory",
        type=byte_size,
        metavar="BYTES",
        help="memory of a device (default: the host's over its ranks, or the GPU's)",
    )
    option("--name", metavar="TEXT", help="what people call the machine")
    option("--runs", nargs="+", metavar="FOLDER", help="fit to these runs instead of measuring steps")
    add_json_option(parser)
    parser.set_defaults(run=run_calibrate)


def run_calibrate(options: argparse.Namespace) -> int:
    """Carry out the command; returns the exit status."""
    gpus = num_gpus()
    ranks = options.ranks if options.ranks is not None else gpus or DEFAULT_RANKS
    if gpus and ranks > gpus:
        raise ConfigError(f"--ranks {ranks} is more than the {gpus} GPUs; choose another number")
    dtype = options.dtype or ("bfloat16" if gpus else "float32")
    check_outputs({"--out": options.out, "--json": options.json}, {})
    runs = [_observed(folder) for folder in options.runs or ()]
    # Megatron-core warns for every GPU package that is not installed; on a machine without a GPU that is expected.
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")
    say = progress_printer()
    machine = _measured_cluster(ranks, dtype, options.memory, options.name, bool(gpus), say)
    observations = runs or list(_steps(ranks, dtype, bool(gpus), say))
    say(f"fitting {len(RANGES)} coefficients to {sum(len(one.phases_s) for one in observations)} phases")
    found = fit(machine, observations, lambda deviation: None)
    emit(options, fit_json(found), fit_lines(found), {"--out": (options.out, cluster_text(found.cluster))})
    return 0


def _observed(folder: str) -> Observation:
    run = read_run(folder)
    return Observation(
        folder, run.config, run.workload, run.phases_s, run.step_s, run.memory_bytes.get("resident_bytes", 0)
    )


def _measured_cluster(
    ranks: int, dtype: str, memory: int | None, name: str | None, on_gpus: bool, say: Callable[[str], None]
) -> Cluster:
    """What the ranks can do by themselves, as a cluster whose coefficients are still to be fitted."""
    from hybridengine.backends.vllm.environment import rank_environment
    from hybridengine.bench.machine_rates import measure_machine
    from hybridengine.controller.cluster import start_ray
    from hybridengine.controller.pool import ResourcePool

    say(f"measuring {ranks} ranks: matrices, memory, links")
    start_ray(num_cpus=ranks)
    env = rank_environment(use_gpus=on_gpus)
    with ResourcePool([ranks], use_gpus=on_gpus, env=env) as pool:
        rates = measure_machine(pool, ranks, tuple(sorted({dtype, *DTYPES}, key=lambda one: one != dtype)))
    say(
        f"  {dtype} matrices {rates.flops_per_s[dtype] / 1e9:,.0f} GFLOP/s, memory {rates.memory_bytes_per_s / 1e9:.1f}"
        f" GB/s (all ranks {rates.memory_node_bytes_per_s / 1e9:.1f}), links {rates.link_bytes_per_s / 1e9:.2f} GB/s (all"
        f" pairs {rates.link_node_bytes_per_s / 1e9:.2f}) and {rates.link_latency_s * 1e6:.0f} us, an empty call"
        f" {rates.call_s * 1e3:.1f} ms"
        + (f"; {rates.devices_at_once} ranks work at a time" if rates.devices_at_once else "")
    )
    shared = rates.devices_at_once is not None
    link = {
        "bytes_per_s": rates.link_bytes_per_s,
        "node_bytes_per_s": max(rates.link_bytes_per_s, rates.link_node_bytes_per_s) if shared else None,
        "latency_s": rates.link_latency_s,
    }
    values = {
        "name": name or f"{_machine()}, {ranks} ranks",
        "source": f"Measured by hybridengine calibrate with {ranks} ranks on {_machine()}.",
        "nodes": 1,
        "devices_per_node": ranks,
        "device_memory_bytes": memory or _device_bytes(ranks, on_gpus),
        "links": {
            "same_device": {
                "bytes_per_s": rates.memory_bytes_per_s,
                "node_bytes_per_s": (
                    max(rates.memory_bytes_per_s, rates.memory_node_bytes_per_s) if shared else None
                ),
                "latency_s": 10e-6,
            },
            "same_node": link,
            "host": {"bytes_per_s": rates.memory_bytes_per_s, "latency_s": 10e-6},
        },
        "compute": {
            "flops_per_s": rates.flops_per_s,
            "devices_at_once": rates.devices_at_once,
            "call_s": rates.call_s,
            "kv_block_tokens": 16 if on_gpus else 128,
        },
    }
    return Cluster.model_validate(values)


def _machine() -> str:
    gpus = num_gpus()
    if gpus:
        return f"{gpus} GPUs"
    names = [line for line in _cpuinfo() if line.startswith("model name")]
    model = " ".join(names[0].partition(":")[2].split()) if names else platform.machine()
    return f"{os.cpu_count()} cores of {model}"


def _cpuinfo() -> list[str]:
    with contextlib.suppress(OSError):
        return Path("/proc/cpuinfo").read_text().splitlines()
    return []


def _device_bytes(ranks: int, on_gpus: bool) -> int:
    if on_gpus:
        import torch

        return int(torch.cuda.get_device_properties(0).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks


def _steps(ranks: int, dtype: str, on_gpus: bool, say: Callable[[str], None]) -> Iterator[Observation]:
    """Steps of all cases, in a folder that goes afterwards."""
    from hybridengine.bench.calibration import case_config, cases_for, observe
    from hybridengine.training.files import claim_run, prepare_files

    cases = cases_for(ranks, on_gpus)
    with temporary_folder("calibrate") as folder:
        for number, case in enumerate(cases, start=1):
            config, _ = claim_run(case_config(case, ranks, dtype, folder, number))
            files = prepare_files(config)
            say(
                f"case {number} of {len(cases)}, {case.name}: actor {config.actor.parallel} and {config.actor.generate},"
                f" critic {config.critic.parallel}, reference {config.reference.parallel}"
            )
            yield from observe(config, case.batch_sizes, files.stop_token_ids, say)


def fit_lines(found: Fit) -> Iterator[str]:
    """How well the model fits, a line for each observation."""
    rows = [["", "step measured", "fitted", "worst phase (of those that take 2 % of the step)"]]
    for step in found.steps:
        phases = [
            one
            for one in found.deviations
            if one.observation == step.observation and one.measured_s >= LIGHT_SHARE * step.measured_s
        ]
        worst = max(phases, key=lambda one: abs(math.log(one.ratio)))
        rows.append(
            [
                f"  {step.observation}",
                format_seconds(step.measured_s),
                f"{step.ratio - 1:+.0%}",
                f"{worst.phase} {worst.ratio - 1:+.0%} of {format_seconds(worst.measured_s)}",
            ]
        )
    yield from aligned(rows)
    deviations = fit_errors(found)
    yield (
        f"error of the fit: phases {deviations['phase_median']:.0%} (median), {deviations['phase_90']:.0%} (nine of ten"
        f" are below), steps {deviations['step_median']:.0%}, at most {deviations['step_most']:.0%}"
    )


def fit_errors(found: Fit) -> dict[str, float]:
    """Absolute deviations: of phases that take 2 % of their step, and of steps."""
    steps = {step.observation: step for step in found.steps}
    phases = sorted(
        abs(one.ratio - 1)
        for one in found.deviations
        if one.measured_s >= LIGHT_SHARE * steps[one.observation].measured_s
    )
    ratios = [abs(step.ratio - 1) for step in found.steps]
    return {
        "phase_median": statistics.median(phases),
        "phase_90": phases[int(0.9 * (len(phases) - 1))],
        "step_median": statistics.median(ratios),
        "step_most": max(ratios),
    }


def fit_json(found: Fit) -> dict[str, Any]:
    """Everything for programs. Units: seconds."""
    return {
        "cluster": found.cluster.model_dump(mode="json", exclude_none=True),
        "errors": fit_errors(found),
        "steps": [_deviation_json(one) for one in found.steps],
        "phases": [_deviation_json(one) for one in found.deviations],
    }


def _deviation_json(one: Any) -> dict[str, Any]:
    return {
        "observation": one.observation,
        "phase": one.phase,
        "measured_s": one.measured_s,
        "fitted_s": one.predicted_s,
    }


def cluster_text(cluster: Cluster) -> str:
    """The cluster as a file."""
    head = (
        "# Written by `hybridengine calibrate`: rates are measured, the coefficients of compute are fitted.\n"
    )
    values = _rounded(cluster.model_dump(mode="json", exclude_none=True))
    return head + yaml.safe_dump(values, sort_keys=False, width=110)


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    if isinstance(value, float) and value:
        return float(f"{value:.{DIGITS}g}")
    return value

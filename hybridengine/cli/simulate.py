"""`hybridengine simulate`: simulate synchronous and asynchronous training, event by event. Starts nothing."""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from rich.console import Console
from rich.progress import track

from hybridengine.cli.options import add_json_option, between
from hybridengine.cli.outputs import check_outputs, emit
from hybridengine.cli.run_request import RunRequest, add_run_options, request_of
from hybridengine.errors import ConfigError
from hybridengine.figure_tables import table
from hybridengine.formatting import format_seconds
from hybridengine.planning.simulation.scenarios import Run, Scenarios, SteadyState, role_idle_shares
from hybridengine.planning.simulation.simulation import Outcome, simulate_asynchronous, simulate_synchronous

MOST_SIMULATED = 16
"""Largest number of divisions in a sweep; if there are more, evenly spaced ones are chosen."""
QUEUE_POINTS = 200
"""Approximate number of points of the queue over time in the JSON figures."""

T = TypeVar("T")

DESCRIPTION = """Simulate training, event by event: engines with continuous batching, the queue of complete responses, the
trainer, and new weights for the engines. Synchronous, where all devices generate and then train, beside asynchronous,
where some devices generate all the time and the others train; new weights arrive between two tokens, and no response is
begun that would be more than --staleness batches ahead of the trainer. Whose policy every token is from is known.

The same command gives the same run. Nothing is started; seconds come from the cluster file, as those of `plan`."""

EPILOG = """examples:
  # synchronous beside the best division of 128 devices between training and generation
  hybridengine simulate configs/llama3-70b-16nodes.yaml --cluster configs/clusters/a100-80gb-16x8.yaml \\
      --lengths lognormal:mean=400,cv=0.8 --plot runs.svg
  # every division, simulated beside the analytical model
  hybridengine simulate CONFIG --cluster FILE --staleness 4 --sweep --plot sweep.png
  # one division, with engines of these sizes
  hybridengine simulate CONFIG --cluster FILE --train-devices 48 --fix generate=1-4"""


def add_simulate_command(subparsers: Any) -> None:
    """Add `simulate` to the commands of `hybridengine`."""
    parser = subparsers.add_parser(
        "simulate",
        help="simulate synchronous and asynchronous training on a cluster; starts nothing",
        description=DESCRIPTION,
        epilog=EPILOG,
    )

    option = parser.add_argument
    add_run_options(parser)
    option(
        "--steps",
        type=between(1, 100_000),
        default=100,
        metavar="N",
        help="training steps to simulate (default 100)",
    )
    option(
        "--staleness",
        type=between(0, math.inf, float),
        default=4.0,
        metavar="ETA",
        help="batches that may be begun ahead of the trainer (default 4; inf for no bound)",
    )
    option(
        "--train-devices",
        type=between(1, 2**31),
        metavar="N",
        help="devices that train (default: the analytical model's best)",
    )
    parser.add_argument("--sweep", action="store_true", help="simulate every division")
    option(
        "--seed", type=between(0, 2**32 - 1), default=0, metavar="N", help="seed of the lengths (default 0)"
    )
    add_json_option(parser)
    option("--plot", type=Path, metavar="FILE", help="draw the runs (.png, .svg, .pdf)")
    parser.set_defaults(run=run_simulate, placement=None)


def run_simulate(options: argparse.Namespace) -> int:
    """Carry out the command; return the exit status."""
    request = request_of(options)
    scenarios = _scenarios(request, options)
    check_outputs(
        {"--json": options.json, "--plot": options.plot},
        {"CONFIG": options.config, "--cluster": options.cluster},
    )
    begin = time.perf_counter()
    synchronous = scenarios.synchronous()
    outcome = simulate_synchronous(synchronous.setting)
    chosen = track(
        _divisions(scenarios, options),
        "simulating",
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )
    sweep = [(run, state, simulate_asynchronous(run.setting)) for run, state in chosen]
    best = _best(sweep, options.staleness, lambda one: one[2].mean_staleness, lambda one: one[2].tokens_per_s)
    figures = {
        "algorithm": request.workload.algorithm,
        "cluster": request.cluster.name,
        "num_devices": request.num_devices,
        "lengths": request.workload.lengths.name,
        "num_steps": options.steps,
        "max_staleness": options.staleness if math.isfinite(options.staleness) else None,
        "seed": options.seed,
        "simulation_s": time.perf_counter() - begin,
        "synchronous": _figures(synchronous, outcome),
        "asynchronous": _division_figures(*best),
        "sweep": [_division_figures(*one) for one in sweep],
    }

    def draw(place: Path) -> None:
        from hybridengine.planning.simulation.simulate_chart import draw_runs

        title = f"{request.workload.algorithm} on {request.num_devices} devices of {request.cluster.name}, simulated"
        outcomes = {"synchronous": outcome, "asynchronous": best[2]}
        draw_runs(title, outcomes, sweep, options.staleness, place)

    emit(options, figures, _lines(request, figures, options.staleness), {"--plot": (options.plot, draw)})
    return 0


def _scenarios(request: RunRequest, options: argparse.Namespace) -> Scenarios:
    if options.sweep and options.train_devices is not None:
        raise ConfigError("--sweep simulates every division and --train-devices one; leave one of them out")
    if request.num_devices < 2:
        raise ConfigError(
            "one device cannot be divided between training and generation; give --devices or --nodes for more"
        )
    return Scenarios(
        request.workload,
        request.cluster,
        request.num_devices,
        request.constraints,
        num_steps=options.steps,
        max_staleness=options.staleness,
        seed=options.seed,
    )


def _divisions(scenarios: Scenarios, options: argparse.Namespace) -> list[tuple[Run, SteadyState]]:
    """Return the divisions that the options ask for, each with its steady state."""
    divisions, wanted = list(scenarios.divisions()), options.train_devices
    if wanted is not None and wanted not in divisions:
        raise ConfigError(
            f"--train-devices {wanted} must be a divisor of a node's devices or whole nodes, and leave whole engines of"
            f" {scenarios.engines.engine.sizes} (p_g-t_g) on the other devices; choose from {_some(divisions)}"
        )
    tried = divisions if wanted is None else [wanted]
    runs = [run for number in tried if (run := scenarios.asynchronous(number))]
    if not runs:
        fixed = f"relax --fix {' '.join(options.fix)}, " if options.fix else ""
        raise ConfigError(
            f"the models cannot train on any of {_some(tried)} devices beside engines; {fixed}give more devices, or"
            " offload and recompute"
        )
    found = [(run, scenarios.steady_state(run)) for run in runs]
    if not options.sweep:
        return [
            _best(found, options.staleness, lambda one: one[1].staleness, lambda one: one[1].tokens_per_s)
        ]
    chosen = {round(place) for place in np.linspace(0, len(found) - 1, min(len(found), MOST_SIMULATED))}
    return [found[place] for place in sorted(chosen)]


def _some(numbers: Sequence[int]) -> str:
    shown = [str(number) for number in numbers]
    return ", ".join(shown if len(shown) <= 12 else [*shown[:6], "...", *shown[-5:]])


def _best(
    found: Sequence[T], max_staleness: float, staleness: Callable[[T], float], rate: Callable[[T], float]
) -> T:
    """Return the fastest division within the staleness bound; if none is, the fastest of all."""
    young = [one for one in found if staleness(one) <= max_staleness]
    return max(young or found, key=rate)


RUN_COLUMNS = {
    "run": "",
    "tokens_per_s": "tokens/s",
    "step_s": "step",
    "train_idle_share": "trainer idle",
    "generate_idle_share": "engines idle",
    "staleness_mean": "staleness mean",
    "staleness_max": "most",
    "queue_max": "queue most",
}
"""Heading of each figure in the table of runs."""
SWEEP_COLUMNS = {
    "num_training": "train",
    "num_generating": "generate",
    "model_tokens_per_s": "tokens/s: model",
    "tokens_per_s": "simulated",
    "model_staleness": "ages while generated: model",
    "staleness_mean": "staleness: mean",
    "staleness_max": "most",
    "train_idle_share": "trainer idle",
    "generate_idle_share": "engines idle",
    "mark": "",
}
"""Heading of each figure in the table of divisions."""


def _lines(request: RunRequest, figures: dict[str, Any], max_staleness: float) -> Iterator[str]:
    workload = request.workload
    both = {name: figures[name] for name in ("synchronous", "asynchronous")}
    one, other = both.values()
    yield (
        f"run: {workload.algorithm} of {workload.num_prompts} prompts x {workload.samples_per_prompt},"
        f" {workload.prompt_tokens:g} tokens each, responses {workload.lengths}"
    )
    yield (
        f"cluster: {request.num_devices} devices of {request.cluster.name}; {figures['num_steps']} steps, staleness bound"
        f" {max_staleness:g}, seed {figures['seed']}, simulated in {figures['simulation_s']:.1f} s"
    )
    yield ""
    yield from table([{"run": name, **run} for name, run in both.items()], RUN_COLUMNS)
    if other["staleness_max"] > max_staleness:
        yield "(most: responses begun within the bound that took so long that others were trained on before them)"
    yield ""
    for name, run in both.items():
        yield (
            f"{name}: {run['num_training']} devices train, {run['num_generating']} generate: {run['num_engines']} engines"
            f" of {run['generate']} (p_g-t_g), up to {run['max_running']} responses each; new weights in"
            f" {format_seconds(run['update_s'])}; idle by role: "
            + ", ".join(f"{role} {share:.0%}" for role, share in run["role_idle_shares"].items())
        )
    yield f"asynchronous: {other['tokens_per_s'] / one['tokens_per_s']:.2f} times synchronous"
    yield ""
    yield "divisions of the devices, simulated beside the analytical model"
    rows = []
    for division in figures["sweep"]:
        is_best = division["num_training"] == other["num_training"]
        too_old = "too old" if division["staleness_mean"] > max_staleness else ""
        rows.append({**division, "mark": "best" if is_best else too_old})
    yield from table(rows, SWEEP_COLUMNS)


def _figures(run: Run, outcome: Outcome) -> dict[str, Any]:
    """Return the figures of a run as JSON values. Units: seconds, response tokens, optimizer steps."""
    moments, waiting = zip(*outcome.queue[:: 1 + len(outcome.queue) // QUEUE_POINTS], strict=True)
    return {
        "num_training": run.num_training,
        "num_generating": run.num_generating,
        "num_engines": run.setting.num_engines,
        "generate": str(run.engines.engine.sizes),
        "max_running": run.setting.max_running,
        "update_s": run.setting.update_s,
        "parallel": {option.model: str(option.sizes) for option in run.plan.pools[0].options},
        "seconds": outcome.seconds,
        "step_s": outcome.seconds / len(outcome.step_ends),
        "tokens_per_s": outcome.tokens_per_s,
        "train_idle_share": outcome.train_idle_share,
        "generate_idle_share": outcome.generate_idle_share,
        "role_idle_shares": role_idle_shares(run, outcome),
        "staleness_mean": outcome.mean_staleness,
        "staleness_max": outcome.largest_staleness,
        "staleness_tokens": {str(age): count for age, count in outcome.staleness_counts.items()},
        "queue_max": max(count for _, count in outcome.queue),
        "queue": {"seconds": moments, "responses": waiting},
    }


def _division_figures(run: Run, state: SteadyState, outcome: Outcome) -> dict[str, Any]:
    """Return the figures of a division, and those of the analytical model."""
    return {
        **_figures(run, outcome),
        "model_running": state.running,
        "model_tokens_per_s": state.tokens_per_s,
        "model_staleness": state.staleness,
    }

"""`hybridengine simulate`: synchronous and asynchronous training, event by event. Starts nothing."""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hybridengine.cli.figure_tables import cell, table
from hybridengine.cli.options import add_json_option, between
from hybridengine.cli.outputs import check_outputs, emit
from hybridengine.cli.run_request import RunRequest, add_run_options, request_of
from hybridengine.errors import ConfigError
from hybridengine.metrics.formatting import format_seconds
from hybridengine.planning.scenarios import Run, Scenarios, Split, role_idle_shares
from hybridengine.planning.simulation import Outcome, Setting, simulate

MOST_SIMULATED = 16
"""Divisions of a sweep; of more, evenly spaced ones."""

Divided = tuple[Split, Run, Outcome]

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
  # one division, engines that finish what they are generating before they take new weights
  hybridengine simulate CONFIG --cluster FILE --train-devices 48 --fix generate=1-4 --drain

reading it: tokens a second count responses that have been trained on. Idle engines wait for permission to begin (a tight
--staleness) or for weights; an idle trainer waits for responses. Staleness is counted in optimizer steps of whole
batches, from the policy that made a token to the one that trains on it."""


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
        type=int,
        metavar="N",
        help="devices that train (default: the analytical model's best)",
    )
    parser.add_argument("--sweep", action="store_true", help="simulate every division")
    parser.add_argument(
        "--drain", action="store_true", help="engines take new weights only between responses"
    )
    option("--seed", type=between(0, 2**63), default=0, metavar="N", help="of the lengths (default 0)")
    add_json_option(parser)
    option("--plot", type=Path, metavar="FILE", help="draw the runs (.png, .svg, .pdf)")
    parser.set_defaults(run=run_simulate, placement=None)


def run_simulate(options: argparse.Namespace) -> int:
    """Carry out the command; returns the exit status."""
    request = request_of(options)
    scenarios = _scenarios(request, options)
    check_outputs(
        {"--json": options.json, "--plot": options.plot},
        {"CONFIG": options.config, "--cluster": options.cluster},
    )
    begin = time.perf_counter()
    synchronous = scenarios.synchronous()
    outcome = simulate(synchronous.setting)
    sweep = list(_divided(scenarios, options))
    best = _best(sweep, options.staleness)
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
        from hybridengine.cli.simulate_chart import draw_runs

        title = f"{request.workload.algorithm} on {request.num_devices} devices of {request.cluster.name}, simulated"
        outcomes = {"synchronous": outcome, "asynchronous": best[2]}
        draw_runs(title, outcomes, sweep, options.staleness, place)

    lines = _lines(request, figures, best[1].setting, options)
    emit(options, figures, lines, {"--plot": (options.plot, draw)})
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
        drains=options.drain,
        seed=options.seed,
    )


def _divided(scenarios: Scenarios, options: argparse.Namespace) -> Iterator[Divided]:
    """The divisions that are asked for, each in its steady state and simulated."""
    divisions = list(scenarios.divisions())
    wanted = options.train_devices
    if wanted is not None and wanted not in divisions:
        raise ConfigError(
            f"--train-devices {wanted} must be a divisor of a node's devices or whole nodes, and leave whole engines of"
            f" {scenarios.engines.engine.sizes} (p_g-t_g) on the other devices; choose from {_some(divisions)}"
        )
    runs = [
        run
        for number in (divisions if wanted is None else [wanted])
        if (run := scenarios.asynchronous(number))
    ]
    if not runs:
        tried = f"{wanted} devices" if wanted is not None else f"any of {_some(divisions)} devices"
        remedy = "give more devices, or offload and recompute"
        if scenarios.fixed:
            sizes = ", ".join(f"{name}={sizes}" for name, sizes in scenarios.fixed.items())
            remedy = f"relax --fix {sizes}, which must leave devices to engines, or give more devices"
        raise ConfigError(f"the models cannot have {tried} to train on beside engines; {remedy}")
    splits = scenarios.steady_states(runs)
    if not options.sweep:
        place = splits.index(_best_split(splits, options.staleness))
        runs, splits = [runs[place]], [splits[place]]
    chosen = sorted({round(place) for place in np.linspace(0, len(runs) - 1, min(len(runs), MOST_SIMULATED))})
    for done, place in enumerate(chosen, start=1):
        if sys.stderr.isatty():
            end = "\n" if done == len(chosen) else ""
            print(f"\rsimulating division {done} of {len(chosen)} ...", end=end, file=sys.stderr, flush=True)
        yield splits[place], runs[place], simulate(runs[place].setting)


def _some(numbers: Sequence[int]) -> str:
    shown = [str(number) for number in numbers]
    return ", ".join(shown if len(shown) <= 12 else [*shown[:6], "...", *shown[-5:]])


def _best_split(splits: Sequence[Split], max_staleness: float) -> Split:
    """The fastest one under the bound; without any, the fastest one, whose engines will often wait."""
    young = [split for split in splits if split.staleness <= max_staleness]
    return max(young or splits, key=lambda split: split.tokens_per_s)


def _best(sweep: Sequence[Divided], max_staleness: float) -> Divided:
    """As `_best_split`, by what has been simulated."""
    young = [one for one in sweep if one[2].mean_staleness <= max_staleness]
    return max(young or sweep, key=lambda one: one[2].tokens_per_s)


RUN_COLUMNS = {
    "run": "",
    "tokens_per_s": "tokens/s",
    "step_s": "step",
    "train_idle_share": "trainer idle",
    "generate_idle_share": "engines idle",
    "staleness_mean": "staleness mean",
    "staleness_p99": "99 %",
    "staleness_max": "most",
    "queue_max": "queue most",
}
"""Figure of a run -> its heading beside other runs."""
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
"""Figure of a division -> its heading beside other divisions."""


def _lines(
    request: RunRequest, figures: dict[str, Any], setting: Setting, options: argparse.Namespace
) -> Iterator[str]:
    workload = request.workload
    one, other = figures["synchronous"], figures["asynchronous"]
    arrival = "between responses" if options.drain else "between two tokens"
    yield (
        f"run: {workload.algorithm}, {setting.batch_size} responses a step, {workload.prompt_tokens:g} tokens of"
        f" prompt, responses {workload.lengths}"
    )
    yield (
        f"cluster: {request.num_devices} devices of {request.cluster.name}; {options.steps} steps, staleness bound"
        f" {options.staleness:g}, seed {options.seed}, simulated in {figures['simulation_s']:.1f} s"
    )
    yield ""
    yield from table([{"run": "synchronous", **one}, {"run": "asynchronous", **other}], RUN_COLUMNS)
    for name in ("synchronous", "asynchronous"):
        idle = figures[name]["role_idle_shares"].items()
        yield f"idle by role, {name}: " + ", ".join(f"{role} {share:.0%}" for role, share in idle)
    if other["staleness_max"] > options.staleness:
        yield (
            "(most: of responses begun within the bound that took so long that others were trained on before them)"
        )
    yield ""
    yield f"synchronous: {_engines(one)}, all models on the same {one['num_training']} devices"
    yield (
        f"asynchronous: {other['num_training']} devices train, {other['num_generating']} generate: {_engines(other)}; new"
        f" weights in {format_seconds(setting.update_s)}, {arrival};"
        f" {other['tokens_per_s'] / one['tokens_per_s']:.2f} times synchronous"
    )
    model = other["model"]
    if len(figures["sweep"]) > 1:
        yield ""
        yield from table(
            [_sweep_row(each, other, options.staleness) for each in figures["sweep"]], SWEEP_COLUMNS
        )
    else:
        yield (
            f"analytical model of this division: {model['tokens_per_s']:,.0f} tokens/s, {model['running']:.0f} responses"
            f" an engine, up to {cell('staleness', model['staleness_while_generated'])} batches older when a response is"
            " complete than when it began"
        )


def _engines(figures: dict[str, Any]) -> str:
    return (
        f"{figures['num_engines']} engines of {figures['generate']} (p_g-t_g), up to {figures['max_running']} responses"
        " each"
    )


def _sweep_row(division: dict[str, Any], best: dict[str, Any], max_staleness: float) -> dict[str, Any]:
    mark = "too old" if division["staleness_mean"] > max_staleness else ""
    return {
        **division,
        "model_tokens_per_s": division["model"]["tokens_per_s"],
        "model_staleness": division["model"]["staleness_while_generated"],
        "mark": "best" if division["num_training"] == best["num_training"] else mark,
    }


QUEUE_POINTS = 200
"""Points of the queue over time, for programs."""


def _figures(run: Run, outcome: Outcome) -> dict[str, Any]:
    """Return a run's figures for programs. Units: seconds, tokens of responses, optimizer steps."""
    moments, most = outcome.queue_over_time(QUEUE_POINTS)
    return {
        "num_training": run.num_training,
        "num_generating": run.num_generating,
        "num_engines": run.setting.num_engines,
        "generate": str(run.engines.engine.sizes),
        "max_running": run.setting.max_running,
        "parallel": {option.model: str(option.sizes) for option in run.plan.pools[0].options},
        "seconds": outcome.seconds,
        "step_s": outcome.seconds / len(outcome.step_ends),
        "tokens_per_s": outcome.tokens_per_s,
        "train_idle_share": outcome.train_idle_share,
        "generate_idle_share": outcome.generate_idle_share,
        "staleness_mean": outcome.mean_staleness,
        "staleness_p99": outcome.staleness_quantile(0.99),
        "staleness_max": outcome.largest_staleness,
        "staleness_tokens": {str(age): count for age, count in outcome.staleness_counts.items()},
        "queue_max": max(count for _, count in outcome.queue),
        "queue": {"seconds": moments, "responses": most},
        "role_idle_shares": role_idle_shares(run, outcome),
    }


def _division_figures(split: Split, run: Run, outcome: Outcome) -> dict[str, Any]:
    """Return the figures of a division beside those of the analytical model."""
    model = {
        "running": split.running,
        "tokens_per_s": split.tokens_per_s,
        "staleness_while_generated": split.staleness if math.isfinite(split.staleness) else None,
    }
    return {**_figures(run, outcome), "model": model}

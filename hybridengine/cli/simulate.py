"""`hybridengine simulate`: simulate synchronous and asynchronous training, event by event. Starts nothing."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from hybridengine.cli.options import add_json_option, between
from hybridengine.cli.outputs import check_outputs, emit, show_status
from hybridengine.cli.run_request import RunRequest, add_run_options, request_of
from hybridengine.errors import ConfigError
from hybridengine.formatting import format_seconds, table
from hybridengine.planning.simulation.bound_prices import late_line
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
begun that would be more than --staleness batches ahead of the trainer. Older tokens are masked (--bound token), or the
trainer waits for the oldest responses (--bound response). A configuration with engines on a pool of their own is
simulated with its pools, sizes and steps per call; for others, the best division is found. Seconds come from the
cluster file."""

EPILOG = """examples:
  # synchronous beside the best division of 128 devices between training and generation
  hybridengine simulate configs/llama3-70b-16nodes.yaml --cluster configs/clusters/a100-80gb-16x8.yaml \\
      --lengths lognormal:mean=400,cv=0.8 --plot runs.svg
  # every division, simulated beside the analytical model
  hybridengine simulate CONFIG --cluster FILE --staleness 4 --sweep --plot sweep.png
  # one division, with engines of these sizes
  hybridengine simulate CONFIG --cluster FILE --train-devices 48 --fix generate=1-4"""


def add_options(parser: argparse.ArgumentParser) -> None:
    add_run_options(parser)
    parser.set_defaults(placement=None)
    option, ages, number = parser.add_argument, between(0, math.inf, float), between(1, 2**31)
    option("--steps", type=between(1, 100_000), default=100, metavar="N", help="training steps to simulate")
    option(
        "--staleness", type=ages, metavar="ETA",
        help="batches ahead of the trainer, or inf (default: staleness.max_versions of engines on a pool, otherwise 4)",
    )  # fmt: skip
    option("--bound", choices=("token", "response"), help="exact bound (default: staleness.bound)")
    option("--train-devices", type=number, metavar="N", help="devices that train (default: the model's best)")
    option("--sweep", action="store_true", help="simulate every division")
    option("--seed", type=between(0, 2**32 - 1), default=0, metavar="N", help="of the lengths")
    add_json_option(parser)
    option("--plot", type=Path, metavar="FILE", help="draw the runs (.png, .svg, .pdf)")


def run(options: argparse.Namespace) -> int:
    request = request_of(options)
    staleness, has_pool = request.config.staleness, bool(request.config.engines)
    if options.staleness is None:
        options.staleness = float(staleness.max_versions) if has_pool else 4.0
    options.bound = options.bound or staleness.bound
    scenarios = _scenarios(request, options)
    check_outputs(
        {"--json": options.json, "--plot": options.plot},
        {"CONFIG": options.config, "--cluster": options.cluster},
    )
    begin = time.perf_counter()
    divisions, sweep = _divisions(scenarios, request, options), []
    synchronous = scenarios.synchronous()
    outcome = simulate_synchronous(synchronous.setting)
    for division, state in divisions:
        show_status(f"division {len(sweep) + 1} of {len(divisions)}")
        sweep.append((division, state, simulate_asynchronous(division.setting)))
    best = _best(sweep, options.staleness, lambda one: (one[2].mean_staleness, one[2].tokens_per_s))
    figures = {
        **request.figures,
        "num_steps": options.steps,
        "max_staleness": options.staleness if math.isfinite(options.staleness) else None,
        "bound": options.bound,
        "seed": options.seed,
        "simulation_s": time.perf_counter() - begin,
        "synchronous": _figures(synchronous, None, outcome),
        "asynchronous": _figures(*best),
        "sweep": [_figures(*one) for one in sweep],
    }

    def draw(place: Path) -> None:
        from hybridengine.planning.simulation.simulate_chart import draw_runs

        outcomes = {"synchronous": outcome, "asynchronous": best[2]}
        draw_runs(f"{request.title}, simulated", outcomes, sweep, options.staleness, place)

    emit(options, figures, _lines(request, figures, options.staleness), {"--plot": (options.plot, draw)})
    return 0


def _scenarios(request: RunRequest, options: argparse.Namespace) -> Scenarios:
    if options.sweep and options.train_devices is not None:
        raise ConfigError("--sweep simulates every division and --train-devices one; leave one of them out")
    if request.num_devices < 2:
        raise ConfigError(
            "one device cannot be divided between training and generation; give --devices or --nodes for more"
        )
    if request.config.engines:
        _check_configured(request, options)
    settings = {
        "num_steps": options.steps,
        "max_staleness": options.staleness,
        "bound": options.bound,
        "seed": options.seed,
    }
    constraints = request.constraints
    return Scenarios(request.workload, request.cluster, request.num_devices, constraints, **settings)


def _check_configured(request: RunRequest, options: argparse.Namespace) -> None:
    """Raise a ConfigError for options that contradict the pools of a configuration with engines on one of them."""
    changes = {"--train-devices": options.train_devices, "--sweep": options.sweep, "--fix": options.fix}
    if given := ", ".join(name for name, value in changes.items() if value):
        raise ConfigError(
            f"{given} cannot change the pools and sizes of a configuration with engines on a pool of their own, which is"
            " simulated as it is; leave it out, or change the configuration"
        )
    if request.num_devices != request.config.num_ranks:
        raise ConfigError(
            f"--devices {request.num_devices} must be the {request.config.num_ranks} ranks of the configuration's pools,"
            " which are simulated as they are; leave it out, or change cluster.ranks_per_node and cluster.pools"
        )


def _divisions(
    scenarios: Scenarios, request: RunRequest, options: argparse.Namespace
) -> list[tuple[Run, SteadyState]]:
    """Return the divisions that configuration and options ask for, each with its steady state."""
    if request.config.engines:
        run = scenarios.configured(request.config)
        return [(run, scenarios.steady_state(run))]
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
        return [_best(found, options.staleness, lambda one: (one[1].staleness, one[1].tokens_per_s))]
    chosen = {round(place) for place in np.linspace(0, len(found) - 1, min(len(found), MOST_SIMULATED))}
    return [found[place] for place in sorted(chosen)]


def _some(numbers: Sequence[int]) -> str:
    shown = [str(number) for number in numbers]
    return ", ".join(shown if len(shown) <= 12 else [*shown[:6], "...", *shown[-5:]])


def _best(found: Sequence[T], max_staleness: float, figures: Callable[[T], tuple[float, float]]) -> T:
    """Return the fastest division within the staleness bound, or of all, by its (staleness, tokens per second)."""
    young = [one for one in found if figures(one)[0] <= max_staleness]
    return max(young or found, key=lambda one: figures(one)[1])


RUN_COLUMNS = {
    "run": "",
    "tokens_per_s": "tokens/s",
    "step_s": "step",
    "train_idle_share": "trainer idle",
    "generate_idle_share": "engines idle",
    "staleness_mean": "staleness mean",
    "staleness_max": "most",
    "masked_share": "masked",
    "queue_max": "queue most",
}
SWEEP_COLUMNS = {
    "num_training": "train",
    "num_generating": "generate",
    "model_tokens_per_s": "tokens/s: model",
    "tokens_per_s": "simulated",
    "model_staleness": "ages while generated: model",
    "staleness_mean": "staleness: mean",
    "staleness_max": "most",
    "masked_share": "masked",
    "train_idle_share": "trainer idle",
    "generate_idle_share": "engines idle",
    "mark": "",
}


def _lines(request: RunRequest, figures: dict[str, Any], max_staleness: float) -> Iterator[str]:
    both = {name: figures[name] for name in ("synchronous", "asynchronous")}
    one, other = both.values()
    yield f"run: {request.workload.algorithm} of {request.rows}"
    yield (
        f"cluster: {request.num_devices} devices of {request.cluster.name}; {figures['num_steps']} steps, staleness bound"
        f" {max_staleness:g} by {figures['bound']}, seed {figures['seed']}, simulated in {figures['simulation_s']:.1f} s"
    )
    yield ""
    yield from table([{"run": name, **run} for name, run in both.items()], RUN_COLUMNS)
    if other["staleness_max"] > max_staleness:
        yield "(most: responses begun within the bound that took so long that others were trained on before them; tokens"
        yield " older than the bound are masked)"
    yield ""
    for name, run in both.items():
        yield (
            f"{name}: {run['num_training']} devices train, {run['num_generating']} generate: {run['num_engines']} engines"
            f" of {run['generate']} (p_g-t_g), up to {run['max_running']} responses each; new weights in"
            f" {format_seconds(run['update_s'])}; idle by role: "
            + ", ".join(f"{role} {share:.0%}" for role, share in run["role_idle_shares"].items())
        )
    yield f"asynchronous: {other['tokens_per_s'] / one['tokens_per_s']:.2f} times synchronous"
    total = sum(other["staleness_tokens"].values())
    ages = (f"{age}: {count / total:.1%}" for age, count in other["staleness_tokens"].items())
    yield f"asynchronous: share of the tokens by staleness: {', '.join(ages)}"
    if warning := late_line(other["model_staleness"], max_staleness, figures["bound"]):
        yield warning
    yield ""
    configured = bool(request.config.engines)
    which = "the configured division" if configured else "divisions"
    yield f"{which} of the devices, simulated beside the analytical model"
    rows = []
    for division in figures["sweep"]:
        is_best = division["num_training"] == other["num_training"]
        too_old = "too old" if division["staleness_mean"] > max_staleness else ""
        rows.append({**division, "mark": "best" if is_best else too_old})
    yield from table(rows, SWEEP_COLUMNS)


def _figures(run: Run, state: SteadyState | None, outcome: Outcome) -> dict[str, Any]:
    """Return the figures of a run, and of its steady state by the model. Units: seconds, tokens, optimizer steps."""
    moments, waiting = zip(*outcome.queue[:: 1 + len(outcome.queue) // QUEUE_POINTS], strict=True)
    names = ("running", "tokens_per_s", "staleness") if state else ()
    return {
        "num_training": run.num_training,
        "num_generating": run.num_generating,
        "num_engines": run.setting.num_engines,
        "generate": str(run.engines.engine.sizes),
        "max_running": run.setting.max_running,
        "update_s": run.setting.update_s,
        "parallel": {option.model: str(option.sizes) for pool in run.plan.pools for option in pool.options},
        "seconds": outcome.seconds,
        "step_s": outcome.seconds / len(outcome.step_ends),
        "tokens_per_s": outcome.tokens_per_s,
        "train_idle_share": outcome.train_idle_share,
        "generate_idle_share": outcome.generate_idle_share,
        "role_idle_shares": role_idle_shares(run, outcome),
        "staleness_mean": outcome.mean_staleness,
        "staleness_max": outcome.largest_staleness,
        "masked_share": outcome.masked_share,
        "staleness_tokens": {str(age): count for age, count in outcome.staleness_counts.items()},
        "queue_max": max(count for _, count in outcome.queue),
        "queue": {"seconds": moments, "responses": waiting},
        **{f"model_{name}": getattr(state, name) for name in names},
    }

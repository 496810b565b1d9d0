"""`hybridengine plan`: choose placement and parallel sizes, and predict the step time. Starts nothing."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import yaml

from hybridengine.cli.options import STDOUT, add_json_option, between
from hybridengine.cli.outputs import check_outputs, emit, show_status
from hybridengine.cli.run_request import RunRequest, add_run_options, cluster_of, request_of
from hybridengine.errors import ConfigError
from hybridengine.formatting import format_bytes
from hybridengine.planning.costs.memory import engine_weight_bytes
from hybridengine.planning.costs.passes import compute_of
from hybridengine.planning.search.options import Options
from hybridengine.planning.search.plan import Plan, idle_shares, run_settings
from hybridengine.planning.search.plan_tables import plan_lines
from hybridengine.planning.search.search import Found, Search
from hybridengine.planning.search.shortage import shortage

DESCRIPTION = """Choose placement and parallel sizes for a run: which models share devices, how many devices each pool
has, (p, t, d) of every model with context ranks c, virtual stages v, parts e of experts and their shards etp, written
"2-2-1 c=2 v=2", and (p_g, t_g) of generation. Searches all placements, allocations and sizes, prunes by memory and by
lower bounds, and says whether what it has found is exact.

Nothing is started and no GPU is needed. Seconds and bytes are predicted from the figures of the cluster file
(configs/clusters/; `hybridengine calibrate` measures those of the machine it runs on)."""

EPILOG = """examples:
  # the best plans for PPO of a 70B model on 128 A100s, and a configuration for `hybridengine train`
  hybridengine plan configs/llama3-70b-16nodes.yaml --cluster configs/clusters/a100-80gb-16x8.yaml --out planned.yaml
  # the best with everything on the same devices, and with sizes that are given
  hybridengine plan CONFIG --cluster FILE --placement colocate --fix actor=4-8-4 --fix generate=1-8
  # a mixture of experts, with sizes that are given
  hybridengine plan configs/qwen3-235b.yaml --cluster configs/clusters/h100-80gb.yaml --fix 'generate=1-8 e=8'
  # how well the model predicts runs of this machine
  hybridengine calibrate && hybridengine plan --check runs/arithmetic

The sizes in CONFIG are not used. docs/how-to/plan.md has more."""


def add_options(parser: argparse.ArgumentParser) -> None:
    add_run_options(parser)
    option = parser.add_argument
    option(
        "--placement", metavar="POOLS",
        help="only this one: colocate, standalone, split (actor and reference apart from the others), or pools such as"
        " 'actor,reference | critic,reward'",
    )  # fmt: skip
    option("--top", type=between(1, 1000), default=5, metavar="N", help="placements to show")
    add_json_option(parser)
    option("--out", type=Path, metavar="FILE", help="write the best plan as a configuration for train")
    option("--plot", type=Path, metavar="FILE", help="draw the timelines (.png, .svg, .pdf)")
    option("--check", nargs="+", metavar="FOLDER", help="compare these runs with their predictions instead")


def run(options: argparse.Namespace) -> int:
    if options.check:
        return _check(options)
    request = request_of(options)
    check_outputs(
        {"--json": options.json, "--out": options.out, "--plot": options.plot},
        {"CONFIG": options.config, "--cluster": options.cluster},
    )
    begin = time.perf_counter()
    workload = request.workload.without_generation() if request.num_generating else request.workload
    search = Search(
        Options(workload, request.cluster, request.constraints.sizes, request.constraints.gen_sizes),
        request.num_devices - request.num_generating,
        request.constraints.placements,
        options.top,
        lambda done, total: show_status(f"placement {done + 1} of {total}"),
    )
    found = search.run()
    search_s = time.perf_counter() - begin
    if not found.plans:
        raise ConfigError(shortage(search))

    def draw(place: Path) -> None:
        from hybridengine.planning.search.plan_chart import draw_plans

        draw_plans(request.title, found.plans, place)

    planned = train_config(request, found.plans[0]) if options.out else ""
    files = {"--out": (options.out, planned), "--plot": (options.plot, draw)}
    emit(options, as_json(request, found, search_s), _lines(request, found, search_s), files)
    if options.out is not None and options.json != STDOUT:
        print(f"plan 1 is written: hybridengine train {options.out}")
    return 0


def _check(options: argparse.Namespace) -> int:
    """Compare runs with their predictions; return 1 if a deviation exceeds its tolerance."""
    from hybridengine.bench.calibration.check import check_lines, check_run
    from hybridengine.bench.calibration.measured_run import read_run

    names = (
        "CONFIG",
        "--nodes",
        "--devices",
        "--lengths",
        "--prompt-tokens",
        "--fix",
        "--placement",
        "--out",
        "--plot",
    )
    if given := [name for name in names if getattr(options, name.lower().lstrip("-").replace("-", "_"))]:
        raise ConfigError(f"--check takes runs as they were; leave out {', '.join(given)}")
    runs = [read_run(folder) for folder in options.check]
    cluster = cluster_of(options, runs[0].config.model.dtype)
    check_outputs({"--json": options.json}, {"--cluster": options.cluster})
    checks = [check_run(run, cluster) for run in runs]
    emit(options, {"cluster": cluster.name, "runs": checks}, check_lines(runs, checks, cluster))
    return 0 if all(check["within"] for check in checks) else 1


def _lines(request: RunRequest, found: Found, search_s: float) -> list[str]:
    models = (f"{model.name} {model.shape.num_parameters / 1e9:.3g}B" for model in request.workload.models)
    exact = (
        "nothing better exists in the search space"
        if found.exact
        else "NOT exact: too many allocations to enumerate, so pools have round sizes, or what those leave"
    )
    return [
        f"run: {request.workload.algorithm} of {', '.join(models)}; {request.rows}",
        f"cluster: {request.num_devices} devices of {request.cluster.name}",
        f"search: {_counted(found.num_placements, 'placement')}, {_counted(found.num_allocations, 'allocation')} bounded,"
        f" {found.num_solved:,} looked into, {search_s:.1f} s; {exact}",
        *_engine_lines(request),
        *plan_lines(found.plans, request.num_devices - request.num_generating),
    ]


def _engine_lines(request: RunRequest) -> list[str]:
    """Return a line with the engines that generate beside the plan, if any."""
    config, gen = request.config, request.config.generation.parallel
    if not config.engines:
        return []
    return [
        f"engines: {len(config.engines)} of {gen} (p_g-t_g) on {request.num_generating} of the devices, as configured;"
        f" they generate during all calls; a rank holds {format_bytes(engine_weight_bytes(config))} of weights and"
        f" {format_bytes(config.rollout.kv_cache_bytes)} of KV cache (`hybridengine simulate` predicts the whole)"
    ]


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def train_config(request: RunRequest, plan: Plan) -> str:
    """Return the text of a configuration file for train."""
    values = run_settings(request.config, plan, request.workload, request.cluster)
    head = (
        f"# Planned by `hybridengine plan` for {request.num_devices} devices of {request.cluster.name}: predicted\n"
        f"# {plan.step_s:.2f} s a step, {plan.headroom_bytes / 2**30:.1f} GiB left on the fullest device,\n"
        f"# beside {(compute_of(request.cluster).process_bytes or 0) / 2**30:.1f} GiB for processes (the cluster file's"
        " process_bytes).\n"
    )
    return head + yaml.safe_dump(values, sort_keys=False, default_flow_style=None, width=110)


def as_json(request: RunRequest, found: Found, search_s: float) -> dict[str, Any]:
    """Return the figures of a search as JSON values. Units: bytes and seconds."""
    return {
        **request.figures,
        "search_s": search_s,
        "exact": found.exact,
        "num_placements": found.num_placements,
        "num_allocations": found.num_allocations,
        "num_solved": found.num_solved,
        "plans": [plan_json(plan) for plan in found.plans],
    }


def plan_json(plan: Plan) -> dict[str, Any]:
    """Return the figures of a plan; phases are sums of the seconds of calls, which may overlap."""
    shares = idle_shares(plan)
    roles: dict[str, Any] = {}
    for place, pool in enumerate(plan.pools):
        for option in pool.options:
            roles[option.model] = {
                "pool": place,
                "num_ranks": pool.num_ranks,
                "parallel": str(option.sizes),
                "calls_s": sum(option.least_seconds),
            }
            if (engine := option.engine) is not None:
                roles[option.model] |= {
                    "generate": str(engine.sizes),
                    "kv_cache_bytes": pool.kv_bytes,
                    "switch_received_bytes_max": engine.switch.received_bytes,
                    "switch_peak_weight_bytes_max": engine.switch.peak_bytes,
                }
    return {
        "step_s": plan.step_s,
        "phases_s": dict(plan.phases_s),
        "placement": [
            {
                "models": [option.model for option in pool.options],
                "num_ranks": pool.num_ranks,
                "memory_bytes_max": pool.peak_bytes,
                "idle_share": share,
            }
            for pool, share in zip(plan.pools, shares, strict=True)
        ],
        "roles": roles,
        "memory_headroom_bytes_min": plan.headroom_bytes,
        "timeline": [
            {
                "call": str(bar.call),
                "phase": bar.call.phase,
                "pool": bar.pool,
                "begin_s": bar.begin_s,
                "end_s": bar.end_s,
            }
            for bar in plan.bars
        ],
    }

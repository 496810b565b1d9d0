"""`hybridengine reshard plan`: what switching layouts will cost on a cluster. Starts nothing, needs no torch."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hybridengine.cli.options import STDOUT, add_json_option, json_file, once
from hybridengine.cli.output_files import check_output_files, check_picture, write_outputs
from hybridengine.cli.switch_tables import diff_lines, layout_name, plan_lines, sweep_lines
from hybridengine.config.values import parse_bytes
from hybridengine.errors import ConfigError, TopologyError
from hybridengine.families.registry import FAMILIES
from hybridengine.model_presets import PRESETS, resolve_model
from hybridengine.model_shapes import DTYPE_BYTES, ModelShape
from hybridengine.planning.clusters import Cluster, load_cluster
from hybridengine.planning.layouts import check_generates, check_layouts, generation_sizes
from hybridengine.planning.switch_cost import SwitchPricer, gen_shard_bytes
from hybridengine.planning.switch_plan import SwitchPlan, plan_switch
from hybridengine.topology.generation import GenerationGrid, Grouping
from hybridengine.topology.grid import Grid, RankOrder
from hybridengine.topology.sizes import GenSizes, TrainSizes

PRACTICAL, ALL = "practical", "all"
"""Which generation layouts a sweep lists."""

DESCRIPTION = f"""Plan a switch between training and generation layouts on a cluster, and see what it costs: which ranks
gather from which, bytes received per rank and link, weights in memory over the course of the switch, predicted seconds.

Nothing is started and no GPU is needed: everything is counted from the plan that a run would carry out. Seconds are
predicted from the figures of the cluster file (configs/clusters/), not measured; `hybridengine reshard bench` measures.

sizes: training p-t-d is pipeline stages, tensor shards and data-parallel replicas; generation p_g-t_g is stages and
tensor shards of one engine. All p·t·d ranks are shared out among engines of p_g·t_g ranks.

models: {", ".join(PRESETS)};
or any Hugging Face config.json of a supported family ({", ".join(FAMILIES)}), or a folder with one."""

EPILOG = """examples:
  # what a switch costs
  hybridengine reshard plan --model llama3-70b --train 8-8-16 --gen 1-8 --cluster configs/clusters/h100-80gb.yaml
  # the same as a picture and as figures, beside the text
  hybridengine reshard plan --model llama2-7b --train 1-8-16 --gen 1-2 --cluster configs/clusters/a100-80gb-16x8.yaml \\
      --plot switch.png --json switch.json
  # every generation layout that fits, best first
  hybridengine reshard plan --model qwen2.5-32b --train 4-8-4 --sweep --cluster configs/clusters/h100-80gb.yaml
  # two layouts side by side
  hybridengine reshard plan --model llama3-70b --diff 8-8-16:1-8 4-8-32:1-8 --cluster configs/clusters/h100-80gb.yaml
  # one figure for a program: JSON alone on stdout
  hybridengine reshard plan --model llama3-405b --train 16-8-128 --gen 2-8 --order megatron \\
      --cluster configs/clusters/h100-80gb.yaml --json | jq .inter_node_bytes_max

reading it: bytes are those of the rank with the most. "between nodes" is what the network carries, and usually what a
switch waits for. Where the time is far above that of the busiest link, few ranks send at a time: larger buckets
(--bucket-bytes) keep more of them busy, and add little to the peak, because the last buckets are small. "redundant" is
what is held twice while generating: 0 where shards nest (p_g | p, t_g | t, interval grouping). The way back copies
inside each device."""


@dataclass(frozen=True)
class Request:
    """What the options ask for, checked."""

    model_name: str
    shape: ModelShape
    cluster: Cluster
    dtype: str
    bucket_bytes: int
    order: RankOrder
    grouping: Grouping
    layouts: tuple[tuple[TrainSizes, GenSizes | None], ...]
    """One to plan, two to compare, one without generation sizes to sweep."""

    def plan(self, train: TrainSizes, gen: GenSizes, with_variants: bool = True) -> SwitchPlan:
        """The switch of one layout."""
        pricer = SwitchPricer(self.shape, self.dtype, self.bucket_bytes)
        generation = GenerationGrid(Grid(train, self.order), gen, self.grouping)
        return plan_switch(pricer, generation, self.cluster, with_variants)


def add_plan_command(subparsers: Any) -> None:
    """Add `plan` to the sub-commands of `hybridengine reshard`."""
    parser = subparsers.add_parser(
        "plan",
        help="plan the switch for a cluster: bytes, memory, predicted seconds; starts nothing",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )

    option = once(parser)

    option(
        "--model", required=True, metavar="PRESET_OR_HF_CONFIG", help="a preset, a config.json, or its folder"
    )
    option("--train", metavar="P-T-D", help="training sizes, e.g. 8-8-16")
    option("--gen", metavar="PG-TG", help="generation sizes, e.g. 1-8")
    option("--cluster", required=True, metavar="FILE", help="YAML file of nodes, devices and links")
    option("--nodes", type=int, metavar="N", help="number of nodes, instead of the cluster file's")
    option(
        "--order",
        default="paper",
        metavar="ORDER",
        help="rank order: paper (tp, pp, dp; default) or megatron",
    )
    option("--grouping", default="interval", metavar="NAME", help="engines: interval (default) or vanilla")
    option("--dtype", default="bfloat16", metavar="TYPE", help="of the weights (default bfloat16)")
    option("--bucket-bytes", default="1GiB", metavar="BYTES", help="weights in flight at once (default 1GiB)")
    add_json_option(parser)
    option(
        "--plot", type=Path, metavar="FILE", help="draw bytes by link and memory over time (.png, .svg, .pdf)"
    )
    option("--diff", nargs=2, metavar=("A", "B"), help="two layouts, each TRAIN:GEN; or GEN, with --train")
    option(
        "--sweep",
        nargs="?",
        const=PRACTICAL,
        metavar="WHICH",
        help="every generation layout that fits, best first: `practical` (default), engines no larger than a training"
        " replica or a node, t_g up to t or a node; `all`, engines of any size",
    )
    parser.set_defaults(run=run_plan)


def run_plan(options: argparse.Namespace) -> int:
    """Carry out the command; returns the exit status."""
    request = request_of(options)
    check_picture("--plot", options.plot)
    check_output_files(
        {"--json": json_file(options), "--plot": options.plot},
        {"--model": options.model, "--cluster": options.cluster},
    )
    if options.sweep is not None:
        plans, lines, figures = _sweep(request, options.sweep == ALL)
    elif options.diff is not None:
        plans = [request.plan(train, gen) for train, gen in request.layouts if gen is not None]
        lines = diff_lines(*plans)
        figures = {"results": [as_json(request, plan) for plan in plans]}
    else:
        ((train, gen),) = request.layouts
        assert gen is not None, "request_of asks for --gen"
        plans = [request.plan(train, gen)]
        lines = plan_lines(request.model_name, request.shape, request.dtype, request.cluster, plans[0])
        figures = as_json(request, plans[0])
    text = json.dumps(figures, indent=2)
    try:
        _write(request, plans, text, options)
    finally:
        print(text if options.json == STDOUT else "\n".join(lines))
    return 0


def _write(request: Request, plans: list[SwitchPlan], text: str, options: argparse.Namespace) -> None:
    def draw(place: Path) -> None:
        from hybridengine.cli.switch_chart import draw_switches

        draw_switches(request.model_name, request.cluster, plans, place)

    write_outputs({"--json": (json_file(options), text + "\n"), "--plot": (options.plot, draw)})


def request_of(options: argparse.Namespace) -> Request:
    """What the options ask for.

    Raises:
        ConfigError, TopologyError: options, files or layouts that cannot be.
    """
    shape = resolve_model(options.model)
    check_generates(shape)
    cluster = load_cluster(options.cluster)
    if options.nodes is not None:
        cluster = cluster.resized(options.nodes)
    layouts = _layouts(options)
    for train, gen in layouts:
        check_layouts(shape, train, gen)
        cluster.node_map(train.num_ranks)
    return Request(
        model_name=options.model,
        shape=shape,
        cluster=cluster,
        dtype=_choice("--dtype", options.dtype, DTYPE_BYTES),
        bucket_bytes=parse_bytes("--bucket-bytes", options.bucket_bytes),
        order=RankOrder[_choice("--order", options.order, [one.name.lower() for one in RankOrder]).upper()],
        grouping=Grouping(_choice("--grouping", options.grouping, [one.value for one in Grouping])),
        layouts=tuple(layouts),
    )


def _layouts(options: argparse.Namespace) -> list[tuple[TrainSizes, GenSizes | None]]:
    """The layouts to plan, before anything is known about the model."""
    given = {
        "gen": options.gen is not None,
        "diff": options.diff is not None,
        "sweep": options.sweep is not None,
    }
    kinds = [name for name, is_given in given.items() if is_given]
    if len(kinds) != 1:
        found = " and ".join(f"--{kind}" for kind in kinds) or "none of them"
        raise ConfigError(
            f"give one of --gen (a layout), --diff A B (two) and --sweep (all that fit), found {found}"
        )
    train = None if options.train is None else TrainSizes.parse(options.train)
    if options.sweep is not None:
        _choice("--sweep", options.sweep, [PRACTICAL, ALL])
        return [(_needed(train), None)]
    texts = [options.gen] if options.diff is None else options.diff
    if train is not None and all(":" in text for text in texts):
        raise ConfigError(
            f"--train {train} is not used, since {' and '.join(texts)} name their own training sizes; leave it out"
        )
    layouts: list[tuple[TrainSizes, GenSizes | None]] = []
    for text in texts:
        own, colon, gen = text.rpartition(":")
        sizes = TrainSizes.parse(own) if colon else _needed(train)
        layouts.append((sizes, GenSizes.parse(gen)))
    return layouts


def _needed(train: TrainSizes | None) -> TrainSizes:
    if train is None:
        raise ConfigError("--train is missing; give the training sizes p-t-d, e.g. --train 8-8-16")
    return train


def _sweep(request: Request, are_all: bool) -> tuple[list[SwitchPlan], list[str], dict[str, Any]]:
    """Every generation layout whose weights fit, fastest switch first."""
    ((train, _),) = request.layouts
    limit = request.cluster.device_memory_bytes
    plans, num_too_large = [], 0
    largest = train.num_ranks if are_all else request.cluster.devices_per_node
    for gen in generation_sizes(request.shape, train, largest):
        generation = GenerationGrid(Grid(train, request.order), gen, request.grouping)
        plan = None
        if gen_shard_bytes(request.shape, generation, request.dtype) <= limit:
            if sys.stderr.isatty():
                print(f"planning {train}:{gen} ...", file=sys.stderr)
            plan = request.plan(train, gen, with_variants=False)
        if plan is None or plan.peak_weight_bytes_max > limit:
            num_too_large += 1
        else:
            plans.append(plan)
    if not plans:
        raise TopologyError(
            f"no generation layout of training {train} fits in the {limit} bytes of a device; choose more pipeline"
            " stages or tensor shards, or devices with more memory"
        )
    plans.sort(key=lambda plan: (plan.seconds, plan.peak_weight_bytes_max))
    figures = {"results": [as_json(request, plan) for plan in plans], "num_too_large": num_too_large}
    return plans, sweep_lines(request.cluster, plans, num_too_large, are_all), figures


def as_json(request: Request, plan: SwitchPlan) -> dict[str, Any]:
    """Figures of a plan for programs. Units: bytes and seconds; "max" is the rank with the most."""
    figures = asdict(plan)
    generation, there = figures.pop("generation"), figures.pop("there")
    del generation
    figures["planned_domains"] = [
        {"ranks": repeats[0], "repeats": len(repeats)} for repeats in figures.pop("domains")
    ]
    grid, gen = plan.generation.train, plan.generation
    return {
        "model": request.model_name,
        "num_parameters": request.shape.num_parameters,
        "weight_bytes": request.shape.weight_bytes(request.dtype),
        "dtype": request.dtype,
        "bucket_bytes": request.bucket_bytes,
        "cluster": request.cluster.name,
        "layout": layout_name(plan),
        "train": str(grid.sizes),
        "gen": str(gen.sizes),
        "order": grid.order.name.lower(),
        "grouping": gen.grouping.value,
        "num_ranks": grid.num_ranks,
        "num_engines": gen.num_replicas,
        "nests": gen.nests,
        **there,
        "inter_node_bytes_max": plan.there.inter_node_bytes_max,
        **figures,
    }


def _choice(option: str, value: str, choices: Sequence[str] | dict[str, int]) -> str:
    if value not in choices:
        raise ConfigError(f"{option} {value!r} does not exist; choose from {', '.join(choices)}")
    return value

"""`hybridengine reshard plan`: predict the cost of switching layouts on a cluster. Starts nothing, needs no torch."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from hybridengine.cli.options import add_json_option, byte_size
from hybridengine.cli.outputs import check_outputs, emit, show_status
from hybridengine.errors import ConfigError, TopologyError
from hybridengine.families.registry import FAMILIES
from hybridengine.machine import without_garbage_collection
from hybridengine.models.presets import PRESETS, resolve_model
from hybridengine.models.shapes import DTYPE_BYTES, ModelShape
from hybridengine.planning.costs.clusters import Cluster, load_cluster
from hybridengine.planning.costs.memory import generation_holding
from hybridengine.planning.search.layouts import check_generates, check_layouts, generation_sizes
from hybridengine.planning.switch.switch_cost import SwitchCost, SwitchPricer
from hybridengine.planning.switch.switch_tables import diff_lines, plan_lines, sweep_lines
from hybridengine.topology.generation import GenerationGrid, Grouping
from hybridengine.topology.grid import Grid, RankOrder
from hybridengine.topology.links import LinkClass
from hybridengine.topology.sizes import GenSizes, TrainSizes

PRACTICAL, ALL = "practical", "all"

DESCRIPTION = f"""Plan a switch between training and generation layouts on a cluster, and see what it costs: which ranks
gather from which, bytes received per rank and link, weights in memory, predicted seconds.

Nothing is started and no GPU is needed: everything is counted from the plan that a run would carry out. Seconds are
predicted from the figures of the cluster file (configs/clusters/), not measured; `hybridengine reshard bench` measures.

sizes: training p-t-d is pipeline stages, tensor shards and data-parallel replicas; generation p_g-t_g is stages and
tensor shards of one engine. All p·t·d ranks are shared out among engines of p_g·t_g ranks.

models: {", ".join(PRESETS)};
or any Hugging Face config.json of a supported family ({", ".join(FAMILIES)}), or a folder with one."""

EPILOG = """examples:
  # what a switch costs
  hybridengine reshard plan --model llama3-70b --train 8-8-16 --gen 1-8 --cluster configs/clusters/h100-80gb.yaml
  # every generation layout that fits, best first
  hybridengine reshard plan --model qwen2.5-32b --train 4-8-4 --sweep --cluster configs/clusters/h100-80gb.yaml
  # two layouts side by side
  hybridengine reshard plan --model llama3-70b --diff 8-8-16:1-8 4-8-32:1-8 --cluster configs/clusters/h100-80gb.yaml

docs/explanation/resharding.md explains the output."""


FIGURES = (
    "copied_bytes_max",
    "copied_back_bytes_max",
    "train_shard_bytes_max",
    "gen_shard_bytes_max",
    "bucket_bytes_max",
    "peak_weight_bytes_max",
    "redundant_bytes_max",
    "extra_bytes_max",
    "memory_bytes_there",
    "memory_bytes_back",
)
"""Attributes of a `SwitchCost` that are reported unchanged."""


def add_options(parser: argparse.ArgumentParser) -> None:
    option, groupings = parser.add_argument, [grouping.value for grouping in Grouping]
    orders = [order.name.lower() for order in RankOrder]
    option("--model", required=True, metavar="PRESET_OR_FILE", help="a preset, config.json, or its folder")
    option("--train", type=TrainSizes.parse, metavar="P-T-D", help="training sizes, e.g. 8-8-16")
    option("--cluster", required=True, metavar="FILE", help="YAML file of nodes, devices and links")
    option("--nodes", type=int, metavar="N", help="number of nodes, instead of the cluster file's")
    option("--order", choices=orders, default="paper", help="of ranks: paper (tp, pp, dp; default)")
    option("--grouping", choices=groupings, default="interval", help="of engines: interval (default)")
    option("--dtype", choices=DTYPE_BYTES, default="bfloat16", help="of the weights (default bfloat16)")
    option("--bucket-bytes", type=byte_size, default="1GiB", metavar="BYTES", help="in flight at once")
    add_json_option(parser)
    option("--plot", type=Path, metavar="FILE", help="draw bytes by link and memory (.png, .svg, .pdf)")
    option = parser.add_mutually_exclusive_group(required=True).add_argument
    option("--gen", type=GenSizes.parse, metavar="PG-TG", help="generation sizes, e.g. 1-8")
    option("--diff", nargs=2, type=layout, metavar=("A", "B"), help="two TRAIN:GEN, or GEN with --train")
    option(
        "--sweep", nargs="?", choices=[PRACTICAL, ALL], const=PRACTICAL,
        help="every generation layout that fits, best first: practical (default), engines no larger than a training"
        " replica or a node, t_g up to t or a node; all, engines of any size",
    )  # fmt: skip


def run(options: argparse.Namespace) -> int:
    shape = resolve_model(options.model)
    check_generates(shape)
    cluster = load_cluster(options.cluster)
    if options.nodes is not None:
        cluster = cluster.resized(options.nodes)
    layouts = _layouts(options)
    for train, gen in layouts:
        check_layouts(shape, train, gen)
        cluster.node_map(train.num_ranks)
    check_outputs(
        {"--json": options.json, "--plot": options.plot},
        {"--model": options.model, "--cluster": options.cluster},
    )
    with without_garbage_collection():
        lines, figures, switches = _planned(options, shape, cluster, layouts)

    def draw(place: Path) -> None:
        from hybridengine.planning.switch.switch_chart import draw_switches

        draw_switches(cluster, switches, place)

    emit(options, figures, lines, {"--plot": (options.plot, draw)})
    return 0


def _planned(
    options: argparse.Namespace,
    shape: ModelShape,
    cluster: Cluster,
    layouts: list[tuple[TrainSizes, GenSizes]],
) -> tuple[list[str], dict[str, Any], list[dict[str, Any]]]:
    """Return the lines to print, the figures of the command, and those of each switch."""
    if options.sweep is not None:
        switches, num_too_large = _sweep(options, shape, cluster)
        figures = {"results": switches, "num_too_large": num_too_large}
        return sweep_lines(cluster, switches, num_too_large), figures, switches
    priced = [_price(options, shape, cluster, *layout) for layout in layouts]
    switches = [figures for _, figures in priced]
    if options.diff is not None:
        return diff_lines(*switches), {"results": switches}, switches
    ((cost, figures),) = priced
    return plan_lines(shape, cluster, cost, figures), figures, switches


def layout(text: str) -> tuple[TrainSizes | None, GenSizes]:
    """Return the training sizes (None if omitted) and generation sizes in `text`: TRAIN:GEN or GEN."""
    train, colon, gen = text.rpartition(":")
    return TrainSizes.parse(train) if colon else None, GenSizes.parse(gen)


def _layouts(options: argparse.Namespace) -> list[tuple[TrainSizes, GenSizes]]:
    """Return the layouts to plan; generation sizes are None for a sweep."""
    named = options.diff or [(None, options.gen)]
    if (options.train is None) == any(train is None for train, _ in named):
        raise ConfigError(
            "--train gives the training sizes of --gen, --sweep, and layouts of --diff that name none; give it for those"
            " alone, e.g. --train 8-8-16"
        )
    return [(train or options.train, gen) for train, gen in named]


def _price(
    options: argparse.Namespace,
    shape: ModelShape,
    cluster: Cluster,
    train: TrainSizes,
    gen: GenSizes,
    *,
    with_variants: bool = True,
) -> tuple[SwitchCost, dict[str, Any]]:
    """Return a switch's cost, and its figures as JSON values in bytes and seconds; "max" is the largest of any rank."""
    nodes = cluster.node_map(train.num_ranks)
    pricer = SwitchPricer(shape, options.dtype, options.bucket_bytes)
    generations = {
        order.name.lower(): GenerationGrid(Grid(train, order), gen, Grouping(options.grouping))
        for order in RankOrder
    }
    generation = generations.pop(options.order)
    cost = pricer.price(generation, nodes)
    orders, one_step = {options.order: _variant(cost, cluster)}, None
    if with_variants:
        orders |= {name: _variant(pricer.price(other, nodes), cluster) for name, other in generations.items()}
        if cost.num_steps > 1:
            one_step = _variant(pricer.price(generation, nodes, two_step=False), cluster)
    return cost, {
        "model": options.model,
        "num_parameters": shape.num_parameters,
        "weight_bytes": shape.weight_bytes(options.dtype),
        "dtype": options.dtype,
        "bucket_bytes": options.bucket_bytes,
        "cluster": cluster.name,
        "layout": f"{train}:{gen}",
        "train": str(train),
        "gen": str(gen),
        "order": options.order,
        "grouping": options.grouping,
        "num_ranks": train.num_ranks,
        "num_engines": generation.num_replicas,
        "nests": generation.nests,
        **orders[options.order],
        "inter_node_bytes_max": cost.received_bytes_max_by_link[LinkClass.BETWEEN_NODES],
        "num_domains": len(cost.groups),
        "num_buckets": max(len(plan.buckets) for plan in cost.plans),
        "num_audited_moves": cost.check(),
        "num_steps": cost.num_steps,
        **{name: getattr(cost, name) for name in FIGURES},
        "seconds_back": cost.seconds_back(cluster),
        "orders": orders,
        "one_step": one_step,
        "planned_domains": [{"ranks": repeats[0], "repeats": len(repeats)} for _, repeats in cost.domains],
    }


def _variant(cost: SwitchCost, cluster: Cluster) -> dict[str, Any]:
    """Return the figures that depend on the rank order and on the number of steps."""
    by_link = {
        name: {link.value: num_bytes for link, num_bytes in getattr(cost, name).items()}
        for name in ("received_bytes_max_by_link", "received_bytes_total_by_link")
    }
    return {
        "num_crossing_domains": cost.num_crossing_domains,
        "received_bytes_max": cost.received_bytes_max,
        **by_link,
        "seconds_there": cost.seconds_there(cluster),
        "line_rate_seconds": cost.line_rate_seconds(cluster),
    }


def _sweep(
    options: argparse.Namespace, shape: ModelShape, cluster: Cluster
) -> tuple[list[dict[str, Any]], int]:
    """Return the figures of every generation layout that fits, fastest switch first, and the number that do not fit."""
    train, limit = options.train, cluster.device_memory_bytes
    switches, num_too_large = [], 0
    largest = train.num_ranks if options.sweep == ALL else cluster.devices_per_node
    for gen in generation_sizes(shape, train, largest):
        figures = None
        held = generation_holding(shape, train.pp_size, gen)
        if held.num_elements * DTYPE_BYTES[options.dtype] <= limit:
            show_status(f"planning {train}:{gen}")
            _, figures = _price(options, shape, cluster, train, gen, with_variants=False)
        if figures is None or figures["peak_weight_bytes_max"] > limit:
            num_too_large += 1
        else:
            switches.append(figures)
    if not switches:
        raise TopologyError(
            f"no generation layout of training {train} fits in the {limit} bytes of a device; choose more pipeline"
            " stages or tensor shards, or devices with more memory"
        )
    switches.sort(
        key=lambda found: (found["seconds_there"] + found["seconds_back"], found["peak_weight_bytes_max"])
    )
    return switches, num_too_large

"""`hybridengine reshard plan`: what switching layouts will cost on a cluster. Starts nothing, needs no torch."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridengine.cli.options import STDOUT, add_json_option, json_file, once
from hybridengine.cli.output_files import check_output_files, check_picture, write_outputs
from hybridengine.cli.switch_tables import diff_lines, plan_lines, sweep_lines
from hybridengine.config.values import parse_bytes
from hybridengine.errors import ConfigError, TopologyError
from hybridengine.families.registry import FAMILIES
from hybridengine.model_presets import PRESETS, resolve_model
from hybridengine.model_shapes import DTYPE_BYTES, ModelShape
from hybridengine.planning.clusters import Cluster, load_cluster
from hybridengine.planning.layouts import check_generates, check_layouts, generation_sizes
from hybridengine.planning.shards import generation_holding
from hybridengine.planning.switch_cost import SwitchCost, SwitchPricer
from hybridengine.topology.generation import GenerationGrid, Grouping
from hybridengine.topology.grid import Grid, RankOrder
from hybridengine.topology.links import LinkClass
from hybridengine.topology.sizes import GenSizes, TrainSizes

PRACTICAL, ALL = "practical", "all"
"""Which generation layouts a sweep lists."""

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

    def price(
        self, train: TrainSizes, gen: GenSizes, *, with_variants: bool = True
    ) -> tuple[SwitchCost, dict[str, Any]]:
        """Return the switch of one layout, and its figures for programs.

        Units: bytes and seconds; "max" is the rank with the most.

        Args:
            with_variants: plan the other rank order, and the gather in one step, as well.

        Raises:
            PlanError: a plan is wrong, which is an error of this project.
        """
        pricer = SwitchPricer(self.shape, self.dtype, self.bucket_bytes)
        generation = GenerationGrid(Grid(train, self.order), gen, self.grouping)
        nodes = self.cluster.node_map(train.num_ranks)
        cost = pricer.price(generation, nodes)
        own = self._variant(cost)
        orders, one_step = {self.order.name.lower(): own}, None
        if with_variants:
            for order in RankOrder:
                if order is not self.order:
                    other = GenerationGrid(Grid(train, order), gen, self.grouping)
                    orders[order.name.lower()] = self._variant(pricer.price(other, nodes))
            if cost.num_steps > 1:
                one_step = self._variant(pricer.price(generation, nodes, two_step=False))
        return cost, {
            "model": self.model_name,
            "num_parameters": self.shape.num_parameters,
            "weight_bytes": self.shape.weight_bytes(self.dtype),
            "dtype": self.dtype,
            "bucket_bytes": self.bucket_bytes,
            "cluster": self.cluster.name,
            "layout": f"{train}:{gen}",
            "train": str(train),
            "gen": str(gen),
            "order": self.order.name.lower(),
            "grouping": self.grouping.value,
            "num_ranks": train.num_ranks,
            "num_engines": generation.num_replicas,
            "nests": generation.nests,
            **own,
            "inter_node_bytes_max": cost.received_bytes_max_by_link[LinkClass.BETWEEN_NODES],
            "num_domains": len(cost.groups),
            "num_buckets": max(len(plan.buckets) for plan in cost.plans),
            "num_audited_moves": cost.check(),
            "num_steps": cost.num_steps,
            **{name: getattr(cost, name) for name in FIGURES},
            "seconds_back": cost.seconds_back(self.cluster),
            "orders": orders,
            "one_step": one_step,
            "planned_domains": [
                {"ranks": repeats[0], "repeats": len(repeats)} for _, repeats in cost.domains
            ],
        }

    def _variant(self, cost: SwitchCost) -> dict[str, Any]:
        """Return what depends on the rank order and on the number of steps."""
        return {
            "num_crossing_domains": cost.num_crossing_domains,
            "received_bytes_max": cost.received_bytes_max,
            "received_bytes_max_by_link": _by_name(cost.received_bytes_max_by_link),
            "received_bytes_total_by_link": _by_name(cost.received_bytes_total_by_link),
            "seconds_there": cost.seconds_there(self.cluster),
            "line_rate_seconds": cost.line_rate_seconds(self.cluster),
        }


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
"""Figures of a `SwitchCost` that are reported as they are."""


def _by_name(by_link: dict[LinkClass, int]) -> dict[str, int]:
    return {link.value: num_bytes for link, num_bytes in by_link.items()}


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
        switches, num_too_large = _sweep(request, options.sweep == ALL)
        lines = sweep_lines(request.cluster, switches, num_too_large, options.sweep == ALL)
        figures = {"results": switches, "num_too_large": num_too_large}
    elif options.diff is not None:
        switches = [request.price(train, gen)[1] for train, gen in request.layouts if gen is not None]
        lines = diff_lines(*switches)
        figures = {"results": switches}
    else:
        ((train, gen),) = request.layouts
        assert gen is not None, "request_of asks for --gen"
        cost, figures = request.price(train, gen)
        switches = [figures]
        lines = plan_lines(request.shape, request.cluster, cost, figures)
    text = json.dumps(figures, indent=2)

    def draw(place: Path) -> None:
        from hybridengine.cli.switch_chart import draw_switches

        draw_switches(request.cluster, switches, place)

    try:
        write_outputs({"--json": (json_file(options), text + "\n"), "--plot": (options.plot, draw)})
    finally:
        print(text if options.json == STDOUT else "\n".join(lines))
    return 0


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


def _sweep(request: Request, are_all: bool) -> tuple[list[dict[str, Any]], int]:
    """Return every generation layout whose weights fit, fastest switch first, and how many do not fit."""
    ((train, _),) = request.layouts
    limit = request.cluster.device_memory_bytes
    switches, num_too_large = [], 0
    largest = train.num_ranks if are_all else request.cluster.devices_per_node
    for gen in generation_sizes(request.shape, train, largest):
        figures = None
        held = generation_holding(request.shape, train.pp_size, gen.pp_size, gen.tp_size)
        if held.num_elements * DTYPE_BYTES[request.dtype] <= limit:
            if sys.stderr.isatty():
                print(f"planning {train}:{gen} ...", file=sys.stderr)
            _, figures = request.price(train, gen, with_variants=False)
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


def _choice(option: str, value: str, choices: Sequence[str] | dict[str, int]) -> str:
    if value not in choices:
        raise ConfigError(f"{option} {value!r} does not exist; choose from {', '.join(choices)}")
    return value

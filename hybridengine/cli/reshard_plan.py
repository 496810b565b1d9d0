"""`hybridengine reshard plan`: predict the cost of switching layouts on a cluster. Starts nothing, needs no torch."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridengine.cli.options import add_json_option, byte_size, gen_sizes, parsed, train_sizes
from hybridengine.cli.outputs import check_outputs, emit, show_status
from hybridengine.errors import ConfigError, TopologyError
from hybridengine.families.registry import FAMILIES
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
"""Sets of generation layouts that a sweep can list."""

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


@dataclass(frozen=True)
class SwitchRequest:
    """Model, cluster and layouts of a planned switch."""

    model_name: str
    shape: ModelShape
    cluster: Cluster
    dtype: str
    bucket_bytes: int
    order: RankOrder
    grouping: Grouping
    layouts: tuple[tuple[TrainSizes, GenSizes | None], ...]
    """One layout to plan, two to compare, or one without generation sizes to sweep."""

    def price(
        self, train: TrainSizes, gen: GenSizes, *, with_variants: bool = True
    ) -> tuple[SwitchCost, dict[str, Any]]:
        """Return the cost of the switch of one layout, and its figures as JSON values.

        Units: bytes and seconds; "max" is the largest value of any rank.

        Args:
            with_variants: also plan the other rank order, and the gather in one step.

        Raises:
            PlanError: a plan is wrong because of a bug in this project.
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
        """Return the figures that depend on the rank order and on the number of steps."""
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
"""Attributes of a `SwitchCost` that are reported unchanged."""


def _by_name(by_link: dict[LinkClass, int]) -> dict[str, int]:
    return {link.value: num_bytes for link, num_bytes in by_link.items()}


def add_plan_command(subparsers: Any) -> None:
    """Add `plan` to the sub-commands of `hybridengine reshard`."""
    parser = subparsers.add_parser(
        "plan",
        help="plan the switch for a cluster: bytes, memory, predicted seconds; starts nothing",
        description=DESCRIPTION,
        epilog=EPILOG,
    )
    parser.set_defaults(run=run_plan)
    option = parser.add_argument
    option(
        "--model", required=True, metavar="PRESET_OR_HF_CONFIG", help="a preset, a config.json, or its folder"
    )
    option("--train", type=train_sizes, metavar="P-T-D", help="training sizes, e.g. 8-8-16")
    option("--cluster", required=True, metavar="FILE", help="YAML file of nodes, devices and links")
    option("--nodes", type=int, metavar="N", help="number of nodes, instead of the cluster file's")
    option(
        "--order", choices=[order.name.lower() for order in RankOrder], default="paper",
        help="rank order: paper (tp, pp, dp; default) or megatron",
    )  # fmt: skip
    option(
        "--grouping", choices=[grouping.value for grouping in Grouping], default="interval",
        help="engines: interval (default) or vanilla",
    )  # fmt: skip
    option("--dtype", choices=DTYPE_BYTES, default="bfloat16", help="of the weights (default bfloat16)")
    option(
        "--bucket-bytes", type=byte_size, default="1GiB", metavar="BYTES",
        help="weights in flight at once (default 1GiB)",
    )  # fmt: skip
    add_json_option(parser)
    option(
        "--plot", type=Path, metavar="FILE", help="draw bytes by link and memory over time (.png, .svg, .pdf)"
    )
    layouts = parser.add_mutually_exclusive_group(required=True)
    layouts.add_argument("--gen", type=gen_sizes, metavar="PG-TG", help="generation sizes, e.g. 1-8")
    layouts.add_argument(
        "--diff", nargs=2, type=layout, metavar=("A", "B"),
        help="two layouts, each TRAIN:GEN; or GEN, with --train",
    )  # fmt: skip
    layouts.add_argument(
        "--sweep", nargs="?", choices=[PRACTICAL, ALL], const=PRACTICAL,
        help="every generation layout that fits, best first: practical (default), engines no larger than a training"
        " replica or a node, t_g up to t or a node; all, engines of any size",
    )  # fmt: skip


def run_plan(options: argparse.Namespace) -> int:
    """Carry out the command; return the exit status."""
    request = request_of(options)
    check_outputs(
        {"--json": options.json, "--plot": options.plot},
        {"--model": options.model, "--cluster": options.cluster},
    )
    if options.sweep is not None:
        switches, num_too_large = _sweep(request, options.sweep == ALL)
        lines = sweep_lines(request.cluster, switches, num_too_large)
        figures = {"results": switches, "num_too_large": num_too_large}
    elif options.diff is not None:
        switches = [request.price(train, gen)[1] for train, gen in request.layouts if gen]
        lines = diff_lines(*switches)
        figures = {"results": switches}
    else:
        ((train, gen),) = request.layouts
        assert gen is not None, "request_of asks for --gen"
        cost, figures = request.price(train, gen)
        switches = [figures]
        lines = plan_lines(request.shape, request.cluster, cost, figures)

    def draw(place: Path) -> None:
        from hybridengine.planning.switch.switch_chart import draw_switches

        draw_switches(request.cluster, switches, place)

    emit(options, figures, lines, {"--plot": (options.plot, draw)})
    return 0


def request_of(options: argparse.Namespace) -> SwitchRequest:
    """Return the request that the options describe.

    Raises:
        ConfigError, TopologyError: invalid options, files or layouts.
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
    return SwitchRequest(
        model_name=options.model,
        shape=shape,
        cluster=cluster,
        dtype=options.dtype,
        bucket_bytes=options.bucket_bytes,
        order=RankOrder[options.order.upper()],
        grouping=Grouping(options.grouping),
        layouts=tuple(layouts),
    )


@parsed
def layout(text: str) -> tuple[TrainSizes | None, GenSizes]:
    """Return the training sizes (None if omitted) and generation sizes in `text`: TRAIN:GEN or GEN."""
    train, colon, gen = text.rpartition(":")
    return TrainSizes.parse(train) if colon else None, GenSizes.parse(gen)


def _layouts(options: argparse.Namespace) -> list[tuple[TrainSizes, GenSizes | None]]:
    """Return the layouts to plan, not yet checked against the model."""
    named: list[tuple[TrainSizes | None, GenSizes | None]] = options.diff or [(None, options.gen)]
    if (options.train is None) == any(train is None for train, _ in named):
        raise ConfigError(
            "--train gives the training sizes of --gen, --sweep, and layouts of --diff that name none; give it for those"
            " alone, e.g. --train 8-8-16"
        )
    return [(train or options.train, gen) for train, gen in named]


def _sweep(request: SwitchRequest, are_all: bool) -> tuple[list[dict[str, Any]], int]:
    """Return the figures of every generation layout that fits, fastest switch first, and the number that do not fit."""
    ((train, _),) = request.layouts
    limit = request.cluster.device_memory_bytes
    switches, num_too_large = [], 0
    largest = train.num_ranks if are_all else request.cluster.devices_per_node
    for gen in generation_sizes(request.shape, train, largest):
        figures = None
        held = generation_holding(request.shape, train.pp_size, gen.pp_size, gen.tp_size)
        if held.num_elements * DTYPE_BYTES[request.dtype] <= limit:
            show_status(f"planning {train}:{gen}")
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

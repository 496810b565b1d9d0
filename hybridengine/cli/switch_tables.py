"""Planned switches as text: one in detail, several side by side, many in a table."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from hybridengine.metrics.formatting import format_bytes, format_seconds
from hybridengine.metrics.group_text import format_groups, format_ranks, named_groups
from hybridengine.model_shapes import ModelShape
from hybridengine.planning.clusters import Cluster
from hybridengine.planning.switch_plan import SwitchPlan, Variant
from hybridengine.topology.links import LinkClass

NUM_MOMENTS = 9
"""Moments of a switch whose memory is shown."""
PREDICTED = "predicted from the cluster file's figures, not measured"


def plan_lines(name: str, shape: ModelShape, dtype: str, cluster: Cluster, plan: SwitchPlan) -> list[str]:
    """Everything about one switch."""
    grid, gen = plan.generation.train, plan.generation
    num_nodes = -(-grid.num_ranks // cluster.devices_per_node)
    return [
        f"model: {name}, {shape.num_layers} layers, {shape.num_parameters:,} parameters,"
        f" {format_bytes(shape.weight_bytes(dtype))} in {dtype}",
        f"cluster: {cluster.name}; {grid.num_ranks} ranks on {num_nodes} of {cluster.nodes} nodes",
        f"layout: training {grid.sizes} (p-t-d), {grid.order.name.lower()} order; generation {gen.sizes} (p_g-t_g) in"
        f" {gen.num_replicas} engine(s), {gen.grouping.value} grouping,"
        f" {'shards nest' if gen.nests else 'shards do not nest'}",
        *_group_lines(plan),
        "",
        *_traffic_lines(plan),
        "",
        *_memory_lines(cluster, plan),
        "",
        f"time ({PREDICTED})",
        f"  to generation {format_seconds(plan.there.seconds_there)}; the busiest link alone takes"
        f" {format_seconds(plan.there.line_rate_seconds)} for its bytes",
        f"  back          {format_seconds(plan.seconds_back)}, inside each device",
        "",
        *_variant_lines(cluster, plan),
    ]


def _group_lines(plan: SwitchPlan) -> list[str]:
    grid, gen = plan.generation.train, plan.generation
    rows = [
        *((f"training {name}", groups) for name, groups in named_groups(grid)),
        *((f"generation {name}", groups) for name, groups in named_groups(gen)),
        ("gather domains", sorted(chain(*plan.domains))),
    ]
    return [
        "",
        "groups",
        *(f"  {name:<20} {format_groups(groups, shown=4)}" for name, groups in rows),
        f"  {plan.there.num_crossing_domains} of {plan.num_domains} gather domains cross nodes",
        f"  {len(plan.domains)} distinct plan(s), {plan.num_buckets} buckets: "
        + ", ".join(f"{format_ranks(like[0])} and {len(like) - 1} like it" for like in plan.domains[:4])
        + (", ..." if len(plan.domains) > 4 else ""),
        f"  audited, {plan.num_audited_moves:,} moves there and back: every element of every shard is written once, none"
        " is lost",
    ]


def _traffic_lines(plan: SwitchPlan) -> list[str]:
    there = plan.there
    rows = [["moved to generation", "most of a rank", "all ranks"]]
    rows.append(["  same device (copied)", format_bytes(plan.copied_bytes_max), ""])
    for link in (LinkClass.SAME_NODE, LinkClass.BETWEEN_NODES):
        rows.append(
            [
                f"  {link.value.replace('_', ' ')} (received)",
                format_bytes(there.received_bytes_max_by_link[link.value]),
                format_bytes(there.received_bytes_total_by_link[link.value]),
            ]
        )
    total = sum(there.received_bytes_total_by_link.values())
    rows.append(["  received in all", format_bytes(there.received_bytes_max), format_bytes(total)])
    rows.append(["  beyond nested shards", format_bytes(plan.extra_bytes_max), ""])
    return aligned(rows)


def _memory_lines(cluster: Cluster, plan: SwitchPlan) -> list[str]:
    share = plan.peak_weight_bytes_max / cluster.device_memory_bytes
    return [
        "weights in memory (rank with the most)",
        f"  training shard    {format_bytes(plan.train_shard_bytes_max)}",
        f"  generation shard  {format_bytes(plan.gen_shard_bytes_max)}, redundant beside it"
        f" {format_bytes(plan.redundant_bytes_max)}",
        f"  peak              {format_bytes(plan.peak_weight_bytes_max)}, {share:.0%} of the device's"
        f" {format_bytes(cluster.device_memory_bytes)}" + ("; IT DOES NOT FIT" if share > 1 else ""),
        f"  over the way there  {_course(plan.memory_bytes_there)}",
        f"  over the way back   {_course(plan.memory_bytes_back)}",
    ]


def _course(memory: Sequence[int]) -> str:
    """Bytes at a few moments, evenly from the first to the last."""
    last, count = len(memory) - 1, min(NUM_MOMENTS, len(memory))
    moments = [memory[round(index * last / max(1, count - 1))] for index in range(count)]
    return ", ".join(map(format_bytes, moments))


def _variant_lines(cluster: Cluster, plan: SwitchPlan) -> list[str]:
    """The other rank order and the gather in one step, beside what is planned."""
    planned = plan.generation.train.order.name.lower()
    rows = [["alternatives", "domains across nodes", "between nodes, a rank", "all ranks", "to generation"]]
    for order, variant in plan.orders.items():
        mark = " (planned)" if order == planned else ""
        rows.append([f"  {order} order{mark}", *_variant_cells(variant, plan.num_domains)])
    if plan.one_step is not None:
        rows.append([f"  {planned} order, one step", *_variant_cells(plan.one_step, plan.num_domains)])
    steps = (
        "the plan gathers in two steps: a box enters a node once and is passed on inside it"
        if plan.one_step is not None
        else "the plan gathers in one step: nothing enters a node twice"
    )
    return [*aligned(rows), f"  {order_verdict(cluster, plan)}", f"  {steps}"]


def _variant_cells(variant: Variant, num_domains: int) -> list[str]:
    return [
        f"{variant.num_crossing_domains} of {num_domains}",
        format_bytes(variant.inter_node_bytes_max),
        format_bytes(variant.received_bytes_total_by_link[LinkClass.BETWEEN_NODES.value]),
        format_seconds(variant.seconds_there),
    ]


def order_verdict(cluster: Cluster, plan: SwitchPlan) -> str:
    """Which rank order keeps gather domains inside nodes, in words."""
    keeps = [order for order, variant in plan.orders.items() if not variant.num_crossing_domains]
    if len(keeps) == len(plan.orders):
        return "either rank order keeps every gather domain inside a node"
    if keeps:
        return f"the {keeps[0]} order keeps every gather domain inside a node, the other does not"
    size = max(len(ranks) for ranks, *_ in plan.domains)
    least = min(plan.orders, key=lambda order: plan.orders[order].inter_node_bytes_max)
    most = max(plan.orders, key=lambda order: plan.orders[order].inter_node_bytes_max)
    reason = f"domains have {size} ranks of replicas of {plan.generation.train.sizes.model_parallel_size}"
    verdict = f"neither rank order keeps gather domains inside nodes of {cluster.devices_per_node} ({reason})"
    if plan.orders[least].inter_node_bytes_max == plan.orders[most].inter_node_bytes_max:
        return f"{verdict}; both cost the same"
    return f"{verdict}; {least} sends less between them"


def layout_name(plan: SwitchPlan) -> str:
    """TRAIN:GEN as the command line takes it."""
    return f"{plan.generation.train.sizes}:{plan.generation.sizes}"


def diff_lines(one: SwitchPlan, other: SwitchPlan) -> list[str]:
    """Two switches side by side, and the second as a share of the first."""
    rows = [["", layout_name(one), layout_name(other), "second / first"]]
    for name, figure in _DIFFERENCES.items():
        first, second = figure(one), figure(other)
        show = format_seconds if name.startswith("seconds") else format_bytes
        if name.startswith("number"):
            show = str
        rows.append([name, show(first), show(second), f"{second / first:.2f}" if first else "-"])
    return [*aligned(rows), f"  seconds are {PREDICTED}; bytes are those of the rank with the most"]


_DIFFERENCES = {
    "number of engines": lambda plan: plan.generation.num_replicas,
    "number of domains across nodes": lambda plan: plan.there.num_crossing_domains,
    "received": lambda plan: plan.there.received_bytes_max,
    "received, same node": lambda plan: plan.there.received_bytes_max_by_link[LinkClass.SAME_NODE.value],
    "received, between nodes": lambda plan: plan.there.inter_node_bytes_max,
    "received beyond nested shards": lambda plan: plan.extra_bytes_max,
    "training shard": lambda plan: plan.train_shard_bytes_max,
    "generation shard": lambda plan: plan.gen_shard_bytes_max,
    "peak weights": lambda plan: plan.peak_weight_bytes_max,
    "redundant": lambda plan: plan.redundant_bytes_max,
    "seconds there": lambda plan: plan.there.seconds_there,
    "seconds back": lambda plan: plan.seconds_back,
}
"""What is compared -> its figure."""


def sweep_lines(
    cluster: Cluster, plans: Sequence[SwitchPlan], num_too_large: int, are_all: bool
) -> list[str]:
    """Every layout on a line, in the order given.

    Args:
        are_all: also those of engines that nobody would want.
    """
    header = [
        "p_g-t_g",
        "engines",
        "there",
        "back",
        "received",
        "between nodes",
        "peak",
        "redundant",
        "left for KV",
    ]
    rows = [header]
    for plan in plans:
        held = plan.memory_bytes_there[-1]
        rows.append(
            [
                str(plan.generation.sizes),
                str(plan.generation.num_replicas),
                format_seconds(plan.there.seconds_there),
                format_seconds(plan.seconds_back),
                format_bytes(plan.there.received_bytes_max),
                format_bytes(plan.there.inter_node_bytes_max),
                format_bytes(plan.peak_weight_bytes_max),
                format_bytes(plan.redundant_bytes_max),
                format_bytes(cluster.device_memory_bytes - held),
            ]
        )
    rule = [
        "  listed are engines no larger than a training replica or a node, t_g up to t or a node; --sweep all has the"
        " others as well"
    ]
    too_large = [
        f"  {num_too_large} more layout(s) left out: their weights exceed the device's"
        f" {format_bytes(cluster.device_memory_bytes)}"
    ]
    return [
        *aligned(rows),
        f"  fastest switch there and back first, {PREDICTED}; how fast the engines then generate is another matter",
        *(too_large if num_too_large else []),
        *([] if are_all else rule),
    ]


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as lines: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if index == 0 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]

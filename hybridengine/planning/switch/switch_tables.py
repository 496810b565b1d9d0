"""Text of planned switches: one in detail, two side by side, many in a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hybridengine.formatting import aligned, cell, format_bytes, format_seconds, table
from hybridengine.models.shapes import ModelShape
from hybridengine.planning.costs.clusters import Cluster
from hybridengine.planning.switch.switch_cost import SwitchCost
from hybridengine.topology.grid import format_groups, format_ranks, named_groups

Figures = Mapping[str, Any]
"""Figures of a switch, as written by `--json`."""
PREDICTED = "predicted from the cluster file's figures, not measured"


def plan_lines(shape: ModelShape, cluster: Cluster, cost: SwitchCost, figures: Figures) -> list[str]:
    """Return the lines of a detailed description of one switch."""
    num_nodes = -(-figures["num_ranks"] // cluster.devices_per_node)
    return [
        f"model: {figures['model']}, {shape.num_layers} layers, {shape.num_parameters:,} parameters,"
        f" {format_bytes(figures['weight_bytes'])} in {figures['dtype']}",
        f"cluster: {cluster.name}; {figures['num_ranks']} ranks on {num_nodes} of {cluster.nodes} nodes",
        f"layout: training {figures['train']} (p-t-d), {figures['order']} order; generation {figures['gen']} (p_g-t_g) in"
        f" {figures['num_engines']} engine(s), {figures['grouping']} grouping,"
        f" {'shards nest' if figures['nests'] else 'shards do not nest'}",
        "",
        *_group_lines(cost, figures),
        "",
        *_traffic_lines(figures),
        "",
        *_memory_lines(cluster, figures),
        "",
        f"time ({PREDICTED})",
        f"  to generation {format_seconds(figures['seconds_there'])}; the busiest link alone takes"
        f" {format_seconds(figures['line_rate_seconds'])} for its bytes",
        f"  back          {format_seconds(figures['seconds_back'])}, inside each device",
        "",
        *_variant_lines(figures),
    ]


def _group_lines(cost: SwitchCost, figures: Figures) -> list[str]:
    rows = [
        *((f"training {name}", groups) for name, groups in named_groups(cost.generation.train)),
        *((f"generation {name}", groups) for name, groups in named_groups(cost.generation)),
        ("gather domains", cost.groups),
    ]
    alike = [
        f"{format_ranks(domain['ranks'])} and {domain['repeats'] - 1} like it"
        for domain in figures["planned_domains"]
    ]
    return [
        "groups",
        *(f"  {name:<20} {format_groups(groups, shown=4)}" for name, groups in rows),
        f"  {figures['num_crossing_domains']} of {figures['num_domains']} gather domains cross nodes",
        f"  {len(alike)} distinct plan(s), {figures['num_buckets']} buckets: "
        + ", ".join(alike[:4] + ["..."] * (len(alike) > 4)),
        f"  audited, {figures['num_audited_moves']:,} moves there and back: every element of every shard is written once,"
        " none is lost",
    ]


def _traffic_lines(figures: Figures) -> list[str]:
    most, total = figures["received_bytes_max_by_link"], figures["received_bytes_total_by_link"]
    rows = [
        ("  same device (copied)", figures["copied_bytes_max"], None),
        *((f"  {link.replace('_', ' ')} (received)", most[link], total[link]) for link in most),
        ("  received in all", figures["received_bytes_max"], sum(total.values())),
        ("  beyond nested shards", figures["extra_bytes_max"], None),
    ]
    cells = [[name, cell("bytes", of_rank), cell("bytes", of_all)] for name, of_rank, of_all in rows]
    return aligned([["moved to generation", "most of a rank", "all ranks"], *cells])


def _memory_lines(cluster: Cluster, figures: Figures) -> list[str]:
    share = figures["peak_weight_bytes_max"] / cluster.device_memory_bytes
    return [
        "weights in memory (rank with the most)",
        f"  training shard    {format_bytes(figures['train_shard_bytes_max'])}",
        f"  generation shard  {format_bytes(figures['gen_shard_bytes_max'])}, redundant beside it"
        f" {format_bytes(figures['redundant_bytes_max'])}",
        f"  peak              {format_bytes(figures['peak_weight_bytes_max'])}, {share:.0%} of the device's"
        f" {format_bytes(cluster.device_memory_bytes)}" + ("; IT DOES NOT FIT" if share > 1 else ""),
    ]


def variants(figures: Figures) -> dict[str, Figures]:
    """Return the planned switch, the other rank order and the one-step gather, by name."""
    planned, one_step = figures["order"], figures["one_step"]
    found = {
        f"{order} order{' (planned)' if order == planned else ''}": variant
        for order, variant in figures["orders"].items()
    }
    return found if one_step is None else {**found, f"{planned} order, one step": one_step}


def _variant_lines(figures: Figures) -> list[str]:
    """Return the lines of a table that compares the planned switch with the other rank order and the one-step gather."""
    steps = "one step: nothing enters a node twice"
    if figures["one_step"] is not None:
        steps = "two steps: a box enters a node once and is passed on inside it"
    rows = [
        {
            **variant,
            "variant": f"  {name}",
            "crossing": f"{variant['num_crossing_domains']} of {figures['num_domains']}",
            "bytes_max": variant["received_bytes_max_by_link"]["between_nodes"],
            "bytes_total": variant["received_bytes_total_by_link"]["between_nodes"],
        }
        for name, variant in variants(figures).items()
    ]
    return [*table(rows, VARIANT), f"  the plan gathers in {steps}"]


VARIANT = {
    "variant": "alternatives",
    "crossing": "domains across nodes",
    "bytes_max": "between nodes, a rank",
    "bytes_total": "all ranks",
    "seconds_there": "to generation",
}
"""Heading of each figure of a variant."""
DIFFERENCES = {
    "num_engines": "number of engines",
    "num_crossing_domains": "number of domains across nodes",
    "received_bytes_max": "received",
    "same_node_bytes_max": "received, same node",
    "inter_node_bytes_max": "received, between nodes",
    "extra_bytes_max": "received beyond nested shards",
    "train_shard_bytes_max": "training shard",
    "gen_shard_bytes_max": "generation shard",
    "peak_weight_bytes_max": "peak weights",
    "redundant_bytes_max": "redundant",
    "seconds_there": "seconds there",
    "seconds_back": "seconds back",
}
"""Label of each figure that `diff_lines` compares."""


def diff_lines(*switches: Figures) -> list[str]:
    """Return the lines of a table of two switches and their ratio."""
    one, other = (
        {**each, "same_node_bytes_max": each["received_bytes_max_by_link"]["same_node"]} for each in switches
    )
    rows = [["", one["layout"], other["layout"], "second / first"]]
    for name, label in DIFFERENCES.items():
        ratio = cell("ratio", other[name] / one[name] if one[name] else None)
        rows.append([label, cell(name, one[name]), cell(name, other[name]), ratio])
    return [*aligned(rows), f"  seconds are {PREDICTED}; bytes are those of the rank with the most"]


SWEPT = {
    "gen": "p_g-t_g",
    "num_engines": "engines",
    "seconds_there": "there",
    "seconds_back": "back",
    "received_bytes_max": "received",
    "inter_node_bytes_max": "between nodes",
    "peak_weight_bytes_max": "peak",
    "redundant_bytes_max": "redundant",
    "left_bytes": "left for KV",
}
"""Heading of each figure that `sweep_lines` lists."""


def sweep_lines(cluster: Cluster, switches: Sequence[Figures], num_too_large: int) -> list[str]:
    """Return the lines of a table with one row per layout, in the given order."""
    device_bytes = cluster.device_memory_bytes
    rows = [
        {**figures, "left_bytes": device_bytes - figures["memory_bytes_there"][-1]} for figures in switches
    ]
    lines = [*table(rows, SWEPT), f"  fastest switch there and back first, {PREDICTED}"]
    if num_too_large:
        lines.append(f"  {num_too_large} more layout(s) exceed the device's {format_bytes(device_bytes)}")
    return lines

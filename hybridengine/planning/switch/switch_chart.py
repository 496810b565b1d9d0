"""Charts of planned switches: bytes received over each class of links, and weights in memory over time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from hybridengine.charts import INK, drawing, grouped_bars
from hybridengine.formatting import format_seconds
from hybridengine.planning.costs.clusters import Cluster
from hybridengine.planning.switch.switch_tables import Figures, variants
from hybridengine.topology.links import LinkClass

GIB = 2**30
COLOURS = {LinkClass.SAME_NODE: "#56B4E9", LinkClass.BETWEEN_NODES: "#D55E00"}
MAX_CURVES = 6
"""Largest number of layouts whose memory is drawn, so that curves stay distinguishable."""


def draw_switches(cluster: Cluster, switches: Sequence[Figures], file: Path) -> None:
    """Draw one switch with its variants, or several layouts, to `file`."""
    bars, first = _bars(switches), switches[0]
    title = (
        f"{first['model']} on {cluster.name}, {first['num_ranks']} ranks in {first['order']} order: bytes counted from"
        " the plan, seconds predicted"
    )
    with drawing(file, title, 11, max(3.6, 1.6 + 0.42 * len(bars))) as figure:
        left, right = figure.subplots(1, 2, width_ratios=(1.15, 1))
        _draw_received(left, bars)
        _draw_memory(right, switches[:MAX_CURVES], cluster)
        if len(switches) > MAX_CURVES:
            label = right.get_xlabel()
            right.set_xlabel(f"{label}; the first {MAX_CURVES} of {len(switches)} layouts")


def _bars(switches: Sequence[Figures]) -> list[tuple[str, Figures]]:
    """Return the label of every bar, top to bottom, and the switch that it shows."""
    if len(switches) > 1:
        return [(figures["layout"], figures) for figures in switches]
    (figures,) = switches
    return [(f"{figures['layout']}\n{name}", variant) for name, variant in variants(figures).items()]


def _draw_received(axes: Axes, bars: Sequence[tuple[str, Figures]]) -> None:
    received = [variant["received_bytes_max_by_link"] for _, variant in bars]
    series = {
        link.value.replace("_", " "): (colour, [by_link[link.value] / GIB for by_link in received], None)
        for link, colour in COLOURS.items()
    }
    grouped_bars(axes, [label for label, _ in bars], series)
    for index, (_, variant) in enumerate(bars):
        end = max(received[index].values()) / GIB + 0.012 * axes.get_xlim()[1]
        axes.text(end, index, format_seconds(variant["seconds_there"]), va="center", color=INK)
    axes.set_xlabel("GiB received, of the rank with the most on each link; seconds to generation")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)


def _draw_memory(axes: Axes, switches: Sequence[Figures], cluster: Cluster) -> None:
    curves: dict[str, Any] = {}
    for figures in switches:
        there, back = (
            [held / GIB for held in memory]
            for memory in (figures["memory_bytes_there"], figures["memory_bytes_back"])
        )
        x = [index / (len(there) - 1) for index in range(len(there))]
        x += [1.15 + index / (len(back) - 1) for index in range(len(back))]
        curves[figures["layout"]] = axes.plot(x, there + back, linewidth=1.4, label=figures["layout"])[0]
    highest = max(figures["peak_weight_bytes_max"] for figures in switches) / GIB
    if len(switches) == 1:
        both = (switches[0]["train_shard_bytes_max"] + switches[0]["gen_shard_bytes_max"]) / GIB
        highest = max(highest, both)
        axes.axhline(both, color=INK, linewidth=0.9, linestyle=":", label="both shards at once")
    device = cluster.device_memory_bytes / GIB
    if device < 1.6 * highest:
        axes.axhline(device, color=INK, linewidth=0.9, linestyle="--", label="device memory")
    axes.set_ylim(0, 1.08 * max(highest, device if device < 1.6 * highest else 0))
    axes.set_xticks([0.5, 1.075, 1.65], ["to generation", "generating", "back to training"])
    axes.tick_params(axis="x", length=0)
    axes.set_xlabel("bucket by bucket; not to the scale of time")
    axes.axvspan(1.0, 1.15, color="#EEEEEE")
    axes.set_ylabel("GiB of weights on the rank with the most")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3)

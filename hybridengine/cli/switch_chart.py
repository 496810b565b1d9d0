"""Planned switches as a picture: what a rank receives over each class of links, and its weights over time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")
from matplotlib import pyplot
from matplotlib.axes import Axes

from hybridengine.cli.chart_style import STYLE
from hybridengine.cli.switch_tables import Figures
from hybridengine.metrics.formatting import format_seconds
from hybridengine.planning.clusters import Cluster
from hybridengine.topology.links import LinkClass

GIB = 2**30
COLOURS = {LinkClass.SAME_NODE: "#56B4E9", LinkClass.BETWEEN_NODES: "#D55E00"}
INK = "#333333"
MAX_CURVES = 6
"""Layouts whose memory is drawn; more curves cannot be told apart."""


def draw_switches(cluster: Cluster, switches: Sequence[Figures], file: Path) -> None:
    """Draw one switch with its alternatives, or several layouts, into `file`."""
    bars = _bars(switches)
    height = max(3.6, 1.6 + 0.42 * len(bars))
    with matplotlib.rc_context(STYLE):
        figure, (left, right) = pyplot.subplots(
            1, 2, figsize=(11, height), layout="constrained", width_ratios=(1.15, 1)
        )
        _draw_received(left, bars)
        _draw_memory(right, switches[:MAX_CURVES], cluster)
        if len(switches) > MAX_CURVES:
            label = right.get_xlabel()
            right.set_xlabel(f"{label}; the first {MAX_CURVES} of {len(switches)} layouts")
        first = switches[0]
        figure.suptitle(
            f"{first['model']} on {cluster.name}, {first['num_ranks']} ranks in {first['order']} order: bytes counted"
            " from the plan, seconds predicted",
            fontsize=10,
            parse_math=False,
        )
        figure.savefig(file, dpi=130, metadata={"Date": None} if file.suffix.lower() == ".svg" else None)
        pyplot.close(figure)


def _bars(switches: Sequence[Figures]) -> list[tuple[str, Figures]]:
    """Return the label of every bar, top to bottom, and the switch that it shows."""
    if len(switches) > 1:
        return [(figures["layout"], figures) for figures in switches]
    (figures,) = switches
    variants = {
        f"{order} order" + (" (planned)" if order == figures["order"] else ""): variant
        for order, variant in figures["orders"].items()
    }
    if figures["one_step"] is not None:
        variants["one step"] = figures["one_step"]
    return [(f"{figures['layout']}\n{name}", variant) for name, variant in variants.items()]


def _draw_received(axes: Axes, bars: Sequence[tuple[str, Figures]]) -> None:
    received = [variant["received_bytes_max_by_link"] for _, variant in bars]
    largest = max(max(by_link.values()) for by_link in received) / GIB or 1.0
    for offset, (link, colour) in zip((-0.19, 0.19), COLOURS.items(), strict=True):
        widths = [by_link[link.value] / GIB for by_link in received]
        places = [index + offset for index in range(len(bars))]
        axes.barh(places, widths, color=colour, label=link.value.replace("_", " "), height=0.36)
    for index, (_, variant) in enumerate(bars):
        end = max(received[index].values()) / GIB
        seconds = format_seconds(variant["seconds_there"])
        axes.text(end + 0.015 * largest, index, seconds, va="center", color=INK)
    axes.set_yticks(range(len(bars)), [label for label, _ in bars])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.18 * largest)
    axes.set_xlabel("GiB received, of the rank with the most on each link; seconds to generation")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False)


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
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, frameon=False)

"""The switch over slow links between two hosts: in two steps, in one, by megatron-core's refit, and by a full gather.

    .venv/bin/python scripts/measure_links.py                        about ten minutes on two cores; needs root
    .venv/bin/python scripts/measure_links.py --repetitions 1        sooner done, less accurate
    .venv/bin/python scripts/measure_links.py --plot links.svg       also draws the figures

Two hosts on this machine (tests/machines/hosts.py) have four ranks each, and a cable of the given rate between them.
Every method moves the same weights on the same ranks in turn, and is checked before it is measured. Bytes between hosts
are counted on the wire, headers included, in the direction with more; seconds are medians of the slowest rank.
Predictions are those of `hybridengine reshard plan` for a cluster with measured rates: of the cable by an exchange of all
ranks with the other host, inside a host as by `hybridengine calibrate` on one host; both hosts share the cores.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from hybridengine.bench.calibration.machine_rates import measured_rates
from hybridengine.bench.reshard.spec import DEFAULT_MODEL, BenchSpec, LayoutPair, MethodName
from hybridengine.charts import INK, drawing, grouped_bars
from hybridengine.cli.options import between
from hybridengine.cli.outputs import check_outputs
from hybridengine.errors import ConfigError
from hybridengine.formatting import aligned, format_bytes, format_seconds
from hybridengine.planning.costs.clusters import Cluster
from hybridengine.planning.switch.switch_cost import SwitchCost, SwitchPricer
from hybridengine.topology.generation import GenerationGrid
from hybridengine.topology.grid import Grid
from hybridengine.topology.links import LinkClass
from hybridengine.topology.sizes import GenSizes, TrainSizes
from tests.machines.hosts import joined_hosts
from tests.machines.switch_ranks import ONE_STEP, SwitchRanks
from tests.machines.traffic import counted, on_the_wire

HOSTS = ("first", "second")
PAIRS = tuple(LayoutPair(TrainSizes(2, 4, 1), GenSizes(1, gen_tp)) for gen_tp in (2, 1))
"""A stage of t = 4 on each host, and t_g = 2 and 1."""
LABELS = {
    MethodName.MICRO_DP.value: "two steps",
    ONE_STEP: "one step",
    MethodName.MEGATRON_CORE.value: "megatron-core",
    MethodName.FULL.value: "full gather",
}
RATES_MBIT_S = (200.0, 1000.0)
QUEUE_S = 2.0
"""Length of the queues: a host's own interface holds its senders back, where a short queue would drop their frames."""
EXCHANGED_BYTES, EXCHANGES = 4 * 2**20, 5
SPEC = BenchSpec(
    DEFAULT_MODEL,
    PAIRS,
    methods=(MethodName.MICRO_DP, MethodName.FULL, MethodName.MEGATRON_CORE),
    num_nodes=len(HOSTS),
)


@dataclass(frozen=True)
class Line:
    """Figures of a method on a pair of layouts at one rate."""

    pair: LayoutPair
    rate_mbit_s: float
    method: str
    sent_bytes: int
    """Bytes of frames from one host to the other, in the direction with more."""
    planned_bytes: float | None
    """The plan's bytes with headers; None for methods without a plan."""
    seconds: tuple[float, ...]
    """Seconds of each repetition."""
    predicted_s: float | None

    @property
    def median_s(self) -> float:
        return median(self.seconds)

    @property
    def least_s(self) -> float:
        """Seconds of the cable for the bytes that were counted."""
        return self.sent_bytes * 8 / (1e6 * self.rate_mbit_s)


def main() -> None:
    arguments = parse()
    inside, latency_s = calibrated()
    lines = []
    for pair in PAIRS:
        for line in measured(pair, arguments.rates, arguments.repetitions, inside, latency_s):
            lines.append(line)
            print(f"{line.pair} at {line.rate_mbit_s:g} Mbit/s: {line.method} {line.seconds}", flush=True)
    print("\n".join(aligned(table(lines))))
    if arguments.plot:
        draw(lines, arguments.plot)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    rate, many = between(1, 10_000, float), between(1, 100)
    parser.add_argument("--rates", type=rate, nargs="+", default=RATES_MBIT_S, help="Mbit/s of the cables")
    parser.add_argument("--repetitions", type=many, default=5, help="counted ones of each method (5)")
    parser.add_argument("--plot", type=Path, help="draw the figures to a file (.png, .svg, .pdf)")
    arguments = parser.parse_args()
    try:
        check_outputs({"--plot": arguments.plot}, {})
    except ConfigError as error:
        parser.error(str(error))
    if os.geteuid():
        parser.error("hosts are made by root alone; start it as root")
    return arguments


def calibrated() -> tuple[dict[str, Any], float]:
    """Return the sections of a cluster file with the rates inside one host, and the latency between two hosts."""
    pair = PAIRS[0]
    with joined_hosts(["alone"]) as network:
        sections = measured_rates(SwitchRanks(network.hosts, SPEC, pair), on_gpus=False)
    for link in ("same_device", "same_node"):  # the cores of one host are those of all
        sections["links"][link]["node_bytes_per_s"] /= len(HOSTS)
    with joined_hosts(HOSTS) as network:
        one_each = LayoutPair(TrainSizes(1, 2, 1), GenSizes(1, 2))
        ranks = SwitchRanks(network.hosts, SPEC, one_each)
        return sections, max(ranks.call("send", 8, 1)) / 2


def measured(
    pair: LayoutPair, rates: Iterable[float], repetitions: int, inside: dict[str, Any], latency_s: float
) -> Iterable[Line]:
    """Yield the figures of every method at every rate."""
    plans = {MethodName.MICRO_DP.value: priced(pair, True), ONE_STEP: priced(pair, False)}
    with joined_hosts(HOSTS) as network:
        ranks = SwitchRanks(network.hosts, SPEC, pair)
        for version, label in enumerate(LABELS, start=1):
            ranks.call("there", label, version)
            ranks.call("back", label)
        for rate in rates:
            for host in HOSTS:
                network.change(host, rate_bits_s=1e6 * rate, queue_s=QUEUE_S)
            seconds: dict[str, list[float]] = {label: [] for label in LABELS}
            sent: dict[str, list[int]] = {label: [] for label in LABELS}
            exchanged: list[float] = []
            for _ in range(repetitions):
                exchanged.append(exchanged_per_s(ranks))
                for label in LABELS:
                    with counted(network) as there:
                        answers = ranks.call("there", label)
                    ranks.call("back", label)
                    seconds[label].append(max(took_s for took_s, _ in answers))
                    sent[label].append(max(there.values()))
            data_per_s = median(exchanged)
            print(f"{rate:g} Mbit/s carry {data_per_s * 8 / 1e6:.0f} Mbit/s of messages each way", flush=True)
            cluster = cluster_of(rate, data_per_s, inside, latency_s)
            for label, name in LABELS.items():
                plan = plans.get(label)
                planned = plan and plan.received_bytes_total_by_link[LinkClass.BETWEEN_NODES] / len(HOSTS)
                yield Line(
                    pair,
                    rate,
                    name,
                    round(median(sent[label])),
                    planned and on_the_wire(planned),
                    tuple(seconds[label]),
                    plan and plan.seconds_there(cluster),
                )


def priced(pair: LayoutPair, two_step: bool) -> SwitchCost:
    generation = GenerationGrid(Grid(pair.train), pair.gen)
    return SwitchPricer(SPEC.shape, SPEC.dtype, SPEC.bucket_bytes).price(
        generation, SPEC.nodes(pair), two_step
    )


def exchanged_per_s(ranks: SwitchRanks) -> float:
    """Return the bytes of messages that the cable carries per second in each direction, while it carries both."""
    exchanged = ranks.num_ranks // len(HOSTS) * EXCHANGED_BYTES * EXCHANGES
    return exchanged / max(ranks.call("exchange", EXCHANGED_BYTES, EXCHANGES))


def cluster_of(rate_mbit_s: float, data_per_s: float, inside: dict[str, Any], latency_s: float) -> Cluster:
    """Return the two hosts as a cluster; a cable's rate is shared by all ranks of its host."""
    network = {"bytes_per_s": data_per_s, "node_bytes_per_s": data_per_s, "latency_s": latency_s}
    return Cluster.model_validate(
        {
            "name": f"two hosts at {rate_mbit_s:g} Mbit/s",
            "source": "Measured by scripts/measure_links.py.",
            "nodes": len(HOSTS),
            "devices_per_node": PAIRS[0].train.num_ranks // len(HOSTS),
            "device_memory_bytes": "1GiB",
            **inside,
            "links": {**inside["links"], "between_nodes": network},
        }
    )


def table(lines: Iterable[Line]) -> list[list[str]]:
    rows = [
        ["train -> gen", "Mbit/s", "method", "between hosts", "of plan", "seconds", "range", "cable alone",
         "predicted", "over predicted"]
    ]  # fmt: skip
    for line in lines:
        rows.append(
            [
                str(line.pair),
                f"{line.rate_mbit_s:g}",
                line.method,
                format_bytes(line.sent_bytes),
                f"{line.sent_bytes / line.planned_bytes:.3f}" if line.planned_bytes else "-",
                format_seconds(line.median_s),
                f"{min(line.seconds):.2f}-{max(line.seconds):.2f}",
                format_seconds(line.least_s),
                format_seconds(line.predicted_s) if line.predicted_s else "-",
                f"{line.median_s / line.predicted_s:.2f}" if line.predicted_s else "-",
            ]
        )
    return rows


def draw(lines: list[Line], file: Path) -> None:
    """Draw a row of charts for each pair: bytes between hosts, and seconds at each rate."""
    rates = list(dict.fromkeys(line.rate_mbit_s for line in lines))
    title = (
        f"{format_bytes(SPEC.weight_bytes)} of weights on two hosts of four ranks, with a cable between them"
    )
    with drawing(file, title, 3.4 * (1 + len(rates)), 2.2 * len(PAIRS) + 0.6) as figure:
        charts = figure.subplots(len(PAIRS), 1 + len(rates), squeeze=False, sharey=True)
        for row, pair in zip(charts, PAIRS, strict=True):
            for axes, rate in zip(row[1:], rates, strict=True):
                draw_seconds(axes, [line for line in lines if (line.pair, line.rate_mbit_s) == (pair, rate)])
            draw_bytes(row[0], [line for line in lines if (line.pair, line.rate_mbit_s) == (pair, rates[0])])
        handles, names = charts[0][1].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside lower center", ncols=len(names))


def draw_bytes(axes: Any, lines: list[Line]) -> None:
    names, sizes = [line.method for line in lines], [line.sent_bytes / 2**20 for line in lines]
    (bars,) = grouped_bars(axes, names, {"bytes": ("#7a9e7e", sizes, None)})
    axes.bar_label(bars, [format_bytes(line.sent_bytes) for line in lines], padding=3, fontsize=7)
    axes.set_title(f"{lines[0].pair}: MiB from host to host")


def draw_seconds(axes: Any, lines: list[Line]) -> None:
    medians = [line.median_s for line in lines]
    ranges = [
        [line.median_s - min(line.seconds) for line in lines],
        [max(line.seconds) - line.median_s for line in lines],
    ]
    grouped_bars(axes, [line.method for line in lines], {"measured": ("#4c78a8", medians, ranges)})
    marks = [(line.predicted_s, place) for place, line in enumerate(lines) if line.predicted_s]
    axes.plot(*zip(*marks, strict=True), "D", color="#e45756", markersize=5, label="predicted")
    least = [line.least_s for line in lines]
    axes.plot(least, range(len(lines)), "|", color=INK, markersize=14, label="the cable alone")
    ends = [max(*line.seconds, line.predicted_s or 0.0) for line in lines]
    for place, (line, end) in enumerate(zip(lines, ends, strict=True)):
        axes.annotate(
            format_seconds(line.median_s),
            (end, place),
            (6, 0),
            textcoords="offset points",
            va="center",
            fontsize=7,
        )
    axes.set_xlim(0, 1.25 * max(ends))
    axes.set_title(f"seconds at {lines[0].rate_mbit_s:g} Mbit/s")


if __name__ == "__main__":
    main()

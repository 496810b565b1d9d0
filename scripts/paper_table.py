"""Prints the tables of docs/explanation/resharding.md: switches at the sizes and on the cluster of the paper, planned.

    python scripts/paper_table.py                 Markdown
    python scripts/paper_table.py --json          the same figures for programs

Bytes are counted from the plans, seconds are predicted from configs/clusters/a100-80gb-16x8.yaml; nothing is measured.
The other methods are computed by the paper's table 2 (HybridFlow, arXiv 2409.19256).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from hybridengine.bench.reshard.results import formula
from hybridengine.bench.reshard.spec import LayoutPair, MethodName
from hybridengine.formatting import format_bytes, format_seconds
from hybridengine.models.presets import PRESETS
from hybridengine.planning.costs.clusters import Cluster, load_cluster
from hybridengine.planning.switch.switch_cost import SwitchCost, SwitchPricer
from hybridengine.topology.generation import GenerationGrid
from hybridengine.topology.grid import Grid
from hybridengine.topology.links import LinkClass
from hybridengine.topology.sizes import GenSizes, TrainSizes

CLUSTER = Path(__file__).parent.parent / "configs" / "clusters" / "a100-80gb-16x8.yaml"
DTYPE, BUCKET_BYTES = "bfloat16", 2**30
PRESET_OF = {"7B": "llama2-7b", "13B": "llama2-13b", "34B": "codellama-34b", "70B": "llama2-70b"}

SIZES = (
    ("7B", "1-8-16", "1-2"),
    ("13B", "1-8-16", "1-4"),
    ("34B", "2-8-8", "1-4"),
    ("70B", "4-8-4", "1-8"),
)
"""Model, training p-t-d, generation p_g-t_g. For 7B and 13B, t = 8 and the t_g that the paper finds fastest; the other
sizes are chosen here so that weights, gradients and Adam's state fit."""
GENERATION_SIZES = [(model, "1-8-16", f"1-{tp_size}") for model in ("7B", "13B") for tp_size in (1, 2, 4, 8)]
"""The paper's sweep of t_g at t = 8."""


@dataclass(frozen=True)
class Row:
    """A planned switch, compared with the other methods of the paper's table 2."""

    model: str
    cost: SwitchCost
    weight_bytes: int
    cluster: Cluster

    @property
    def train(self) -> TrainSizes:
        return self.cost.generation.train.sizes

    @property
    def gen(self) -> GenSizes:
        return self.cost.generation.sizes

    @property
    def inter_node_bytes(self) -> int:
        return self.cost.received_bytes_max_by_link[LinkClass.BETWEEN_NODES]

    @cached_property
    def seconds_there(self) -> float:
        return self.cost.seconds_there(self.cluster)

    @cached_property
    def line_rate_seconds(self) -> float:
        return self.cost.line_rate_seconds(self.cluster)

    @cached_property
    def seconds_back(self) -> float:
        return self.cost.seconds_back(self.cluster)

    @property
    def left_bytes(self) -> int:
        """Device memory that the generation shard leaves for the KV cache and everything else."""
        return self.cluster.device_memory_bytes - self.cost.gen_shard_bytes_max

    def by_formula(self, method: MethodName) -> dict[str, float | None]:
        """Return the bytes of a method by table 2."""
        return formula(method, LayoutPair(self.train, self.gen), self.weight_bytes)

    def all_gather_seconds(self, num_ranks: int) -> float:
        """Return a lower bound of the seconds to gather all weights among `num_ranks` consecutive ranks, a power of
        two, each with an equal part: every node and every rank must receive what it lacks."""
        links = self.cluster.links
        num_nodes = max(1, num_ranks // self.cluster.devices_per_node)
        inside = self.weight_bytes * (1 - 1 / num_ranks) / links.same_node.bytes_per_s
        network = links.of(LinkClass.BETWEEN_NODES)
        return max(
            inside,
            self.weight_bytes * (1 - 1 / num_nodes) / (network.node_bytes_per_s or network.bytes_per_s),
        )

    @property
    def model_parallel_seconds(self) -> float:
        """Lower bound of the seconds of an all-gather over the model-parallel group (HybridFlow-V)."""
        return self.all_gather_seconds(self.train.model_parallel_size)

    @property
    def full_seconds(self) -> float:
        """Lower bound of the seconds of an all-gather over all ranks (DeepSpeed-Chat)."""
        return self.all_gather_seconds(self.train.num_ranks)


def rows(sizes: Sequence[tuple[str, str, str]]) -> list[Row]:
    """Plan the switch of each (model, training, generation)."""
    return [planned(*one) for one in sizes]


@cache
def planned(model: str, train: str, gen: str) -> Row:
    """Plan one switch; equal ones are planned once."""
    cluster, shape = load_cluster(CLUSTER), PRESETS[PRESET_OF[model]].shape()
    generation = GenerationGrid(Grid(TrainSizes.parse(train)), GenSizes.parse(gen))
    nodes = cluster.node_map(generation.train.num_ranks)
    cost = SwitchPricer(shape, DTYPE, BUCKET_BYTES).price(generation, nodes)
    return Row(model, cost, shape.weight_bytes(DTYPE), cluster)


def switch_table(found: Sequence[Row]) -> str:
    """Return a Markdown table of the costs of the planned switches."""
    header = (
        "model", "training", "generation", "M", "received", "of it between nodes", "training shard", "peak",
        "redundant", "there", "busiest link", "back",
    )  # fmt: skip
    return _markdown(
        header,
        [
            (
                *_sizes(row),
                format_bytes(row.weight_bytes),
                format_bytes(row.cost.received_bytes_max),
                format_bytes(row.inter_node_bytes),
                format_bytes(row.cost.train_shard_bytes_max),
                format_bytes(row.cost.peak_weight_bytes_max),
                format_bytes(row.cost.redundant_bytes_max),
                format_seconds(row.seconds_there),
                format_seconds(row.line_rate_seconds),
                format_seconds(row.seconds_back),
            )
            for row in found
        ],
    )


def method_table(found: Sequence[Row]) -> str:
    """Return a Markdown table that compares the planned switches with the other methods, all three at line rate."""
    header = (
        "model", "layout", "received", "HybridFlow-V", "DeepSpeed-Chat", "peak", "peak of both",
        "at line rate", "HybridFlow-V", "DeepSpeed-Chat",
    )  # fmt: skip
    lines = []
    for row in found:
        others = [row.by_formula(method) for method in (MethodName.MODEL_PARALLEL, MethodName.FULL)]
        lines.append(
            (
                row.model,
                f"{row.train} -> {row.gen}",
                format_bytes(row.cost.received_bytes_max),
                *(format_bytes(int(other["received_bytes"] or 0)) for other in others),
                format_bytes(row.cost.peak_weight_bytes_max),
                format_bytes(row.weight_bytes),
                format_seconds(row.line_rate_seconds),
                format_seconds(row.model_parallel_seconds),
                format_seconds(row.full_seconds),
            )
        )
    return _markdown(header, lines)


def generation_table(found: Sequence[Row]) -> str:
    """Return a Markdown table of one training layout with several generation layouts."""
    header = (
        "model",
        "training",
        "generation",
        "engines",
        "received",
        "peak",
        "there",
        "back",
        "left beside weights",
    )
    return _markdown(
        header,
        [
            (
                *_sizes(row),
                str(row.cost.generation.num_replicas),
                format_bytes(row.cost.received_bytes_max),
                format_bytes(row.cost.peak_weight_bytes_max),
                format_seconds(row.seconds_there),
                format_seconds(row.seconds_back),
                format_bytes(row.left_bytes),
            )
            for row in found
        ],
    )


def _sizes(row: Row) -> tuple[str, str, str]:
    return row.model, str(row.train), str(row.gen)


def _markdown(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rule = "|" + "---|" * len(header)
    return "\n".join(
        ["| " + " | ".join(header) + " |", rule, *("| " + " | ".join(cells) + " |" for cells in lines)]
    )


def tables() -> tuple[str, str, str]:
    """Return all tables of the document, in its order."""
    found = rows(SIZES)
    return switch_table(found), method_table(found), generation_table(rows(GENERATION_SIZES))


def figures(row: Row) -> dict[str, Any]:
    """Return a row's figures for programs. Units: bytes and seconds."""
    cost = row.cost
    return {
        "model": row.model,
        "train": str(row.train),
        "gen": str(row.gen),
        "weight_bytes": row.weight_bytes,
        "received_bytes_max": cost.received_bytes_max,
        "inter_node_bytes_max": row.inter_node_bytes,
        "peak_weight_bytes_max": cost.peak_weight_bytes_max,
        "redundant_bytes_max": cost.redundant_bytes_max,
        "seconds_there": row.seconds_there,
        "line_rate_seconds": row.line_rate_seconds,
        "seconds_back": row.seconds_back,
        "left_bytes": row.left_bytes,
        "model_parallel_received_bytes": row.by_formula(MethodName.MODEL_PARALLEL)["received_bytes"],
        "full_received_bytes": row.by_formula(MethodName.FULL)["received_bytes"],
        "model_parallel_seconds": row.model_parallel_seconds,
        "full_seconds": row.full_seconds,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="figures instead of Markdown")
    options = parser.parse_args(arguments)
    if options.json:
        print(json.dumps([figures(row) for row in rows((*SIZES, *GENERATION_SIZES))], indent=2))
    else:
        print("\n\n".join(tables()))


if __name__ == "__main__":
    main()

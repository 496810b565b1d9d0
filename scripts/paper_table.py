"""Prints the table of docs/resharding.md: switches at the sizes and on the cluster of the paper, planned.

    python scripts/paper_table.py                 Markdown
    python scripts/paper_table.py --json          the same figures for programs

Bytes are counted from the plans, seconds are predicted from configs/clusters/a100-80gb-16x8.yaml; nothing is measured.
The columns of the other methods are the paper's table 2 (HybridFlow, arXiv 2409.19256).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridengine.metrics.formatting import format_bytes, format_seconds
from hybridengine.model_presets import PRESETS
from hybridengine.planning.clusters import load_cluster
from hybridengine.planning.switch_cost import SwitchPricer
from hybridengine.planning.switch_plan import SwitchPlan, plan_switch
from hybridengine.topology.generation import GenerationGrid
from hybridengine.topology.grid import Grid
from hybridengine.topology.sizes import GenSizes, TrainSizes

CLUSTER = Path(__file__).parent.parent / "configs" / "clusters" / "a100-80gb-16x8.yaml"
DTYPE, BUCKET_BYTES = "bfloat16", 256 * 2**20

ROWS = (
    ("7B", "llama2-7b", "1-8-16", "1-2"),
    ("13B", "llama2-13b", "1-8-16", "1-4"),
    ("34B", "codellama-34b", "2-8-8", "1-4"),
    ("70B", "llama2-70b", "4-8-4", "1-8"),
)
"""Size, preset, training p-t-d, generation p_g-t_g. For 7B and 13B, t = 8 and the t_g that the paper finds fastest; the
sizes of 34B and 70B are chosen here, so that weights, gradients and Adam's state fit."""


@dataclass(frozen=True)
class Row:
    """A planned switch beside the formulas of the other methods."""

    size: str
    plan: SwitchPlan
    weight_bytes: int

    @property
    def train(self) -> TrainSizes:
        return self.plan.generation.train.sizes

    @property
    def full_received_bytes(self) -> float:
        """All-gather over everything (DeepSpeed-Chat): (tpd - 1)/(tpd) · M; its peak is M."""
        return (self.train.num_ranks - 1) / self.train.num_ranks * self.weight_bytes

    @property
    def model_parallel_received_bytes(self) -> float:
        """All-gather over the model-parallel group (HybridFlow-V): (tp - 1)/(tp) · M; its peak is M."""
        return (self.train.model_parallel_size - 1) / self.train.model_parallel_size * self.weight_bytes


def rows() -> list[Row]:
    """Every row, planned."""
    cluster = load_cluster(CLUSTER)
    found = []
    for size, preset, train, gen in ROWS:
        shape = PRESETS[preset].shape()
        generation = GenerationGrid(Grid(TrainSizes.parse(train)), GenSizes.parse(gen))
        plan = plan_switch(SwitchPricer(shape, DTYPE, BUCKET_BYTES), generation, cluster)
        found.append(Row(size, plan, shape.weight_bytes(DTYPE)))
    return found


def markdown(found: Sequence[Row]) -> str:
    """The table, one line for each row."""
    header = (
        "model", "training", "generation", "M", "received", "between nodes", "peak", "redundant", "there", "back",
        "received, HybridFlow-V", "received, DeepSpeed-Chat", "peak of both",
    )  # fmt: skip
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    for row in found:
        plan = row.plan
        cells = (
            row.size,
            str(row.train),
            str(plan.generation.sizes),
            format_bytes(row.weight_bytes),
            format_bytes(plan.there.received_bytes_max),
            format_bytes(plan.there.inter_node_bytes_max),
            format_bytes(plan.peak_weight_bytes_max),
            format_bytes(plan.redundant_bytes_max),
            format_seconds(plan.there.seconds_there),
            format_seconds(plan.seconds_back),
            format_bytes(row.model_parallel_received_bytes),
            format_bytes(row.full_received_bytes),
            format_bytes(row.weight_bytes),
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def figures(row: Row) -> dict[str, Any]:
    """A row for programs. Units: bytes and seconds."""
    plan = row.plan
    return {
        "model": row.size,
        "train": str(row.train),
        "gen": str(plan.generation.sizes),
        "weight_bytes": row.weight_bytes,
        "received_bytes_max": plan.there.received_bytes_max,
        "inter_node_bytes_max": plan.there.inter_node_bytes_max,
        "peak_weight_bytes_max": plan.peak_weight_bytes_max,
        "redundant_bytes_max": plan.redundant_bytes_max,
        "seconds_there": plan.there.seconds_there,
        "seconds_back": plan.seconds_back,
        "model_parallel_received_bytes": row.model_parallel_received_bytes,
        "full_received_bytes": row.full_received_bytes,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="figures instead of Markdown")
    options = parser.parse_args(arguments)
    found = rows()
    print(json.dumps([figures(row) for row in found], indent=2) if options.json else markdown(found))


if __name__ == "__main__":
    main()

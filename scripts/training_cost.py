"""Prints the tables of docs/explanation/training.md: what an optimizer step costs on a rank, feature by feature, counted.

    python scripts/training_cost.py                 Markdown
    python scripts/training_cost.py --json          the same figures for programs

A rank of the first pipeline stage trains on 16 rows, or 4 for each stage, under torch's FakeTensorMode and fake process
group: Megatron-core's own code runs, on tensors without values. FLOPs are those of matrix products and of causal
attention. Bytes sent are those of group calls by the size of their larger side, an all-reduce counted as a reduce-scatter
and an all-gather. Bytes held are those of all tensors at the fullest moment.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from hybridengine.backends.megatron.groups import initialize_globals
from hybridengine.backends.megatron.trainer import MegatronTrainer
from hybridengine.backends.predictions import Predictions
from hybridengine.config.role_sections import MegatronSettings, OptimizerSection
from hybridengine.formatting import format_bytes
from hybridengine.models.presets import resolve_model
from hybridengine.planning.costs.lengths import Lengths
from hybridengine.rehearsal.counting import StorageCounter, TrafficCounter
from hybridengine.rehearsal.fused_layers import fused_layers
from hybridengine.rehearsal.shapes_only import ShapesOnly
from hybridengine.rehearsal.world import rehearsed_world
from hybridengine.rows.balance import balance_rows
from hybridengine.topology.grid import Grid, named_groups
from hybridengine.topology.sizes import TrainSizes
from hybridengine.weights.process_groups import ProcessGroups

PROMPT, RESPONSES, LONGEST = 1024, "lognormal:mean=3000,cv=0.8", 15360
"""Tokens of a prompt, and the distribution and limit of those of responses."""
MICRO_BATCH_TOKENS = 16384


@dataclass(frozen=True)
class Way:
    """One way to train."""

    name: str
    sizes: str
    settings: MegatronSettings = MegatronSettings(recompute="selective")
    pads: bool = False


@dataclass(frozen=True)
class Cost:
    """Cost of a step on a rank."""

    micro_batches: int
    tokens: int
    """Tokens of all micro-batches, or this rank's part of them."""
    flops: int
    sent_bytes: dict[str, int]
    held_bytes: int


def ways_of(sizes: str, fewer: str) -> list[Way]:
    """Return the ways to train on as many ranks as `sizes` has; `fewer` has half of its replicas."""
    full = MegatronSettings(recompute="full")
    return [
        Way("packed rows", sizes),
        Way("padded rows", sizes, pads=True),
        Way(
            "no sequence parallelism", sizes, MegatronSettings(recompute="selective", sequence_parallel=False)
        ),
        Way("nothing recomputed", sizes, MegatronSettings()),
        Way("all layers recomputed", sizes, full),
        Way("c = 2, half of the replicas", f"{fewer} c=2"),
        *([Way("v = 2", f"{sizes} v=2")] if not sizes.startswith("1-") else []),
    ]


MODELS = {
    "llama3-8b": ("1-4-2", "1-4-1"),
    "llama3-70b": ("4-8-4", "4-8-2"),
    "llama3-405b": ("16-8-4", "16-8-2"),
}
"""Preset -> sizes, and sizes with half of the replicas."""


def num_rows(sizes: str) -> int:
    """Return the rows of a replica: enough micro-batches to fill the pipeline, and as many for each rank at any c."""
    parsed = TrainSizes.parse(sizes)
    return 4 * max(4, parsed.pp_size) * parsed.cp_size


def micro_batches(way: Way) -> list[dict[str, Tensor]]:
    """Return the rows of a replica in micro-batches; padded rows are as long as the longest beside them."""
    lengths = Lengths.of(RESPONSES, LONGEST).spread(num_rows(way.sizes)) + PROMPT
    if way.pads:
        parts, ordered = [[]], sorted(lengths, reverse=True)
        for length in ordered:
            if parts[-1] and (len(parts[-1]) + 1) * parts[-1][0] > MICRO_BATCH_TOKENS:
                parts.append([])
            parts[-1].append(length)
        parts = [[part[0]] * len(part) for part in parts]
    else:
        parts = [
            [lengths[row] for row in rows] for rows in balance_rows(lengths.tolist(), MICRO_BATCH_TOKENS)
        ]
    return [_columns(torch.tensor([int(length) for length in part])) for part in parts]


def _columns(lengths: Tensor) -> dict[str, Tensor]:
    longest = int(lengths.max())
    places = torch.arange(longest - PROMPT)
    wanted = places < (lengths - PROMPT).unsqueeze(1)
    return {
        "tokens": torch.zeros(len(lengths), longest, dtype=torch.int64),
        "lengths": lengths,
        "positions": (PROMPT - 1 + places).expand_as(wanted).masked_fill(~wanted, -1),
        "mask": wanted,
    }


def attention_flops(query: Any, key: Any, value: Any, *args: Any, out_shape: Any = None, **_: Any) -> int:
    """Return the FLOPs of causal attention forward: half of the products of all queries with all keys."""
    batch, heads, queries, dim = query
    return 2 * batch * heads * queries * key[2] * dim


def attention_backward_flops(grad: Any, query: Any, key: Any, *args: Any, **named: Any) -> int:
    """Return the FLOPs backward: five products in place of two."""
    return attention_flops(query, key, key) * 5 // 2


ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: attention_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward_flops,
}


def count(model: str, way: Way) -> Cost:
    """Return the cost of a step on the first rank of the first stage; once in a process."""
    sizes, shape = TrainSizes.parse(way.sizes), resolve_model(model)
    grid = Grid(sizes)
    named: dict[tuple[int, ...], str] = {
        ranks: name for name, groups in named_groups(grid) for ranks in groups if len(ranks) > 1
    }
    storages, traffic = StorageCounter(), TrafficCounter(lambda ranks: named.get(ranks, "several axes"))
    mode = ShapesOnly([storages.observe, traffic.observe])
    flops = FlopCounterMode(display=False, custom_mapping=ATTENTION)

    def loss(predictions: Predictions, columns: dict[str, Tensor]) -> tuple[Tensor, Tensor, None]:
        targets = columns["tokens"].gather(1, columns["positions"] + 1)
        log_probs, entropies = predictions.log_probs(targets)
        return ((log_probs + entropies) * columns["mask"]).sum(), columns["mask"].sum().int(), None

    batches = micro_batches(way)
    with ExitStack() as stack:
        stack.enter_context(rehearsed_world(0, sizes.num_ranks, 8, traffic.count))
        stack.enter_context(storages.resizes_counted())
        stack.enter_context(fused_layers())
        stack.enter_context(mode.active())
        initialize_globals(1)
        trainer = MegatronTrainer(shape, grid, 0, ProcessGroups(), "bfloat16", settings=way.settings)
        trainer.start_optimizer(OptimizerSection())
        trainer.optimizer_parts()  # moments
        traffic.take()
        storages.restart_peak()
        with flops:
            trainer.train_step(batches, loss)
        sent = traffic.take()
    by_group: dict[str, int] = {}
    for one in sent:
        legs = 2 if one.operation.startswith("allreduce") else 1  # it is a reduce-scatter and an all-gather
        by_group[one.group] = by_group.get(one.group, 0) + legs * one.num_bytes
    return Cost(
        len(batches),
        sum(int(batch["lengths"].sum()) for batch in batches) // sizes.cp_size,
        flops.get_total_flops(),
        by_group,
        storages.peak_bytes,
    )


def counted(cases: Sequence[tuple[str, Way]]) -> list[Cost]:
    """Count each case in a process of its own, since worlds and modes are global."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=1) as pool:
        return list(pool.map(count, *zip(*cases, strict=True)))


def table(model: str, ways: Sequence[Way], costs: Sequence[Cost]) -> list[str]:
    names = ("tensor", "context", "pipeline", "data")
    lines = [
        f"**{model}** at {ways[0].sizes}, {num_rows(ways[0].sizes)} rows a replica",
        "",
        "| | micro-batches | tokens | PFLOP | " + " | ".join(f"{name}, sent" for name in names) + " | held |",
        "|---" * (5 + len(names)) + "|",
    ]
    for way, cost in zip(ways, costs, strict=True):
        sent = [format_bytes(cost.sent_bytes[name]) if name in cost.sent_bytes else "" for name in names]
        figures = [cost.micro_batches, f"{cost.tokens:,}", f"{cost.flops / 1e15:.1f}", *sent]
        lines.append(
            f"| {way.name} | " + " | ".join(map(str, figures)) + f" | {format_bytes(cost.held_bytes)} |"
        )
    return [*lines, ""]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--model", choices=MODELS, action="append", help="only this model; may be repeated")
    options = parser.parse_args()
    found = []
    for model in options.model or MODELS:
        ways = ways_of(*MODELS[model])
        costs = counted([(model, way) for way in ways])
        if options.json:
            found += [
                {"model": model, "way": way.name, "sizes": way.sizes, **asdict(cost)}
                for way, cost in zip(ways, costs, strict=True)
            ]
        else:
            print("\n".join(table(model, ways, costs)), flush=True)
    if options.json:
        print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()

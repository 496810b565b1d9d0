"""Draws the pictures of docs/images from the project's own groups and plans.

    python scripts/draw_groups.py                 writes docs/images/groups.svg and docs/images/switch.svg
    python scripts/draw_groups.py --folder /tmp   writes them elsewhere
    python scripts/draw_groups.py --format png    writes PNG files to look at

Equal groups and plans give equal bytes. Each file carries a digest of what it shows, which a test compares with the
present groups and plans, so that no picture goes out of date unnoticed.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator

from hybridengine.config import load_config, model_shape
from hybridengine.models.shapes import DTYPE_BYTES
from hybridengine.reshard.boxes import Box, intersect, num_elements, subtract
from hybridengine.reshard.compiler import compile_plan, inverse_local
from hybridengine.reshard.cost import plan_costs
from hybridengine.reshard.domains import domains
from hybridengine.reshard.megatron import megatron_layout
from hybridengine.reshard.plan import Plan
from hybridengine.reshard.vllm import vllm_layout
from hybridengine.topology.generation import GenerationGrid, Grouping
from hybridengine.topology.grid import Grid, Groups
from hybridengine.topology.sizes import GenSizes, TrainSizes

ROOT = Path(__file__).parent.parent
CONFIG, SIZES = ROOT / "configs" / "qwen2.5-7b-8gpu.yaml", ("actor.parallel=2-4-1", "actor.generate=1-2")
"""The run whose switch is drawn."""

KEPT, HELD_TWICE, RECEIVED, STAGING = "#009E73", "#D55E00", "#9AD3F2", "#F0C94A"
INK, PALE = "#333333", "#EEEEEE"
STYLE: dict[Any, Any] = {
    "svg.hashsalt": "hybridengine",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


# ---- Contents of the pictures: pure data
# ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Holding:
    """Parts of the model on one rank, as boxes in a plane of p rows (training stages) and t columns (tensor shards)."""

    kept: Box | None
    """The part that belongs to both the training shard and the generation shard."""
    held_twice: tuple[Box, ...]
    """Parts of the training shard alone, which training needs again: they occupy memory next to the generation shard."""
    received: tuple[Box, ...]
    """Parts of the generation shard alone."""


def holding(generation: GenerationGrid, rank: int) -> Holding:
    """Return the parts that `rank` holds in the two modes."""
    train, place, gen = generation.train.sizes, generation.train.coordinate(rank), generation.coordinate(rank)
    stages, shards = train.pp_size // generation.sizes.pp_size, train.tp_size // generation.sizes.tp_size
    own: Box = ((place.pp_rank, place.pp_rank + 1), (place.tp_rank, place.tp_rank + 1))
    needed: Box = (
        (gen.pp_rank * stages, (gen.pp_rank + 1) * stages),
        (gen.tp_rank * shards, (gen.tp_rank + 1) * shards),
    )
    return Holding(intersect(own, needed), tuple(subtract(own, needed)), tuple(subtract(needed, own)))


@dataclass(frozen=True)
class Moment:
    """Bytes of one rank at one moment of a switch."""

    source_bytes: int
    destination_bytes: int
    staging_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.source_bytes + self.destination_bytes + self.staging_bytes


def storage_trace(plan: Plan, rank: int, element_bytes: int) -> list[Moment]:
    """Return the bytes of `rank` before the first bucket and when buckets open or close, in the executor's order.

    When a bucket opens, its destination parameters and its staging appear; when it closes, its staging and source
    parameters go. It opens before the previous bucket closes if the plan lets them overlap.
    """
    source, destination = plan.source.shard(rank).by_name, plan.destination.shard(rank).by_name
    opening, closing = [], []
    for bucket in plan.buckets:
        staging = bucket.staging.get(rank, 0)
        appears = sum(destination[name].num_elements for name in bucket.destinations.get(rank, ()))
        vanishes = sum(source[name].num_elements for name in bucket.sources.get(rank, ()))
        opening.append((0, appears, staging))
        closing.append((-vanishes, 0, -staging))
    changes = opening[:1]
    for bucket, opens, closes in zip(plan.buckets[1:], opening[1:], closing, strict=False):
        changes += [opens, closes] if bucket.overlaps else [closes, opens]
    held = [plan.source.shard(rank).num_elements, 0, 0]
    trace = [Moment(*(count * element_bytes for count in held))]
    for change in [*changes, closing[-1]]:
        held = [count + more for count, more in zip(held, change, strict=True)]
        trace.append(Moment(*(count * element_bytes for count in held)))
    return trace


def example_plan() -> tuple[Plan, int]:
    """The plan of a switch to generation in the first micro-DP group of CONFIG, and the bytes of an element."""
    config = load_config(CONFIG, SIZES, dry_run=True)
    generation, shape = config.generation_grid, model_shape(config)
    element_bytes = DTYPE_BYTES[config.model.dtype]
    source, destination = megatron_layout(shape, generation.train), vllm_layout(shape, generation)
    domain = domains(source, destination)[0]
    return compile_plan(
        source, destination, domain, config.actor.bucket_bytes // element_bytes
    ), element_bytes


def groups_example(grouping: Grouping) -> GenerationGrid:
    """The paper's example: 1-4-2 generating at 1-2."""
    return GenerationGrid(Grid(TrainSizes(1, 4, 2)), GenSizes(1, 2), grouping)


def digest(name: str) -> str:
    """Return a digest of everything that the picture `name` shows."""
    if name == "groups":
        shown = [
            (
                grouping.value,
                grid.groups("tp"),
                grid.micro_dp_groups,
                [holding(grid, rank) for rank in range(8)],
            )
            for grouping in Grouping
            for grid in (groups_example(grouping),)
        ]
        return hashlib.sha256(repr(shown).encode()).hexdigest()
    plan, element_bytes = example_plan()
    return hashlib.sha256(f"{plan.digest} {element_bytes}".encode()).hexdigest()


# ---- Groups ---------------------------------------------------------------------------------------------------------


def draw_groups() -> Figure:
    """Draw the part of the model that each rank holds under both groupings, with the generation groups beneath."""
    figure, panels = pyplot.subplots(2, 1, figsize=(9.2, 6.2))
    for axes, grouping in zip(panels, (Grouping.VANILLA, Grouping.INTERVAL), strict=True):
        _draw_grouping(axes, groups_example(grouping))
    figure.legend(
        handles=[
            Patch(color=KEPT, label="training shard, part of the generation shard"),
            Patch(color=HELD_TWICE, label="training shard outside of it"),
            Patch(color=RECEIVED, label="received from other ranks"),
        ],
        loc="lower center",
        ncols=3,
        frameon=False,
    )
    figure.suptitle("Training 1-4-2, generating 1-2: what each rank holds of the model", fontsize=11)
    figure.subplots_adjust(left=0.13, right=0.985, top=0.87, bottom=0.08, hspace=0.32)
    return figure


def _draw_grouping(axes: Axes, grid: GenerationGrid) -> None:
    sizes, ranks = grid.train.sizes, range(grid.train.num_ranks)
    # Training replicas are a little further apart than ranks.
    lefts = {rank: 1.25 * rank + 0.35 * grid.train.coordinate(rank).dp_rank for rank in ranks}
    for rank, left in lefts.items():
        axes.add_patch(Rectangle((left, 0), 1, 1, facecolor=PALE))
        held = holding(grid, rank)
        kept = [held.kept] if held.kept else []
        for colour, boxes in ((KEPT, kept), (HELD_TWICE, held.held_twice), (RECEIVED, held.received)):
            for (top, bottom), (start, stop) in boxes:
                corner = left + start / sizes.tp_size, 1 - bottom / sizes.pp_size
                size = (stop - start) / sizes.tp_size, (bottom - top) / sizes.pp_size
                axes.add_patch(Rectangle(corner, *size, facecolor=colour))
        for column in range(1, sizes.tp_size):
            axes.plot([left + column / sizes.tp_size] * 2, [0, 1], color="white", linewidth=0.8)
        axes.add_patch(Rectangle((left, 0), 1, 1, fill=False, edgecolor=INK, linewidth=0.8))
        axes.text(left + 0.5, 1.06, f"rank {rank}", ha="center", va="bottom", fontsize=8.5, color=INK)
    centres = {rank: left + 0.5 for rank, left in lefts.items()}
    _draw_brackets(axes, grid.groups("tp"), centres, "generation TP", -0.16)
    _draw_brackets(axes, grid.micro_dp_groups, centres, "micro-DP", -0.54)
    axes.set_title(_finding(grid), loc="left", fontsize=9.5, pad=12)
    axes.set_xlim(-0.05, max(lefts.values()) + 1.05)
    axes.set_ylim(-0.75, 1.2)
    axes.axis("off")


def _finding(grid: GenerationGrid) -> str:
    """Return a sentence that says what the panel shows."""
    whole = grid.train.sizes.model_parallel_size
    held = {rank: holding(grid, rank) for rank in range(grid.train.num_ranks)}
    outside = {rank: sum(map(num_elements, one.held_twice)) for rank, one in held.items()}
    apart = [rank for rank, count in outside.items() if count]
    name = f"{grid.grouping.value} grouping"
    if apart:
        extra = Fraction(max(outside.values()), whole)
        return f"{name}: ranks {', '.join(map(str, apart))} hold {extra} of the model beside their generation shard"
    received = Fraction(max(sum(map(num_elements, one.received)) for one in held.values()), whole)
    return f"{name}: every training shard is part of the generation shard; each rank receives {received} of the model"


def _draw_brackets(axes: Axes, groups: Groups, centres: dict[int, float], label: str, top: float) -> None:
    """Draw every group as a line from rank to rank; interleaved groups get lines of their own."""
    ends: list[float] = []
    for group in groups:
        places = [centres[rank] for rank in group]
        line = next((number for number, end in enumerate(ends) if end < places[0]), len(ends))
        ends[line : line + 1] = [places[-1]]
        y = [top - 0.14 * line] * len(places)
        axes.plot(places, y, color=INK, linewidth=1.4, marker="o", markersize=4)
    middle = top - 0.07 * (len(ends) - 1)
    axes.text(-0.2, middle, label, ha="right", va="center", fontsize=8.5, color=INK)


# ---- The switch -----------------------------------------------------------------------------------------------------


def draw_switch() -> Figure:
    """Draw the bytes of one rank of each pipeline stage, bucket by bucket, on the way to generation and back."""
    plan, element_bytes = example_plan()
    back = inverse_local(plan)
    ranks = (plan.ranks[0], plan.ranks[-1])
    figure, panels = pyplot.subplots(len(ranks), 2, figsize=(9.2, 5.6), sharex=True, sharey=True)
    for row, rank in zip(panels, ranks, strict=True):
        _draw_trace(row[0], plan, rank, element_bytes, to_generate=True)
        _draw_trace(row[1], back, rank, element_bytes, to_generate=False)
        row[0].set_ylabel(f"rank {rank}: GiB of weights")
    panels[0][0].set_title("to generation: gather bucket by bucket", fontsize=10)
    panels[0][1].set_title("back to training: cut out, nothing received", fontsize=10)
    for axes in panels[-1]:
        axes.set_xlabel("bucket")
    figure.legend(
        handles=[
            Patch(color=KEPT, label="training parameters"),
            Patch(color=RECEIVED, label="engine parameters"),
            Patch(color=STAGING, label="messages in flight"),
        ],
        loc="lower center",
        ncols=3,
        frameon=False,
    )
    figure.suptitle(
        f"One copy of the weights: {plan.source.kind} to {plan.destination.kind} (Qwen2.5-7B, bfloat16)",
        fontsize=11,
    )
    figure.subplots_adjust(left=0.075, right=0.985, top=0.88, bottom=0.15, hspace=0.14, wspace=0.06)
    return figure


def _draw_trace(axes: Axes, plan: Plan, rank: int, element_bytes: int, to_generate: bool) -> None:
    trace = storage_trace(plan, rank, element_bytes)
    cost = plan_costs(plan, element_bytes)[rank]
    # Two moments per bucket, with some room before the first and after the last one.
    x = [-0.6, *(moment / 2 for moment in range(len(trace) - 1)), len(plan.buckets) + 0.6]
    training = [moment.source_bytes if to_generate else moment.destination_bytes for moment in trace]
    engine = [moment.destination_bytes if to_generate else moment.source_bytes for moment in trace]
    staging = [moment.staging_bytes for moment in trace]
    layers = [[count / 2**30 for count in [*layer, layer[-1]]] for layer in (training, engine, staging)]
    axes.stackplot(x, *layers, colors=(KEPT, RECEIVED, STAGING), step="post", linewidth=0)
    for value, text, style in (
        (cost.one_copy_bytes, "larger shard", "--"),
        (cost.source_bytes + cost.destination_bytes, "both shards at once", ":"),
    ):
        axes.axhline(value / 2**30, color=INK, linewidth=0.9, linestyle=style)
        axes.text(
            0.995, value / 2**30 + 0.04, text, transform=axes.get_yaxis_transform(), ha="right", va="bottom",
            fontsize=7.5, color=INK,
        )  # fmt: skip
    axes.set_xlim(-0.6, len(plan.buckets) + 0.6)
    axes.set_ylim(0, 1.12 * (cost.source_bytes + cost.destination_bytes) / 2**30)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))


# ---- Files ----------------------------------------------------------------------------------------------------------

PICTURES = {"groups": draw_groups, "switch": draw_switch}


def write(folder: Path, form: str = "svg") -> list[Path]:
    """Write every picture into `folder`; return the files."""
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for name, draw in PICTURES.items():
        file = folder / f"{name}.{form}"
        with matplotlib.rc_context(STYLE):
            figure = draw()
            about = {
                "Date": None,
                "Creator": "scripts/draw_groups.py",
                "Description": f"digest {digest(name)}",
            }
            figure.savefig(file, metadata=about if form == "svg" else None, dpi=110)
            pyplot.close(figure)
        if form == "svg":  # keeps editors and hooks from changing the file
            file.write_text("\n".join(line.rstrip() for line in file.read_text().splitlines()) + "\n")
        files.append(file)
    return files


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the pictures and print their names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, default=ROOT / "docs" / "images")
    parser.add_argument("--format", choices=("svg", "png"), default="svg")
    options = parser.parse_args(arguments)
    for file in write(options.folder, options.format):
        print(file)


if __name__ == "__main__":
    main()

"""A rehearsal as text and as JSON, held against the planner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from hybridengine.formatting import aligned, format_bytes, format_seconds
from hybridengine.machine import package_versions
from hybridengine.rehearsal.figures import Phase, RankRehearsal

NOT_REHEARSED = (
    "values: a number that code reads from a tensor is 0 or 1, so that nothing is said of losses and tokens",
    "kernels and layers of a GPU: Megatron-core's local layers, with the memory of fused kernels, stand for Transformer"
    " Engine's, and vLLM's build for CPUs for that with CUDA and graphs",
    "allocators: workspaces, communicators and fragmentation are not counted",
    "files: weights come without values, and a checkpoint ends with its copy in host memory",
)
"""Parts of a run that a rehearsal does not exercise."""
MOST_DIFFERENCE = 0.05
"""Share of the planned bytes from which a difference is marked."""
LEFT_OUT = "the planner leaves out small tensors, temporaries of optimizer steps, and buffers of the engine"


def rehearsal_lines(ranks: Sequence[RankRehearsal], planned: Mapping[str, int], num_ranks: int) -> list[str]:
    """Return tables of memory and messages of each rank, then the comparison with the planner."""
    lines: list[str] = []
    for one in ranks:
        lines += [*_rank_lines(one, num_ranks), ""]
    rows = [["planner", "fullest rehearsed rank", "planned", "difference", ""]]
    for name, (counted, planned_bytes, share) in _compared(ranks, planned).items():
        mark = f"more than {MOST_DIFFERENCE:.0%}" if abs(share) > MOST_DIFFERENCE else ""
        if mark and share < 0 and len(ranks) == 1:
            mark += ", or another rank is fuller"
        rows.append([name, format_bytes(counted), format_bytes(planned_bytes), f"{share:+.1%}", mark])
    note = (
        ""
        if len(ranks) > 1
        else "; it plans the fullest rank, and --ranks stages rehearses one of each stage"
    )
    return [
        *lines,
        *aligned(rows),
        LEFT_OUT + note,
        "",
        "not rehearsed",
        f"  versions other than megatron-core {package_versions()['megatron-core']}: rehearse with the run's",
        *(f"  {one}" for one in NOT_REHEARSED),
    ]


def _rank_lines(one: RankRehearsal, num_ranks: int) -> list[str]:
    models = [["model", "weights", "gradients", "optimizer"]]
    for name, held in one.held.items():
        sizes = held.weights_bytes, held.gradients_bytes, held.optimizer_bytes
        models.append([name, *map(format_bytes, sizes)])
    models.append(
        ["engine", format_bytes(one.engine_weights_bytes), f"KV {format_bytes(one.kv_cache_bytes)}", ""]
    )
    phases = [["phase", "before", "peak", "after", "rows", "of"]]
    phases += [_phase_row(phase) for phase in one.phases]
    messages = [["messages", "group", "ranks", "calls", "bytes"]]
    for phase in one.phases:
        for index, part in enumerate(phase.traffic):
            name = f"{phase.name} {part.operation}" if index == 0 else f"  {part.operation}"
            size = format_bytes(part.num_bytes)
            messages.append([name, part.group, str(part.num_ranks), f"{part.count:,}", size])
    return [
        f"rank {one.rank} ({one.coordinate}) of {num_ranks}: rehearsed in {format_seconds(one.rehearsal_s)} with"
        f" {format_bytes(one.host_peak_bytes)} of host memory",
        *aligned(models),
        "",
        *aligned(phases),
        "",
        *aligned(messages),
    ]


def _phase_row(phase: Phase) -> list[str]:
    sizes = phase.begin_bytes, phase.peak_bytes, phase.end_bytes
    rows = [f"{phase.num_rehearsed:,}", f"{phase.num_rows:,}"] if phase.num_rows else ["", ""]
    copied = f" ({format_bytes(phase.copied_bytes)} copied to the host)" if phase.copied_bytes else ""
    return [phase.name + copied, *map(format_bytes, sizes), *rows]


def _compared(
    ranks: Sequence[RankRehearsal], planned: Mapping[str, int]
) -> dict[str, tuple[int, int, float]]:
    """Return phase -> (peak bytes on the fullest of the ranks, planned bytes, difference as a share of these)."""
    found: dict[str, int] = {}
    for phase in (phase for one in ranks for phase in one.phases):
        found[phase.name] = max(phase.peak_bytes, found.get(phase.name, 0))
    return {
        name: (found[name], num_bytes, found[name] / num_bytes - 1)
        for name, num_bytes in planned.items()
        if name in found
    }


def rehearsal_json(ranks: Sequence[RankRehearsal], planned: Mapping[str, int]) -> dict[str, Any]:
    """Return the figures as JSON values. Units: bytes and seconds."""
    names = ("counted_bytes", "planned_bytes", "difference_share")
    return {
        "ranks": [asdict(one) for one in ranks],
        "planner": {
            name: dict(zip(names, values, strict=True)) for name, values in _compared(ranks, planned).items()
        },
        "not_rehearsed": list(NOT_REHEARSED),
    }

"""A rehearsal as text and as JSON, held against the planner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from hybridengine.formatting import aligned, format_bytes, format_seconds
from hybridengine.rehearsal.figures import Phase, RankRehearsal

NOT_REHEARSED = (
    "values: every number that code reads from a tensor is 0 or 1, so nothing is said of losses or of results",
    "kernels and layers of a GPU: Megatron-core's local layers with the memory of fused attention stand for Transformer"
    " Engine's, vLLM's build for CPUs for the one with CUDA, without graphs; workspaces, communicators and fragmentation"
    " are not counted",
    "files: weights come without values, and a checkpoint ends with its copy in host memory",
)
"""What a rehearsal does not exercise."""


def rehearsal_lines(ranks: Sequence[RankRehearsal], planned: Mapping[str, int], num_ranks: int) -> list[str]:
    """Return tables of memory and messages of each rank, then the comparison with the planner."""
    lines: list[str] = []
    for one in ranks:
        lines += [*_rank_lines(one, num_ranks), ""]
    fullest = peaks(ranks)
    rows = [["planner", "fullest rehearsed rank", "planned", "difference"]]
    rows += [
        [
            name,
            format_bytes(fullest[name]),
            format_bytes(planned[name]),
            f"{difference(fullest, planned, name):+.1%}",
        ]
        for name in planned
        if name in fullest
    ]
    note = "" if len(ranks) > 1 else "; it plans the fullest rank, --ranks stages rehearses one of each stage"
    return [*lines, *aligned(rows), f"the planner counts no temporaries{note}", "", "not rehearsed:"] + [
        f"  {text}" for text in NOT_REHEARSED
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


def peaks(ranks: Sequence[RankRehearsal]) -> dict[str, int]:
    """Return phase -> peak bytes on the fullest of the ranks."""
    found: dict[str, int] = {}
    for one in ranks:
        for phase in one.phases:
            found[phase.name] = max(phase.peak_bytes, found.get(phase.name, 0))
    return found


def difference(found: Mapping[str, int], planned: Mapping[str, int], name: str) -> float:
    """Return how much more than planned was counted in a phase, as a share of the plan."""
    return found[name] / planned[name] - 1


def rehearsal_json(ranks: Sequence[RankRehearsal], planned: Mapping[str, int]) -> dict[str, Any]:
    """Return the figures as JSON values. Units: bytes and seconds."""
    fullest = peaks(ranks)
    return {
        "ranks": [asdict(one) for one in ranks],
        "planner": {
            name: {
                "counted_bytes": fullest[name],
                "planned_bytes": planned[name],
                "difference_share": difference(fullest, planned, name),
            }
            for name in planned
            if name in fullest
        },
        "not_rehearsed": list(NOT_REHEARSED),
    }

"""Devices of the ranks against the budgets of a run: their memory, and kernels for matrix products in 8 bits.

A GPU is a rank's own. The memory of a node without GPUs is shared by all of its ranks, of all pools: when one pool is in
its largest phase, the others hold at least what they do in their smallest. Beside GPUs it holds offloaded state and
copies of a save. The total memory counts, not what is free at the moment: other processes may end, but a budget beyond
the total never fits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hybridengine.formatting import format_bytes
from hybridengine.machine import PROCESS_BYTES, Device
from hybridengine.planning.budget import Budget


@dataclass(frozen=True)
class Placed:
    """Device of a rank."""

    node: str
    device: Device


class Shortage(NamedTuple):
    """Memory that is missing on a device or a node."""

    missing_bytes: int
    text: str
    """Phase, needed and missing bytes."""
    remedy: str

    def __str__(self) -> str:
        return f"{self.text}; {self.remedy}"


FP8_CAPABILITY = {"tensorwise": (8, 9), "blockwise": (9, 0), "mxfp8": (10, 0), "fp8": (8, 9)}
"""Compute capability from which Transformer Engine has each scaling, and vLLM its `fp8`."""


def fp8_problems(
    budgets: Mapping[str, Sequence[Budget]], placed: Mapping[str, Sequence[Placed]]
) -> Iterator[tuple[str, str]]:
    """Yield a text and a remedy for each key of products in 8 bits whose kernels the device of a rank has not.

    Both arguments have the ranks of each pool in order.
    """
    found = set[str]()
    for name, ranks in placed.items():
        for budget, rank in zip(budgets[name], ranks, strict=True):
            for key, kind in budget.fp8.items():
                least, device = FP8_CAPABILITY[kind], rank.device
                # An engine on a CPU has a kernel of this project.
                fits = not device.capability or device.capability >= least if device.is_gpu else kind == "fp8"
                if key in found or fits:
                    continue
                found.add(key)
                has = f"a GPU of {_version(device.capability)}" if device.is_gpu else "no GPU"
                yield (
                    f"{key}={kind} needs GPUs of compute capability {_version(least)}, and rank {budget.rank} of pool"
                    f" {name} on node {rank.node} has {has}",
                    f"set {key}=none, or take other devices",
                )


def mixed_gpu_problems(placed: Mapping[str, Sequence[Placed]]) -> Iterator[str]:
    """Yield a text for each pool whose GPUs have different compute capabilities, and so different kernels."""
    for name, ranks in placed.items():
        nodes = defaultdict[tuple[int, ...], dict[str, None]](dict)
        for rank in ranks:
            if rank.device.capability:
                nodes[rank.device.capability][rank.node] = None
        if len(nodes) > 1:
            listing = "; ".join(f"{_version(one)} on {', '.join(nodes[one])}" for one in sorted(nodes))
            yield (
                f"the GPUs of pool {name} have different compute capabilities ({listing}), and so different kernels;"
                " give every pool nodes with the same GPUs (cluster.pools)"
            )


def _version(capability: tuple[int, ...]) -> str:
    return ".".join(map(str, capability))


def device_problems(
    budgets: Mapping[str, Sequence[Budget]], placed: Mapping[str, Sequence[Placed]]
) -> Iterator[Shortage]:
    """Yield the largest shortage of a GPU in each pool, and that of memory of a node.

    Both arguments have the ranks of each pool in order.
    """
    on_node: dict[str, dict[str, list[Budget]]] = defaultdict(lambda: defaultdict(list))
    devices = dict[str, Device]()
    for name, ranks in placed.items():
        for budget, rank in zip(budgets[name], ranks, strict=True):
            on_node[rank.node][name].append(budget)
            devices[rank.node] = rank.device
        on_gpus = (
            (budget, rank) for budget, rank in zip(budgets[name], ranks, strict=True) if rank.device.is_gpu
        )
        if (worst_rank := max(on_gpus, key=_missing, default=None)) and _missing(worst_rank) > 0:
            budget, rank = worst_rank
            size, needed = rank.device.num_bytes, budget.device_bytes[budget.peak]
            gpu = f"its GPU on node {rank.node}"
            text = budget.shortage(budget.peak, needed, f"rank {budget.rank}", size, gpu)
            yield Shortage(needed - size, text, budget.remedies(budget.peak))
    lacking = [
        found
        for node, pools in on_node.items()
        for judge in [_beside_gpus if devices[node].is_gpu else _without_gpus]
        if (found := judge(node, devices[node].node_bytes, pools)) is not None
    ]
    if lacking:  # nodes are often alike
        worst = max(lacking)
        others = f" (and {len(lacking) - 1} more node(s) lack memory)" if len(lacking) > 1 else ""
        yield worst._replace(text=worst.text + others)


def _missing(rank: tuple[Budget, Placed]) -> int:
    """Return the bytes that a rank lacks on its device, negative if it has room."""
    budget, placed = rank
    return budget.device_bytes[budget.peak] - placed.device.num_bytes


def node_bytes(pools: Mapping[str, Sequence[Budget]]) -> int:
    """Return the most bytes of ranks on a node without GPUs: one pool in its largest phase, others in the smallest."""
    phases = _phases(pools)
    least = {name: min(bytes_.values()) for name, bytes_ in phases.items()}
    return _beside(pools) + max(
        (max(phases[name].values()) + sum(least.values()) - least[name] for name in pools), default=0
    )


def _phases(pools: Mapping[str, Sequence[Budget]]) -> dict[str, dict[str, int]]:
    """Return the bytes of all ranks of each pool, by phase."""
    return {
        name: {phase: sum(one.device_bytes[phase] for one in ranks) for phase in ranks[0].device_bytes}
        for name, ranks in pools.items()
    }


def _beside(pools: Mapping[str, Sequence[Budget]]) -> int:
    """Return the bytes that no phase counts: processes, and offloaded state."""
    return sum(PROCESS_BYTES + one.offloaded_bytes for ranks in pools.values() for one in ranks)


def _without_gpus(node: str, size: int, pools: Mapping[str, Sequence[Budget]]) -> Shortage | None:
    """Return what the pool that lacks most on a node without GPUs lacks; None if all fit."""
    phases, found = _phases(pools), list[Shortage]()
    for name, ranks in pools.items():
        phase = max(phases[name], key=lambda one: phases[name][one])
        needed, left = phases[name][phase], size - _beside(pools)
        left -= sum(min(bytes_.values()) for other, bytes_ in phases.items() if other != name)
        if needed > left:
            where = f"its {len(ranks)} rank(s) on node {node}"
            device = "the node, beside processes, offloaded state and other pools,"
            text = ranks[0].shortage(phase, needed, where, max(0, left), device)
            found.append(Shortage(needed - left, text, ranks[0].remedies(phase)))
    return max(found, default=None)


def _beside_gpus(node: str, size: int, pools: Mapping[str, Sequence[Budget]]) -> Shortage | None:
    """Return what host memory a node with GPUs lacks; None if it has enough."""
    needed = sum(budget.host_bytes for ranks in pools.values() for budget in ranks)
    if needed <= size:
        return None
    return Shortage(
        needed - size,
        f"ranks on node {node} need {format_bytes(needed)} of host memory, for their processes, offloaded state and"
        f" copies of a save, and it has {format_bytes(size)}: {(needed - size) / 1e9:.1f} GB are missing",
        "spread the ranks over more nodes, take nodes with more memory, or set checkpoint.every=0, or offload=none where"
        " the devices have room",
    )

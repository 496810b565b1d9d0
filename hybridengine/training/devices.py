"""Memory of the ranks' devices against the budgets of a run, before any model is built.

A GPU is a rank's own. The memory of a node without GPUs is shared by all of its ranks, of all pools: when one pool is in
its largest phase, the others hold at least what they do in their smallest. Beside GPUs it holds offloaded state and
copies of a save. The total memory counts, not what is free at the moment: other processes may end, but a budget beyond
the total never fits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hybridengine.config import RunConfig
from hybridengine.formatting import format_bytes
from hybridengine.machine import PROCESS_BYTES, Device
from hybridengine.planning.budget import Budget, budget_of
from hybridengine.training.dry_run import cost_of


@dataclass(frozen=True)
class Placed:
    """Device of a rank."""

    node: str
    device: Device


def budgets_of(config: RunConfig, *, on_gpus: bool) -> dict[str, list[Budget]]:
    """Return the budget of each rank, by pool."""
    cost = cost_of(config)
    return {
        name: [budget_of(config, name, cost, on_gpus=on_gpus, rank=rank) for rank in range(pool.num_ranks)]
        for name, pool in config.pools.items()
    }


def device_problems(
    budgets: Mapping[str, Sequence[Budget]], placed: Mapping[str, Sequence[Placed]]
) -> Iterator[str]:
    """Yield what does not fit: phase, missing bytes and remedies. Both arguments have the ranks of each pool in order."""
    on_node: dict[str, dict[str, list[Budget]]] = defaultdict(lambda: defaultdict(list))
    devices = dict[str, Device]()
    for name, ranks in placed.items():
        short = list[tuple[int, str]]()
        for budget, rank in zip(budgets[name], ranks, strict=True):
            on_node[rank.node][name].append(budget)
            devices[rank.node] = rank.device
            size = rank.device.num_bytes
            if rank.device.is_gpu and (text := budget.excess(size, f"its GPU on node {rank.node}")):
                missing = budget.device_bytes[budget.peak] - size
                short.append((missing, f"{text}; {budget.remedies[budget.peak]}"))
        if short:
            yield max(short)[1]
    for node, pools in on_node.items():
        problems = _beside_gpus if devices[node].is_gpu else _without_gpus
        yield from problems(node, devices[node].node_bytes, pools)


def _without_gpus(node: str, node_bytes: int, pools: Mapping[str, Sequence[Budget]]) -> Iterator[str]:
    """Yield a text for each pool whose ranks on this node do not fit in its memory in their largest phase."""
    # What no phase counts: processes, and offloaded state.
    beside = sum(PROCESS_BYTES + one.offloaded_bytes for ranks in pools.values() for one in ranks)
    phases = {
        name: {phase: sum(one.device_bytes[phase] for one in ranks) for phase in ranks[0].device_bytes}
        for name, ranks in pools.items()
    }
    for name, ranks in pools.items():
        phase = max(phases[name], key=lambda one: phases[name][one])
        others = beside + sum(min(bytes_.values()) for other, bytes_ in phases.items() if other != name)
        where = f"its {len(ranks)} rank(s) on node {node}"
        left = max(0, node_bytes - others)
        device = "the node, beside processes, offloaded state and other pools,"
        text = ranks[0].shortage(phase, phases[name][phase], where, left, device)
        if text is not None:
            yield f"{text}; {ranks[0].remedies[phase]}"


def _beside_gpus(node: str, node_bytes: int, pools: Mapping[str, Sequence[Budget]]) -> Iterator[str]:
    """Yield a text if a node with GPUs lacks host memory."""
    needed = sum(budget.host_bytes for ranks in pools.values() for budget in ranks)
    if needed > node_bytes:
        yield (
            f"ranks on node {node} need {format_bytes(needed)} of host memory, for their processes, offloaded state and"
            f" copies of a save, and it has {format_bytes(node_bytes)}: {(needed - node_bytes) / 1e9:.1f} GB are"
            " missing; set offload=none where it is not, spread the ranks over more nodes, or take nodes with more"
            " memory"
        )

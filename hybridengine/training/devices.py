"""Memory of the ranks' devices against the budget of a run, before any model is built.

A GPU is a rank's own. The memory of a node without GPUs is shared by all of its ranks, of all pools: when one pool is in
its largest phase, the others hold at least what they do in their smallest. Beside GPUs it holds offloaded state and
copies of a save. The total memory counts, not what is free at the moment: other processes may end, but a budget beyond
the total never fits. All ranks of a pool count as the fullest one.
"""

from __future__ import annotations

from collections import Counter
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


def budgets_of(config: RunConfig, *, on_gpus: bool) -> dict[str, Budget]:
    """Return the budget of a rank of each pool."""
    cost = cost_of(config)
    return {name: budget_of(config, name, cost, on_gpus=on_gpus) for name in config.pools}


def device_problems(budgets: Mapping[str, Budget], ranks: Mapping[str, Sequence[Placed]]) -> Iterator[str]:
    """Yield, for each pool whose fullest rank does not fit in its device, the phase, the missing bytes and remedies."""
    on_node = {name: Counter(rank.node for rank in placed) for name, placed in ranks.items()}
    for name, budget in budgets.items():
        sizes = []
        for rank in ranks[name]:
            size, where = rank.device.num_bytes, f"a GPU of node {rank.node}"
            if not rank.device.is_gpu:
                count = on_node[name][rank.node]
                others = sum(
                    on_node[other][rank.node] * (min(one.device_bytes.values()) + _beside(one))
                    for other, one in budgets.items()
                    if other != name
                )
                size = max(0, (size - others) // count - _beside(budget))
                where = f"each of its {count} ranks on node {rank.node}" if count > 1 else f"node {rank.node}"
            sizes.append((size, where))
        if (text := budget.excess(*min(sizes))) is not None:
            yield f"{text}; {budget.remedies[budget.peak]}"
    yield from _host_problems(budgets, ranks, on_node)


def _beside(budget: Budget) -> int:
    """Return the bytes of a rank without a GPU that no phase counts: its process, and offloaded state."""
    return PROCESS_BYTES + budget.offloaded_bytes


def _host_problems(
    budgets: Mapping[str, Budget], ranks: Mapping[str, Sequence[Placed]], on_node: Mapping[str, Counter[str]]
) -> Iterator[str]:
    """Yield, for each node with GPUs that lacks host memory, the missing bytes and remedies."""
    nodes = {one.node: one.device for placed in ranks.values() for one in placed if one.device.is_gpu}
    for node, device in nodes.items():
        needed = sum(on_node[name][node] * budget.host_bytes for name, budget in budgets.items())
        if needed > device.node_bytes:
            yield (
                f"ranks on node {node} need {format_bytes(needed)} of host memory, for their processes, offloaded"
                f" state and copies of a save, and it has {format_bytes(device.node_bytes)}:"
                f" {(needed - device.node_bytes) / 1e9:.1f} GB are missing; set offload=none where it is not, spread the"
                " ranks over more nodes, or take nodes with more memory"
            )

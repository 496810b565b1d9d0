"""Memory of the ranks' devices against the budget of a run, before any model is built.

A GPU is a rank's own. The memory of a node without GPUs is shared by all of its ranks, of all pools: when one pool is in
its largest phase, the others hold at least what they do in their smallest. The total memory counts, not what is free at
the moment: other processes may end, but a budget beyond the total never fits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hybridengine.config import RunConfig
from hybridengine.machine import Device
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
                    on_node[other][rank.node] * min(budgets[other].device_bytes.values())
                    for other in budgets
                    if other != name
                )
                size = max(0, size - others) // count
                where = f"each of its {count} ranks on node {rank.node}" if count > 1 else f"node {rank.node}"
            sizes.append((size, where))
        if (text := budget.excess(*min(sizes))) is not None:
            yield f"{text}; {budget.remedies[budget.peak]}"

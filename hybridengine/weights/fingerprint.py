"""Agreement among the ranks of a domain before they execute a plan together."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.distributed as dist

from hybridengine.errors import PlanError, TransferError
from hybridengine.machine import package_versions
from hybridengine.reshard.plan import Plan


@contextlib.contextmanager
def agreed(plan: Plan, rank: int, group: dist.ProcessGroup, verify: str) -> Iterator[None]:
    """Check, after the block has bound the plan to this rank's weights, that all ranks of its domain can execute it.

    Collective: a rank whose block raises PlanError takes part, so that the others can name it.

    Args:
        verify: when this rank verifies digests.

    Raises:
        PlanError: names the ranks that differ, and their differences.
        TransferError: a rank did not arrive within the group's timeout.
    """
    problem = None
    try:
        yield
    except PlanError as error:
        problem = error
    members = dist.get_process_group_ranks(group)
    if members != sorted(plan.ranks):
        raise PlanError(
            f"rank {rank}: the plan is for ranks {list(plan.ranks)}, its process group has ranks {members}; give the"
            " group of the plan's domain"
        )
    own = {**package_versions(), "verify": verify, "plan": plan.digest}, str(problem or "")
    found: list[tuple[dict[str, str], str] | None] = [None] * len(members)
    try:
        dist.all_gather_object(found, own, group=group)
    except RuntimeError as error:
        raise TransferError(
            f"rank {rank}: not all ranks of {members} have come to make the engine for {plan.source.kind} ->"
            f" {plan.destination.kind}: {error}; look for one that has failed before"
        ) from error
    if problem:
        raise problem
    for other, entry in zip(members, found, strict=True):
        assert entry is not None
        facts, reason = entry
        if reason:
            raise PlanError(f"rank {other} cannot carry out the plan: {reason}")
        for name, value in own[0].items():
            if facts.get(name) != value:
                raise PlanError(
                    f"ranks {rank} and {other} differ in {name}: {value} and {facts.get(name)}; give all ranks the same"
                    " packages, model, sizes, bucket size and verify"
                )

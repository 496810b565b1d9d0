"""Constraints of a plan: sizes that are fixed, and which models share ranks; checked before a search.

Placements are written as pools of roles, "actor,reference,reward | critic", or as one of

    colocate     every model on the same ranks (DeepSpeed-Chat)
    standalone   every model on ranks of its own (OpenRLHF)
    split        actor and reference on some ranks, everything else on others (NeMo-Aligner)
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from hybridengine.errors import ConfigError, TopologyError, raise_all, shown
from hybridengine.planning.layouts import check_layouts
from hybridengine.planning.placements import Placement
from hybridengine.planning.workload import Workload
from hybridengine.topology.sizes import GenSizes, TrainSizes

GENERATE = "generate"
"""Name by which the engine's sizes are fixed."""
NAMED = ("colocate", "standalone", "split")


@dataclass(frozen=True)
class Constraints:
    """Conditions that every plan must meet."""

    sizes: Mapping[str, TrainSizes] = field(default_factory=dict)
    """(p, t, d) of models, by name."""
    gen_sizes: GenSizes | None = None
    placements: tuple[Placement, ...] | None = None
    """Roles that share pools; any, where left out."""

    @classmethod
    def of(
        cls, fixed: Sequence[str], placement: str | None, workload: Workload, num_devices: int
    ) -> Constraints:
        """Return the constraints in NAME=SIZES texts and a placement.

        Raises:
            ConfigError: names, sizes or placements that cannot be.
        """
        sizes, gen = _fixed(fixed, workload)
        wanted = None if placement is None else (_placement(placement, workload),)
        found = cls(sizes, gen, wanted)
        raise_all(found._problems(workload, num_devices))
        return found

    def _problems(self, workload: Workload, num_devices: int) -> Iterator[str]:
        for name, sizes in self.sizes.items():
            if sizes.num_ranks > num_devices:
                yield (
                    f"--fix {name}={sizes} takes p·t·d = {sizes.num_ranks} ranks, and there are {num_devices} devices;"
                    " choose smaller sizes, or more nodes"
                )
            gen = self.gen_sizes if name == "actor" else None
            try:
                check_layouts(workload.model(name).shape, sizes, gen)
            except TopologyError as error:
                yield f"--fix {name}={sizes}: {error}"


def _fixed(texts: Sequence[str], workload: Workload) -> tuple[dict[str, TrainSizes], GenSizes | None]:
    names = [model.name for model in workload.models]
    sizes: dict[str, TrainSizes] = {}
    gen: GenSizes | None = None
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or (name != GENERATE and name not in names):
            near = difflib.get_close_matches(name, [*names, GENERATE], n=1)
            hint = f"did you mean {near[0]}?" if equals and near else "write for instance actor=1-8-16"
            raise ConfigError(
                f"--fix {text!r} must be NAME=SIZES with one of {', '.join(names)} (p-t-d) or {GENERATE} (p_g-t_g);"
                f" {hint}"
            )
        if name in sizes or (name == GENERATE and gen is not None):
            raise ConfigError(f"--fix {name} is given twice; leave one of them out")
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
    given = [name for pool in pools for name in pool]
    unknown = [name for name in given if name not in roles]
    if unknown:
        near = difflib.get_close_matches(unknown[0], [*roles, *NAMED], n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(
            f"--placement {text!r}: {unknown[0]!r} is no model of this run; write pools of {', '.join(roles)}, e.g."
            f" {' | '.join((','.join(roles[:-1]) or roles[0], roles[-1]))!r}, or {', '.join(NAMED)}{hint}"
        )
    wrong = [name for name in roles if given.count(name) != 1]
    if wrong:
        found = "twice" if given.count(wrong[0]) > 1 else "in no pool"
        raise ConfigError(f"--placement {text!r}: {wrong[0]} is {found}; name every model once")
    return tuple(sorted(pools, key=lambda pool: "actor" not in pool))


def _named(text: str, roles: tuple[str, ...]) -> Placement:
    if text == "colocate":
        return (roles,)
    if text == "standalone":
        return tuple((role,) for role in roles)
    first = tuple(role for role in roles if role in ("actor", "reference"))
    others = tuple(role for role in roles if role not in first)
    return (first, others) if others else (first,)

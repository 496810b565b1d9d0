"""Rules of engines on a pool of their own, and of the age of the tokens that they draw."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from hybridengine.config.algorithm import Conflict, CorrectionSection
from hybridengine.config.run_config import RunConfig, ranks_key
from hybridengine.errors import shown
from hybridengine.topology.sizes import divisors

SECTIONS = ("generation", "staleness")
"""Sections that only algorithms with the role generation read."""


def generation_conflicts(config: RunConfig) -> Iterator[Conflict]:
    """Yield the violated rules of the role generation, its pool and its sections."""
    if "generation" not in config.algorithm.roles:
        yield from _unread(config)
        return
    yield from _pool(config)
    yield from _on_policy(config)
    replay = config.generation.replay
    if replay is not None and Path(replay).absolute() == config.calls_file.absolute():
        yield Conflict(
            f"generation.replay={replay} is the file that this run writes itself; copy it, or choose another run.name",
            ("generation.replay", "run.name"),
        )
    if (tries := config.generation.max_tries) > 1 and config.rollout.samples_per_prompt == 1:
        yield Conflict(
            f"generation.max_tries={tries} drops prompts whose responses all have the same score, and with"
            " rollout.samples_per_prompt=1 those are all; choose at least 2, or leave max_tries out",
            ("generation.max_tries", "rollout.samples_per_prompt"),
        )


def _unread(config: RunConfig) -> Iterator[Conflict]:
    """Yield values of sections that the algorithm does not read; defaults, as in a run's written file, are ignored."""
    for name in SECTIONS:
        section = getattr(config, name)
        for key in sorted(section.model_fields_set):
            if (value := getattr(section, key)) != type(section).model_fields[key].default:
                yield Conflict(
                    f"{name}.{key}={value} is not read by algorithm.name={config.algorithm.name}, which has no role"
                    " generation; leave it out, or choose an asynchronous algorithm",
                    (f"{name}.{key}", "algorithm.name"),
                )


def _pool(config: RunConfig) -> Iterator[Conflict]:
    """Yield a missing or shared pool, and ranks that engines do not divide."""
    found = [(name, pool) for name, pool in config.cluster.pools.items() if "generation" in pool.roles]
    if not found:
        yield Conflict(
            f"algorithm.name={config.algorithm.name} has the role generation, whose engines need ranks of their own, and"
            " no pool of cluster.pools has it; add cluster.pools.engines with roles=[generation] and ranks_per_node",
            ("algorithm.name", "cluster.pools"),
        )
    sizes = config.generation.parallel
    for name, pool in found:
        key, others = f"cluster.pools.{name}.roles", [role for role in pool.roles if role != "generation"]
        if others:
            yield Conflict(
                f"{key} names generation and {', '.join(others)}, and engines generate all the time, so that other roles"
                " cannot share their ranks; give generation a pool of its own",
                (key,),
            )
        if pool.num_ranks % sizes.num_ranks:
            product = f"{sizes.pp_size}·{sizes.tp_size} = {sizes.num_ranks}"
            yield Conflict(
                f"generation.parallel={sizes}: engines of p_g·t_g = {product} ranks do not divide the {pool.num_ranks} of"
                f" {ranks_key(name)}={shown(pool.ranks_per_node)}; choose p_g·t_g from"
                f" {', '.join(map(str, divisors(pool.num_ranks)))}, or give the pool a multiple of {sizes.num_ranks}",
                ("generation.parallel", ranks_key(name)),
            )


def _on_policy(config: RunConfig) -> Iterator[Conflict]:
    """Yield an algorithm that needs rows of the current weights, with a bound that admits older ones."""
    algorithm, eta = config.algorithm, config.staleness.max_versions
    reason = algorithm.needs_on_policy
    if reason is None or not eta:
        return
    corrected = algorithm.model_copy(update={"correction": CorrectionSection()})
    remedy = ", or give algorithm.correction" if corrected.needs_on_policy is None else ""
    yield Conflict(
        f"staleness.max_versions={eta} admits tokens of older weights, and algorithm.name={algorithm.name} needs those of"
        f" the current ones: {reason}; choose staleness.max_versions=0{remedy}",
        ("staleness.max_versions", "algorithm.name", "algorithm.correction"),
    )

"""Rules of the sections that score responses: keys of a scorer, keys that nobody reads, time of failed calls."""

from __future__ import annotations

import math
from collections.abc import Iterator

from hybridengine.config.algorithm import Conflict, Role
from hybridengine.config.reward_sections import RewardSection, ScorerSection, scorer_key
from hybridengine.config.run_config import SCORERS, RunConfig

SINGLE_SCORER_KEYS = tuple(ScorerSection.model_fields)
"""Keys of a section's only scorer, or of each of its terms."""


def reward_sections(config: RunConfig) -> dict[Role, RewardSection]:
    """Return every section that scores responses in the run's dataflow, by name."""
    return {role: getattr(config, role) for role in SCORERS if role in config.algorithm.roles}


def scorer_conflicts(config: RunConfig) -> Iterator[Conflict]:
    """Keys that need one another, and keys that nobody reads."""
    for name, section in reward_sections(config).items():
        for term, scorer in section.scorers.items():
            yield from _scorer(scorer_key(name, term), scorer, is_reward=not term and name == "reward")
        yield from _terms(config, name, section)
        yield from _failures(config, name, section)


def _scorer(key: str, scorer: ScorerSection, *, is_reward: bool) -> Iterator[Conflict]:
    """Keys that a scorer needs; a single reward without a function has the demo's, which no cost and no term can mean."""
    if scorer.kind == "model" and scorer.path is None:
        yield Conflict(
            f"{key}.kind=model needs a checkpoint; give {key}.path, or {key}.kind=function",
            (f"{key}.kind", f"{key}.path"),
        )
    given = is_reward or "function" in scorer.model_fields_set
    if scorer.kind == "function" and not (given and scorer.function):
        yield Conflict(
            f"{key} names no function; give {key}.function as package.module:function, or {key}.kind=model with"
            f" {key}.path",
            (f"{key}.kind", f"{key}.function"),
        )


def _terms(config: RunConfig, name: str, section: RewardSection) -> Iterator[Conflict]:
    if not section.terms:
        return
    given = section.model_fields_set
    unread = [key for key in SINGLE_SCORER_KEYS if key in given and getattr(section, key) is not None]
    if unread:
        keys = ", ".join(f"{name}.{key}" for key in unread)
        yield Conflict(
            f"{name}.terms gives several scorers, so that nothing reads {keys}; write such keys beneath a term and null"
            f" here, or leave {name}.terms out",
            (f"{name}.terms", *(f"{name}.{key}" for key in unread)),
        )
    for term in section.models:
        if f"{name}_{term}" in config.algorithm.roles:
            yield Conflict(
                f"{name}.terms.{term} would be called {name}_{term}, as a role of {config.algorithm.name} is; choose"
                " another name",
                (f"{name}.terms", "algorithm.name"),
            )
    if not any(section.weights.values()):
        yield Conflict(
            f"{name}.terms have the weights {list(section.weights.values())}, so that every score is 0; give one of"
            " them another weight",
            (f"{name}.terms",),
        )


def _failures(config: RunConfig, name: Role, section: RewardSection) -> Iterator[Conflict]:
    """Retries against `on_failure`, and against the time that a call of the group may take."""
    keys = (f"{name}.on_failure", f"{name}.retries")
    if section.on_failure == "fail" and section.retries:
        yield Conflict(
            f"{name}.retries={section.retries} is not read with {name}.on_failure=fail; choose retry or drop, or leave"
            " retries out",
            keys,
        )
    if section.on_failure == "retry" and not section.num_retries:
        yield Conflict(
            f"{name}.on_failure=retry needs at least one retry; raise {name}.retries=0, or choose fail", keys
        )
    calls, parts = 1 + section.num_retries, 1
    if section.on_failure == "drop" and (pool := config.pools.get(config.pool_of(name))):
        rows = math.ceil(config.rows_per_step / pool.num_ranks)
        rounds = math.ceil(math.ceil(rows / section.rows_per_call) / section.num_processes)
        parts = rounds * len(section.functions)
    longest_s = calls * parts * section.timeout_s
    if section.functions and longest_s >= config.timeouts.call_s:
        after = f", {parts} after one another on a rank," if parts > 1 else ""
        yield Conflict(
            f"{name}.timeout_s={section.timeout_s:g} and {calls} {'calls' if calls > 1 else 'call'} for the same rows"
            f"{after} make {longest_s:g} s, which must be less than timeouts.call_s={config.timeouts.call_s:g}; lower the"
            f" one or raise the other{f', or raise {name}.rows_per_call' if parts > 1 else ''}",
            (f"{name}.timeout_s", f"{name}.rows_per_call", *keys, "timeouts.call_s"),
        )

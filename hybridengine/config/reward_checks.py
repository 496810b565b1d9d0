"""Rules of scoring: keys of scorers that require one another, unused keys, and time limits of calls."""

from __future__ import annotations

import math
from collections.abc import Iterator

from hybridengine.config.algorithm import Conflict, Role
from hybridengine.config.reward_sections import RewardSection, ScorerSection, scorer_key
from hybridengine.config.run_config import RunConfig, reward_sections


def reward_conflicts(config: RunConfig) -> Iterator[Conflict]:
    """Yield the violated rules of scoring: keys that require one another, unused keys, and limits of calls."""
    for name, section in reward_sections(config).items():
        for term, scorer in section.scorers.items():
            yield from _scorer(scorer_key(name, term), scorer, is_reward=not term and name == "reward")
        yield from _terms(config, name, section)
        yield from _failures(config, name, section)


def _scorer(key: str, scorer: ScorerSection, *, is_reward: bool) -> Iterator[Conflict]:
    """Yield missing keys of a scorer; a single reward defaults to the demo's function, which costs and terms do not."""
    if scorer.kind in ("model", "judge") and scorer.path is None:
        yield Conflict(
            f"{key}.kind={scorer.kind} needs a checkpoint; give {key}.path, or {key}.kind=function",
            (f"{key}.kind", f"{key}.path"),
        )
    for kind, needs in (("service", "urls"), ("judge", "messages")):
        if (scorer.kind == kind) == (getattr(scorer, kind) is not None):
            continue
        found = "needs" if scorer.kind == kind else "does not read"
        remedy = "give" if scorer.kind == kind else "leave out"
        other = "function" if scorer.kind == kind else kind
        yield Conflict(
            f"{key}.kind={scorer.kind} {found} {key}.{kind}; {remedy} {key}.{kind}.{needs}, or choose {key}.kind={other}",
            (f"{key}.kind", f"{key}.{kind}"),
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
    unread = [key for key in ScorerSection.model_fields if key in given and getattr(section, key) is not None]
    if section.kind == "function":  # the default, by which a file takes back what its base has chosen
        unread = [key for key in unread if key != "kind"]
    if unread:
        keys = ", ".join(f"{name}.{key}" for key in unread)
        here = f"{name}.kind=function here" if unread == ["kind"] else "null here"
        yield Conflict(
            f"{name}.terms gives several scorers, so that nothing reads {keys}; write such keys beneath a term and"
            f" {here}, or leave {name}.terms out",
            (f"{name}.terms", *(f"{name}.{key}" for key in unread)),
        )
    # With a teacher, scores may be metrics alone.
    if not any(section.weights.values()) and "teacher" not in config.algorithm.roles:
        yield Conflict(
            f"{name}.terms have weights of 0 only, so that every score is 0; give one of them another weight",
            tuple(f"{name}.terms.{term}.weight" for term in section.terms),
        )
    for term in (*section.models, *section.judges):
        if f"{name}_{term}" in config.algorithm.roles:
            yield Conflict(
                f"{name}.terms.{term} would be called {name}_{term}, as a role of {config.algorithm.name} is; choose"
                " another name",
                (f"{name}.terms", "algorithm.name"),
            )


def _failures(config: RunConfig, name: Role, section: RewardSection) -> Iterator[Conflict]:
    """Yield conflicts between the time limits of functions and services and that of the group's calls.

    Rows are dropped part by part, so that all parts of a rank may fail; otherwise the first failure ends the run.
    """
    pool, rows = config.pools.get(config.pool_of(name)), 1
    if (drops := section.on_failure == "drop") and pool is not None:
        rows = math.ceil(config.rows_per_step / pool.num_ranks)
    calls = math.ceil(rows / section.rows_per_call)

    def rounds(at_once: int) -> int:
        return math.ceil(calls / at_once)

    if section.functions:
        parts = rounds(section.num_processes) * len(section.functions) if drops else 1
        yield from _longest(config, name, section, 1 + section.num_retries, parts)
    if section.services:
        at_once = [service.max_in_flight for service in section.services.values()]
        parts = sum(map(rounds, at_once)) if drops else 1
        yield from _longest(config, name, section, 1 + section.num_service_retries, parts, pauses=True)


def _longest(
    config: RunConfig, name: Role, section: RewardSection, tries: int, parts: int, *, pauses: bool = False
) -> Iterator[Conflict]:
    """Yield a conflict if `tries` calls for each of `parts` parts may take longer than the group's call.

    With `pauses`, each of which ends within `timeout_s`.
    """
    longest_s = (2 * tries - 1 if pauses else tries) * parts * section.timeout_s
    if longest_s >= config.timeouts.call_s:
        after = f", {parts} after one another on a rank," if parts > 1 else ""
        between = f" and pauses of up to {section.timeout_s:g} s" if pauses and tries > 1 else ""
        yield Conflict(
            f"{name}.timeout_s={section.timeout_s:g} and {tries} {'calls' if tries > 1 else 'call'} for the same rows"
            f"{between}{after} make {longest_s:g} s, which must be less than timeouts.call_s="
            f"{config.timeouts.call_s:g}; lower the one or raise the other"
            f"{f', or raise {name}.rows_per_call' if parts > 1 else ''}",
            (
                *(f"{name}.{key}" for key in ("timeout_s", "rows_per_call", "on_failure", "retries")),
                "timeouts.call_s",
            ),
        )

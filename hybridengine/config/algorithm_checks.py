"""Rules of the section that names the dataflow: its roles, how many responses it compares, and what it reads."""

from __future__ import annotations

from collections.abc import Iterator

from hybridengine.config.algorithm_sections import ALGORITHM_ROLES, GROUPED
from hybridengine.config.conflicts import Conflict
from hybridengine.config.run_config import RunConfig

UNCORRECTED = {
    "online_dpo": "which weighs no tokens",
    "grpo_from_engine": "which takes the engine's log-probs for the trainer's",
}
"""Dataflows without a rollout correction, and why."""


def algorithm_conflicts(config: RunConfig) -> Iterator[Conflict]:
    """Keys that need one another, and keys that nobody reads."""
    yield from _roles(config)
    name, samples = config.algorithm.name, config.rollout.samples_per_prompt
    if name in GROUPED and samples < 2:
        yield Conflict(
            f"rollout.samples_per_prompt={samples} leaves algorithm.name={name} nothing to compare; choose at least 2",
            ("rollout.samples_per_prompt", "algorithm.name"),
        )
    if name == "online_dpo":
        replicas, mini_batches = config.actor.train_sizes.dp_size, config.actor.mini_batches
        if config.data.batch_size % (replicas * mini_batches):
            yield Conflict(
                f"data.batch_size={config.data.batch_size} pairs of algorithm.name=online_dpo must split evenly over"
                f" actor.mini_batches={mini_batches} and the d = {replicas} replicas of actor.parallel="
                f"{config.actor.parallel}; choose a multiple of {replicas * mini_batches}",
                ("data.batch_size", "actor.parallel", "actor.mini_batches"),
            )
    correction = config.algorithm.correction
    if correction is not None and name in UNCORRECTED:
        yield Conflict(
            f"algorithm.correction is not read by algorithm.name={name}, {UNCORRECTED[name]}; leave it out",
            ("algorithm.correction", "algorithm.name"),
        )
    if correction is not None and correction.low >= correction.high:
        yield Conflict(
            f"algorithm.correction.low={correction.low:g} must be less than its high={correction.high:g};"
            " lower the one or raise the other",
            ("algorithm.correction.low", "algorithm.correction.high"),
        )


def _roles(config: RunConfig) -> Iterator[Conflict]:
    algorithm, keys = config.algorithm, ("algorithm.name", "algorithm.roles")
    is_known = algorithm.name in ALGORITHM_ROLES
    if is_known and algorithm.roles is not None:
        yield Conflict(
            f"algorithm.roles={list(algorithm.roles)} is not read, since those of {algorithm.name} are known; leave it"
            " out",
            keys,
        )
    if is_known and algorithm.options:
        yield Conflict(
            f"algorithm.options={algorithm.options} are not read by {algorithm.name}, only by a dataflow of your own;"
            " leave them out",
            ("algorithm.name", "algorithm.options"),
        )
    if not is_known and not algorithm.roles:
        yield Conflict(
            f"algorithm.name={algorithm.name} is a module of your own; give algorithm.roles, e.g."
            " [actor, reference, reward]",
            keys,
        )
    used = algorithm.used_roles
    if used and "reward" not in used and config.eval_file is not None:
        yield Conflict(
            f"algorithm.roles={list(used)} lacks the reward, which scores the held-out prompts of"
            f" {'data.eval_file' if config.data.eval_file else 'data.task'}; add it",
            (*keys, "data.eval_file", "data.task"),
        )
    if used and "actor" not in used:
        yield Conflict(f"algorithm.roles={list(used)} lacks the actor, which generates; add it", keys)
    if config.actor.kl_loss_coef and used and "reference" not in used:
        yield Conflict(
            f"actor.kl_loss_coef={config.actor.kl_loss_coef:g} needs a reference, which algorithm.roles={list(used)}"
            " lacks; add it, or leave the coefficient at 0",
            (*keys, "actor.kl_loss_coef"),
        )

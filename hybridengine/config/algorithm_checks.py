"""Rules between the algorithm and the other sections; those of one algorithm alone are its own."""

from __future__ import annotations

from collections.abc import Iterator

from hybridengine.config.conflicts import Conflict
from hybridengine.config.run_config import RunConfig
from hybridengine.errors import shown


def algorithm_conflicts(config: RunConfig) -> Iterator[Conflict]:
    """Keys that need one another, and keys that nobody reads."""
    algorithm, samples = config.algorithm, config.rollout.samples_per_prompt
    named = f"algorithm.name={algorithm.name}"
    if samples < algorithm.min_samples:
        yield Conflict(
            f"rollout.samples_per_prompt={samples} leaves {named} nothing to compare; choose at least"
            f" {algorithm.min_samples}",
            ("rollout.samples_per_prompt", "algorithm.name"),
        )
    correction = algorithm.correction
    if correction is not None and algorithm.uncorrected is not None:
        yield Conflict(
            f"algorithm.correction is not read by {named}, {algorithm.uncorrected}; leave it out",
            ("algorithm.correction", "algorithm.name"),
        )
    if correction is not None and correction.low >= correction.high:
        yield Conflict(
            f"algorithm.correction.low={correction.low:g} must be less than its high={correction.high:g};"
            " lower the one or raise the other",
            ("algorithm.correction.low", "algorithm.correction.high"),
        )
    roles = ", ".join(algorithm.roles)
    if "reward" not in algorithm.roles and config.eval_file is not None:
        held_out = "data.eval_file" if config.data.eval_file else "data.task"
        yield Conflict(
            f"{named} has the roles {roles}, without the reward, which scores the held-out prompts of {held_out}; add"
            " it to the roles of the class",
            ("algorithm.name", "data.eval_file", "data.task"),
        )
    if config.actor.kl_loss_coef and "reference" not in algorithm.roles:
        yield Conflict(
            f"actor.kl_loss_coef={config.actor.kl_loss_coef:g} needs a reference, and {named} has the roles {roles};"
            " add it to the roles of the class, or leave the coefficient at 0",
            ("algorithm.name", "actor.kl_loss_coef"),
        )
    try:
        found = list(algorithm.conflicts(config))
    except Exception as error:  # a class of the user's own may raise anything
        yield Conflict(
            f"the method conflicts of {named} raised {type(error).__name__}: {error}; it must yield the rules that are"
            " broken, and raise nothing",
            ("algorithm.name",),
        )
        return
    for conflict in found:
        if isinstance(conflict, Conflict):
            yield conflict
        else:
            yield Conflict(
                f"the method conflicts of {named} yielded {shown(conflict)}; it must yield"
                " hybridengine.Conflict(message, (key, ...))",
                ("algorithm.name",),
            )

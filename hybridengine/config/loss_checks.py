"""Rules of the actor's loss: its kind, which the algorithm decides, and the options that it reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from hybridengine.config.algorithm import Algorithm, Conflict
from hybridengine.config.loss_sections import (
    CLIP_COV_LOSS,
    CLIPPED_LOSS,
    CLIPPING_LOSSES,
    COVARIANCE_LOSSES,
    GSPO_LOSS,
    KL_COV_LOSS,
    LOSS_KINDS,
    POLICY_LOSSES,
    PREFERENCE_LOSS,
    SAPO_LOSS,
    SUPERVISED_LOSS,
    LossKind,
)
from hybridengine.config.run_config import RunConfig

READERS: Mapping[str, tuple[str, ...]] = {
    "actor.clip_low": CLIPPING_LOSSES,
    "actor.clip_high": CLIPPING_LOSSES,
    "actor.dual_clip": (CLIPPED_LOSS, GSPO_LOSS, CLIP_COV_LOSS),
    "actor.entropy_coef": POLICY_LOSSES,
    "actor.kl_loss_coef": POLICY_LOSSES,
    "actor.kl_loss_estimator": POLICY_LOSSES,
    "actor.loss_aggregation": (*POLICY_LOSSES, SUPERVISED_LOSS),
    "algorithm.sapo.positive_temperature": (SAPO_LOSS,),
    "algorithm.sapo.negative_temperature": (SAPO_LOSS,),
    "algorithm.covariance.share": COVARIANCE_LOSSES,
    "algorithm.covariance.low": (CLIP_COV_LOSS,),
    "algorithm.covariance.high": (CLIP_COV_LOSS,),
    "algorithm.covariance.kl_weight": (KL_COV_LOSS,),
    "algorithm.label_smoothing": (PREFERENCE_LOSS,),
}
"""Dotted key -> losses of the project that read it, or whose update does; a loss of the user may read all of them."""
TRAINERS: Mapping[LossKind, str] = {
    "advantages": "one that computes advantages, such as grpo",
    "preferences": "dpo or online_dpo",
    "demonstrations": "sft",
}
"""Kind of a loss -> algorithms that have such losses."""


def loss_conflicts(config: RunConfig) -> Iterator[Conflict]:
    """Yield a loss of another kind, changed options that the loss does not read (a run's file has all defaults), a KL
    loss without a reference, and an empty range."""
    algorithm, kl_loss_coef = config.algorithm, config.actor.kl_loss_coef
    if (message := kind_problem(algorithm, algorithm.loss)) is not None:
        yield Conflict(message, ("algorithm.loss", "algorithm.name"))
        return
    yield from _unread(config)
    if kl_loss_coef and "reference" not in algorithm.roles and _reads(algorithm.loss, "actor.kl_loss_coef"):
        yield Conflict(
            f"actor.kl_loss_coef={kl_loss_coef:g} needs a reference, and algorithm.name={algorithm.name} has the roles"
            f" {', '.join(algorithm.roles)}; add it to the roles of the class, or leave the coefficient at 0",
            ("algorithm.name", "actor.kl_loss_coef"),
        )
    if (covariance := algorithm.covariance).low >= covariance.high:
        yield Conflict(
            f"algorithm.covariance.low={covariance.low:g} must be less than its high={covariance.high:g}; lower the one"
            " or raise the other",
            ("algorithm.covariance.low", "algorithm.covariance.high"),
        )


def kind_of(algorithm: Algorithm) -> LossKind | None:
    """Return the kind of the algorithm's losses, which is that of its default; None if that is a loss of the user."""
    return LOSS_KINDS.get(type(algorithm).model_fields["loss"].default)


def kind_problem(algorithm: Algorithm, loss: str) -> str | None:
    """Return the problem of a loss of another kind than the algorithm's; None if there is none, or a kind is unknown.

    `loss` is where the function `algorithm.loss` is defined.
    """
    wanted, found = kind_of(algorithm), LOSS_KINDS.get(loss)
    if wanted in (None, found) or found is None:
        return None
    default = type(algorithm).model_fields["loss"].default
    return (
        f"algorithm.loss={algorithm.loss} is a loss of {found}, and algorithm.name={algorithm.name} trains on {wanted};"
        f" leave it out for {default}, or choose another algorithm.name: {TRAINERS[found]}"
    )


def _unread(config: RunConfig) -> Iterator[Conflict]:
    """Yield the changed options that the loss does not read."""
    loss = config.algorithm.loss
    for key, readers in READERS.items():
        *path, name = key.split(".")
        section: BaseModel = config
        for part in path:
            section = getattr(section, part)
        field = type(section).model_fields.get(name)
        if field is None or _reads(loss, key) or (value := getattr(section, name)) == field.default:
            continue
        others = [other for other in readers if LOSS_KINDS[other] == LOSS_KINDS[loss]]
        choice = f", or choose {' or '.join(others)}" if others else ""
        yield Conflict(
            f"{key}={_text(value)} is not read by algorithm.loss={loss}; leave it out{choice}",
            (key, "algorithm.loss"),
        )


def _reads(loss: str, key: str) -> bool:
    return loss not in LOSS_KINDS or loss in READERS[key]


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)

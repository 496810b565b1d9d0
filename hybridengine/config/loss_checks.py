"""Rules of the options that single loss functions of the actor read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pydantic import BaseModel

from hybridengine.config.algorithm import Conflict
from hybridengine.config.loss_sections import (
    CISPO_LOSS,
    CLIP_COV_LOSS,
    CLIPPED_LOSS,
    COVARIANCE_LOSSES,
    GPG_LOSS,
    GSPO_LOSS,
    KL_COV_LOSS,
    SAPO_LOSS,
)
from hybridengine.config.run_config import RunConfig

_CLIPPING = (CLIPPED_LOSS, GSPO_LOSS, CISPO_LOSS, CLIP_COV_LOSS)
READERS: Mapping[str, tuple[str, ...]] = {
    "actor.clip_low": _CLIPPING,
    "actor.clip_high": _CLIPPING,
    "actor.dual_clip": (CLIPPED_LOSS, GSPO_LOSS, CLIP_COV_LOSS),
    "algorithm.sapo.positive_temperature": (SAPO_LOSS,),
    "algorithm.sapo.negative_temperature": (SAPO_LOSS,),
    "algorithm.covariance.share": COVARIANCE_LOSSES,
    "algorithm.covariance.low": (CLIP_COV_LOSS,),
    "algorithm.covariance.high": (CLIP_COV_LOSS,),
    "algorithm.covariance.kl_weight": (KL_COV_LOSS,),
}
"""Dotted key -> losses of the project that read it."""
KNOWN = (*_CLIPPING, SAPO_LOSS, GPG_LOSS, KL_COV_LOSS)
"""Losses whose options are known; a loss of the user may read all of them."""


def loss_conflicts(config: RunConfig) -> Iterator[Conflict]:
    """Yield changed options that the loss does not read (a run's file has all defaults), and an empty range."""
    loss, covariance = config.algorithm.loss, config.algorithm.covariance
    for key, readers in READERS.items() if loss in KNOWN else ():
        *path, name = key.split(".")
        section: BaseModel = config
        for part in path:
            section = getattr(section, part)
        value = getattr(section, name)
        if loss not in readers and value != type(section).model_fields[name].default:
            yield Conflict(
                f"{key}={value:g} is not read by algorithm.loss={loss}; leave it out, or choose {' or '.join(readers)}",
                (key, "algorithm.loss"),
            )
    if covariance.low >= covariance.high:
        yield Conflict(
            f"algorithm.covariance.low={covariance.low:g} must be less than its high={covariance.high:g}; lower the one"
            " or raise the other",
            ("algorithm.covariance.low", "algorithm.covariance.high"),
        )

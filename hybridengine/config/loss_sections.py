"""Options that single loss functions of the actor read, and the rule that refuses them with the others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from hybridengine.config.values import NonNegative, Positive, Section, Share

LOSSES = "hybridengine.algorithms.losses"
CLIPPED_LOSS = f"{LOSSES}.policy:clipped_loss"
GSPO_LOSS = f"{LOSSES}.policy:gspo_loss"
CISPO_LOSS = f"{LOSSES}.policy:cispo_loss"
SAPO_LOSS = f"{LOSSES}.unclipped:sapo_loss"
GPG_LOSS = f"{LOSSES}.unclipped:gpg_loss"
CLIP_COV_LOSS = f"{LOSSES}.covariance:clip_cov_loss"
KL_COV_LOSS = f"{LOSSES}.covariance:kl_cov_loss"
COVARIANCE_LOSSES = (CLIP_COV_LOSS, KL_COV_LOSS)
"""Losses that treat tokens of a high covariance differently."""

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


class SapoSection(Section):
    """Gates of SAPO's loss, whose slope falls the faster from a ratio of 1 on the higher their temperature."""

    positive_temperature: Positive = 1.0
    """Temperature of tokens with a positive advantage."""
    negative_temperature: Positive = 1.05
    """Temperature of the other tokens; published above the first, as their gradients are less stable."""


class CovarianceSection(Section):
    """Tokens that clip-cov leaves out of the loss and that kl-cov holds near the old policy."""

    share: Share = 2e-4
    """Share of the batch's tokens that are chosen, at least one. Published: 2e-4; for kl-cov with a model of 7B 2e-3."""
    low: float = 1.0
    """Smallest covariance of a token that clip-cov may choose."""
    high: float = 5.0
    """Largest covariance of a token that clip-cov may choose."""
    kl_weight: NonNegative = 1.0
    """Weight of kl-cov's penalty on the chosen tokens."""


def unread_options(config: Any, loss: str) -> Iterator[tuple[str, Any, tuple[str, ...]]]:
    """Yield key, value and readers of each changed option of a `RunConfig` that `loss`, an import path, does not read.

    Defaults, as in a run's written file, are ignored.
    """
    if loss not in KNOWN:
        return
    for key, readers in READERS.items():
        *path, name = key.split(".")
        section: BaseModel = config
        for part in path:
            section = getattr(section, part)
        value = getattr(section, name)
        if loss not in readers and value != type(section).model_fields[name].default:
            yield key, value, readers

"""Import paths of the actor's loss functions, and options that single ones read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

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
CLIPPING_LOSSES = (CLIPPED_LOSS, GSPO_LOSS, CISPO_LOSS, CLIP_COV_LOSS)
"""Losses with the clip range of the section `actor`."""
POLICY_LOSSES = (*CLIPPING_LOSSES, SAPO_LOSS, GPG_LOSS, KL_COV_LOSS)
PREFERENCE_LOSS = f"{LOSSES}.dpo:preference_loss"
IPO_LOSS = f"{LOSSES}.dpo:ipo_loss"
SUPERVISED_LOSS = f"{LOSSES}.supervised:negative_log_likelihood"

LossKind = Literal["advantages", "preferences", "demonstrations"]
"""Rows that a loss is computed from: responses with advantages, pairs of responses, or responses to imitate."""
LOSS_KINDS: Mapping[str, LossKind] = {
    **dict.fromkeys(POLICY_LOSSES, "advantages"),
    **dict.fromkeys((PREFERENCE_LOSS, IPO_LOSS), "preferences"),
    SUPERVISED_LOSS: "demonstrations",
}
"""Loss of the project -> its kind. A loss of the user may be of any kind."""


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

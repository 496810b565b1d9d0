"""The sections that say which dataflow runs and with what numbers, and which roles each dataflow has."""

from __future__ import annotations

import difflib
import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from hybridengine.config.values import NonNegative, Positive, Section, Share
from hybridengine.errors import shown

Role = Literal["actor", "critic", "cost_critic", "reference", "reward", "cost"]
"""A model of a dataflow."""

ALGORITHM_ROLES: dict[str, tuple[Role, ...]] = {
    "ppo": ("actor", "critic", "reference", "reward"),
    "grpo": ("actor", "reference", "reward"),
    "grpo_from_engine": ("actor", "reference", "reward"),
    "rloo": ("actor", "reference", "reward"),
    "remax": ("actor", "reference", "reward"),
    "reinforce_plus_plus": ("actor", "reference", "reward"),
    "safe_rlhf": ("actor", "critic", "cost_critic", "reference", "reward", "cost"),
    "online_dpo": ("actor", "reference", "reward"),
}
"""Dataflow, a module of `hybridengine.drivers`, -> its roles."""


def _check_driver(name: str) -> str:
    if name in ALGORITHM_ROLES or re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", name, re.ASCII):
        return name
    near = difflib.get_close_matches(name, ALGORITHM_ROLES, n=1)
    meant = f"did you mean {near[0]}? " if near else ""
    raise ValueError(
        f"{name!r} is no dataflow; {meant}choose from {', '.join(ALGORITHM_ROLES)}, or give the import path of a"
        " module, with a dot: package.module"
    )


def _check_options(options: dict[str, Any]) -> dict[str, Any]:
    for name, value in options.items():
        if not isinstance(value, int | float | bool | str):
            raise ValueError(
                f"{name}={shown(value)} must be a number, true, false or a text; give one of these, or several options"
            )
    return options


GROUPED = ("grpo", "grpo_from_engine", "rloo", "online_dpo")
"""Dataflows that compare responses to the same prompt."""


class CorrectionSection(Section):
    """What to do about the engine's log-probs being others than the trainer's: weights rho = pi_train / pi_rollout."""

    name: Literal["token_tis", "sequence_tis", "sequence_mis", "geometric_filter"] = "token_tis"
    """token_tis and sequence_tis cut weights off at `high`, sequence_mis drops sequences beyond it; geometric_filter
    drops those whose geometric mean of rho is not in low to high."""
    high: Positive = 2.0
    """Largest weight."""
    low: NonNegative = 0.0
    """Smallest mean, of geometric_filter."""


class AlgorithmSection(Section):
    """From scores to an update."""

    name: Annotated[str, AfterValidator(_check_driver)] = "ppo"
    """The dataflow: one of this project's, or the import path of a module with a function `step`."""
    roles: tuple[Role, ...] | None = None
    """Roles of a dataflow of one's own; those of this project are known."""
    options: Annotated[dict[str, Any], AfterValidator(_check_options)] = Field(default_factory=dict)
    """Whatever a dataflow of one's own wants to be told."""
    gamma: Share = 1.0
    """Discount of later rewards."""
    lam: Share = 0.95
    """Lambda of generalised advantage estimation."""
    kl_coef: NonNegative = 0.05
    """Weight of the KL penalty on each token's reward."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    """Estimator of the KL divergence from the reference."""
    whiten_advantages: bool = True
    """Advantages get mean 0 and variance 1 over the valid tokens (PPO, Safe-RLHF)."""
    normalize_std: bool = True
    """Advantages are divided by their group's standard deviation (GRPO); without it, Dr.GRPO."""
    correction: CorrectionSection | None = None
    """Rollout correction; left out, there is none."""
    cost_limit: float = 0.0
    """Largest mean cost of a response (Safe-RLHF)."""
    multiplier_lr: Positive = 0.1
    """Learning rate of the logarithm of the Lagrange multiplier (Safe-RLHF)."""
    max_log_multiplier: NonNegative = 5.0
    """The multiplier stays below e to this (Safe-RLHF)."""
    beta: Positive = 0.1
    """Strength of the pull to the reference (online DPO)."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Share of the preferences that are taken to be wrong (online DPO)."""

    @property
    def used_roles(self) -> tuple[Role, ...]:
        """Roles of the dataflow."""
        return self.roles or ALGORITHM_ROLES.get(self.name, ())

    @property
    def driver(self) -> str:
        """Import path of the dataflow's module."""
        return self.name if "." in self.name else f"hybridengine.drivers.{self.name}"

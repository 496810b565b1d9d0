"""Section of an environment: where a run's prompts come from, and how responses to them are scored."""

from __future__ import annotations

import difflib
from typing import Annotated

from pydantic import AfterValidator, Field, JsonValue

from hybridengine.config.values import Count, CountOrZero, Section

KINDS = ("reasoning_gym", "verifiers", "gymnasium")
"""Libraries whose environments have names."""
EPISODE_FUNCTION = "hybridengine.environments.episode:rollout"
"""Function of `rollout.episode` that plays environments."""


def _check_name(name: str) -> str:
    kind, slash, rest = name.partition("/")
    if kind in KINDS and slash and rest:
        return name
    near = difflib.get_close_matches(kind, KINDS, n=1)
    meant = f"did you mean {near[0]}/{rest or 'NAME'}? " if near else ""
    raise ValueError(f"{name!r} is not KIND/NAME with a KIND of {', '.join(KINDS)}; {meant}correct it")


class EnvironmentSection(Section):
    """An environment of a library, by name: it writes the prompts, plays the other side and gives the reward."""

    name: Annotated[str, AfterValidator(_check_name)]
    """reasoning_gym/DATASET, verifiers/ENVIRONMENT or gymnasium/ID."""
    options: dict[str, JsonValue] = Field(default_factory=dict)
    """Arguments of the environment's constructor."""
    settings: dict[str, JsonValue] = Field(default_factory=dict)
    """How it is played; the keys depend on the kind (docs/how-to/environments.md)."""
    train_rows: Count = 1024
    """Number of training prompts."""
    eval_rows: Count = 64
    """Number of held-out prompts, which are not among the training prompts; those of Gymnasium have other seeds, and may
    begin alike."""
    seed: CountOrZero = 0
    """Seed of the prompts, independent of the run's."""

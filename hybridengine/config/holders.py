"""The models of a run, which have weights on ranks: roles, and models among the terms of a reward."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from hybridengine.config.algorithm import Role
from hybridengine.config.reward_sections import scorer_key
from hybridengine.config.run_config import SCORERS, RunConfig
from hybridengine.topology.grid import Grid
from hybridengine.topology.sizes import TrainSizes


class ModelHolder(NamedTuple):
    """Something with weights on the ranks: a role, or a model among the terms of a reward."""

    role: Role
    key: str
    """Dotted key of its section."""
    section: Any
    """Any of those with `parallel` and `micro_batch_tokens`."""
    grid: Grid
    sizes_key: str
    """Dotted key of its sizes."""
    folder: Path
    """Hugging Face checkpoint that it enters RL with."""

    @property
    def name(self) -> str:
        """Name of its group of workers: "reward", or "reward_NAME" for a term."""
        return self.key.replace(".terms.", "_")

    @property
    def term(self) -> str:
        """Name of its term; "" for a role."""
        return self.key.partition(".terms.")[2]

    @property
    def sizes(self) -> TrainSizes:
        """Sizes (p, t, d)."""
        return self.grid.sizes

    @property
    def path(self) -> str | None:
        """Checkpoint of its own."""
        return getattr(self.section, "path", None)

    @property
    def hf_config(self) -> str | None:
        """Description of that checkpoint, where it is elsewhere."""
        return getattr(self.section, "hf_config", None)

    @property
    def has_score_head(self) -> bool:
        """True if it gives scores or values in place of log-probs."""
        return self.role not in ("actor", "reference")


def model_holders(config: RunConfig) -> list[ModelHolder]:
    """Return all of them, the roles first; functions have no weights."""
    holders = [_holder(config, role, role, getattr(config, role)) for role in config.model_roles]
    for role in SCORERS:
        if role in config.algorithm.roles:
            models = getattr(config, role).models.items()
            holders += [
                _holder(config, role, scorer_key(role, term), scorer) for term, scorer in models if term
            ]
    return holders


def _holder(config: RunConfig, role: Role, key: str, section: Any) -> ModelHolder:
    sizes = TrainSizes.parse(section.parallel or config.actor.parallel)
    sizes_key = f"{key}.parallel" if section.parallel else "actor.parallel"
    path = getattr(section, "path", None)
    folder = Path(path) if path else config.start_folder
    return ModelHolder(role, key, section, Grid(sizes, config.cluster.order), sizes_key, folder)

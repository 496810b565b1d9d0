"""This project as a backend of verl's own trainer: `actor_rollout_ref.model.external_lib=hybridengine.integrations.verl`.

Importing it registers, with verl 0.9, an engine for language models and one for value models (`engine.py`), and a rollout
(`rollout.py`) whose servers (`replica.py`) generate on the ranks that train, with one copy of the weights.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from verl.workers.rollout import base
from verl.workers.rollout.replica import RolloutReplicaRegistry

from hybridengine.integrations.verl import engine
from hybridengine.integrations.verl.replica import HybridReplica

NAME = "hybridengine"
"""Value of `actor_rollout_ref.rollout.name`."""

engine.register()
base._ROLLOUT_REGISTRY[NAME, "async"] = "hybridengine.integrations.verl.rollout.HybridRollout"
RolloutReplicaRegistry.register(NAME, lambda: HybridReplica)

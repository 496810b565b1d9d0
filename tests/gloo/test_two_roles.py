"""An actor at 2-2-1 and a critic at 1-2-2 in the same four processes: each trains as if it were alone."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from torch import Tensor

from hybridengine.models.shapes import ModelShape
from hybridengine.topology.grid import Grid
from hybridengine.topology.sizes import TrainSizes
from hybridengine.weights.process_groups import ProcessGroups
from tests.gloo.megatron_training import copy_weights, make_trainer, same_weights, step
from tests.gloo.ranks import RankLauncher
from tests.gloo.tiny_models import write_model

SIZES = {"actor": TrainSizes(2, 2, 1), "critic": TrainSizes(1, 2, 2)}
NUM_STEPS = 3

Trained = dict[str, tuple[list[float], dict[str, Tensor]]]
"""Role -> (gradient norms, final weights) of one rank."""


def train_roles(rank: int, folder: Path, roles: list[str]) -> Trained:
    """Train `roles` in turn, one step each."""
    registry = ProcessGroups()
    shape = ModelShape.from_folder(folder)
    shapes = {"actor": shape, "critic": dataclasses.replace(shape, tied_embeddings=False, num_labels=1)}
    trainers = {role: make_trainer(shapes[role], Grid(SIZES[role]), rank, registry, folder) for role in roles}
    norms: dict[str, list[float]] = {role: [] for role in roles}
    for index in range(NUM_STEPS):
        for role, trainer in trainers.items():
            norms[role].append(step(trainer, index)[0])
    return {role: (norms[role], copy_weights(trainer)) for role, trainer in trainers.items()}


def test_roles_of_different_sizes_train_in_turn_as_if_alone(tmp_path: Path, run_ranks: RankLauncher):
    write_model(tmp_path, "qwen2", tied=True)
    together = run_ranks(4, train_roles, tmp_path, ["actor", "critic"])
    for role in SIZES:
        alone = run_ranks(4, train_roles, tmp_path, [role])
        for rank in range(4):
            norms, weights = together[rank][role]
            expected_norms, expected_weights = alone[rank][role]
            assert norms == expected_norms, role
            assert len(set(norms)) == NUM_STEPS
            assert same_weights(weights, expected_weights), role

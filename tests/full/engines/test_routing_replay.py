"""Experts that engines choose, compared with those of transformers, and replayed by the trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hybridengine.backends.engine import Response
from hybridengine.topology.generation import GenerationGrid
from hybridengine.topology.grid import Grid
from hybridengine.topology.sizes import GenSizes, TrainSizes
from tests.full.engines.levelled_ranks import LENGTHS, draw, prompts_of
from tests.gloo.ranks import RankLauncher
from tests.gloo.tiny_models import write_model

pytestmark = pytest.mark.timeout(600)

SIZES: dict[str, Any] = {
    "head_dim": 32,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": None,
}


def routes_of(model: Any, tokens: list[int]) -> np.ndarray:
    """Return the experts of each token, in ascending order, [T, L, K]."""
    found: list[torch.Tensor] = []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda _, __, output: found.append(output[2]))
        for layer in model.model.layers
    ]
    with torch.no_grad():
        model(torch.tensor([tokens]))
    for hook in hooks:
        hook.remove()
    return torch.stack(found, 1).sort(-1).values.numpy()


@pytest.mark.parametrize(("train", "gen"), [("1-2-2 e=2 etp=1", "1-2 e=2"), ("2-1-2", "2-1")])
def test_routes_are_those_of_transformers(train: str, gen: str, tmp_path: Path, run_ranks: RankLauncher):
    """Of requests with common prompts, that move to other engines, and that a full KV cache has preempted."""
    model = write_model(tmp_path, "qwen3_moe", **SIZES)
    generation = GenerationGrid(Grid(TrainSizes.parse(train)), GenSizes.parse(gen))
    ranks = run_ranks(generation.train.num_ranks, draw, tmp_path, generation)
    assert any(seen.moved for seen in ranks)
    assert any(seen.moved_crowded for seen in ranks)
    for seen in ranks:
        expected = [
            routes_of(model, prompt + response.token_ids)[:-1]
            for prompt, response in zip(prompts_of(seen.place), seen.alone, strict=True)
        ]
        for responses in (seen.alone, seen.together, seen.crowded):
            check_routes(responses, expected)
    assert [len(one.token_ids) for one in ranks[0].alone] == LENGTHS[ranks[0].place]


def check_routes(responses: list[Response], expected: list[np.ndarray]) -> None:
    for response, known in zip(responses, expected, strict=True):
        assert response.routes is not None
        assert response.routes.dtype == np.int8
        np.testing.assert_array_equal(np.sort(response.routes, -1), known)

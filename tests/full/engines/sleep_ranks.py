"""Runs on a rank with a real engine that takes itself for one with CUDA graphs: its worker's sleep mode is recorded.

Sleep mode needs a GPU. What vLLM's scheduler and executor allow, and in which order, does not.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from safetensors.torch import load_file

from hybridengine.backends.engine import SamplingSettings, generate
from hybridengine.backends.vllm.construction import EngineSettings
from hybridengine.backends.vllm.engine import VllmEngine
from hybridengine.backends.vllm.sleeping import SleepingWeights
from hybridengine.models.shapes import ModelShape
from hybridengine.topology.generation import GenerationGrid
from hybridengine.topology.grid import Grid
from hybridengine.topology.sizes import GenSizes, TrainSizes
from tests.full.engines.vllm_ranks import take_place

PROMPTS = [[1], [7, 30, 64], list(range(40))]
ASLEEP = ("discard", "sleep", "wake_up")


@dataclass(frozen=True)
class Slept:
    """Calls of the worker's sleep mode and of the allocator by step, and greedy tokens before and after."""

    calls: dict[str, list[tuple[Any, ...]]]
    num_parameters: int
    before: list[list[int]]
    after: list[list[int]]


def sleep_and_wake(rank: int, folder: Path) -> Slept:
    """Generate, switch to training and back twice, the second time after the way to training has failed once."""
    identity = take_place(rank)
    shape = ModelShape.from_folder(folder)
    generation = GenerationGrid(Grid(TrainSizes(1, 1, 1)), GenSizes(1, 1))
    engine = VllmEngine(folder, shape, generation, EngineSettings(64, kv_cache_bytes=64 * 2**20), identity)
    engine._runner.model.load_weights(load_file(folder / "model.safetensors").items())
    engine._settings = replace(engine._settings, cuda_graphs=True)

    class Recorded:
        """A segment for each parameter."""

        bounds = {tensor.data_ptr(): tensor.nbytes for tensor in engine._parameters().values()}  # noqa: RUF012

        def map(self, start: int) -> None:
            calls[step].append(("map",))

        def unmap(self, start: int) -> None:
            calls[step].append(("unmap",))

    engine.weights = SleepingWeights(engine._parameters(), engine._runner.model.buffers(), Recorded())
    executor = engine._engine.model_executor
    on_workers, calls = executor.collective_rpc, dict[str, list[tuple[Any, ...]]]()

    def recorded(method: str, *given: Any, **options: Any) -> Any:
        if method not in ASLEEP:
            return on_workers(method, *given, **options)
        calls[step].append((method, *options.get("args", ()), *options.get("kwargs", {}).values()))
        return [None]

    def tokens() -> list[list[int]]:
        greedy = [SamplingSettings(6, 0.0)] * len(PROMPTS)
        return [one.token_ids for one in generate(engine, PROMPTS, range(len(PROMPTS)), greedy)]

    with mock.patch.object(executor, "collective_rpc", recorded):
        before, after = tokens(), list[list[int]]()
        for turn in range(2):
            calls[step := f"{turn} leave"] = []
            engine.leave_generation()
            if turn:
                engine.leave_generation()  # no memory for a bucket: the way to training begins once more
            calls[step := f"{turn} release"] = []
            engine.weights.release()
            calls[step := f"{turn} materialise"] = []
            engine.weights.materialise(engine.weights.names)
            with pytest.raises(Exception, match="no weights in training mode"):
                engine.advance()
            calls[step := f"{turn} enter"] = []
            engine.enter_generation(version=turn + 1)
            after = tokens()
    return Slept(calls, len(engine._parameters()), before, after)

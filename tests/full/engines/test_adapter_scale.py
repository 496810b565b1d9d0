"""The scale of adapters in vLLM's layers: part of all passes, also of those that an engine compiles while it is built."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

from hybridengine.backends.vllm.construction import EngineSettings
from hybridengine.backends.vllm.engine import VllmEngine
from hybridengine.models.shapes import ModelShape
from hybridengine.topology.generation import GenerationGrid
from hybridengine.topology.grid import Grid
from hybridengine.topology.sizes import GenSizes, TrainSizes
from tests.full.engines.vllm_ranks import take_place
from tests.gloo.adapters_by_hand import ADAPTERS
from tests.gloo.ranks import RankLauncher
from tests.gloo.tiny_models import write_model


def build_engine(rank: int, folder: Path) -> tuple[list[float], dict[str, Any]]:
    """Return the scales of products with adapters while an engine is built, and what its compiled layers depend on.

    On a CPU vLLM neither compiles layers with adapters nor warms them up; here it passes through them where it would.
    """
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
    from vllm.v1.worker.cpu_worker import CPUWorker

    identity = take_place(rank)
    shape = ModelShape.from_folder(folder).with_adapters(ADAPTERS)
    generation = GenerationGrid(Grid(TrainSizes(1, 1, 1)), GenSizes(1, 1))
    add, scales = PunicaWrapperCPU.add_lora_linear, list[float]()

    def seen(self: Any, y: Any, x: Any, a: Any, b: Any, scale: float, *rest: Any, **more: Any) -> Any:
        scales.append(scale)
        return add(self, y, x, a, b, scale, *rest, **more)

    warm_up = CPUWorker.compile_or_warm_up_model

    def with_pass(self: Any) -> Any:
        self.model_runner._dummy_run(num_tokens=8)
        return warm_up(self)

    with (
        mock.patch.object(PunicaWrapperCPU, "add_lora_linear", seen),
        mock.patch.object(CPUWorker, "compile_or_warm_up_model", with_pass),
    ):
        engine = VllmEngine(folder, shape, generation, EngineSettings(64, kv_cache_bytes=2**26), identity)
    return scales, engine._llm.llm_engine.vllm_config.additional_config


def test_layers_are_warmed_up_with_the_scale(tmp_path: Path, run_ranks: RankLauncher):
    write_model(tmp_path, "qwen3", True, head_dim=32, hidden_size=64, max_position_embeddings=256)
    [(scales, hashed)] = run_ranks(1, build_engine, tmp_path)
    assert set(scales) == {12 / 8}
    assert hashed == {"lora_scale": 12 / 8}

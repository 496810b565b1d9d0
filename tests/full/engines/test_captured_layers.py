"""The state of vLLM's layers at the moment when an engine compiles them and captures CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from hybridengine.backends.vllm.construction import EngineSettings
from hybridengine.backends.vllm.engine import VllmEngine
from hybridengine.families.sizes import AdapterSizes
from hybridengine.models.shapes import ModelShape
from hybridengine.topology.generation import GenerationGrid
from hybridengine.topology.grid import Grid
from hybridengine.topology.sizes import GenSizes, TrainSizes
from tests.full.engines.vllm_ranks import take_place
from tests.gloo.adapters_by_hand import ADAPTERS
from tests.gloo.ranks import RankLauncher
from tests.gloo.tiny_models import write_model


def build_engine(
    rank: int, folder: Path, adapters: AdapterSizes | None, at_capture: Callable[[Any], Any]
) -> Any:
    """Build an engine; return what `at_capture` returns of its model runner where vLLM would capture graphs, and what its
    compiled layers depend on.

    On a CPU vLLM does not capture any, and compiles none with adapters.
    """
    from vllm.v1.worker.cpu_worker import CPUWorker

    identity = take_place(rank)
    shape = ModelShape.from_folder(folder).with_adapters(adapters)
    generation = GenerationGrid(Grid(TrainSizes(1, 1, 1)), GenSizes(1, 1))
    warm_up, seen = CPUWorker.compile_or_warm_up_model, list[Any]()

    def watched(self: Any) -> Any:
        seen.append(at_capture(self.model_runner))
        return warm_up(self)

    with mock.patch.object(CPUWorker, "compile_or_warm_up_model", watched):
        engine = VllmEngine(folder, shape, generation, EngineSettings(64, kv_cache_bytes=2**26), identity)
    return seen, engine._llm.llm_engine.vllm_config.additional_config


def scales_of_products(runner: Any) -> set[float]:
    """Return the scales of all products with adapters in a pass."""
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    multiply, scales = PunicaWrapperCPU.add_shrink, set[float]()

    def seen(self: Any, y: Any, x: Any, a: Any, scale: float, **more: Any) -> Any:
        scales.add(scale)
        return multiply(self, y, x, a, scale, **more)

    with mock.patch.object(PunicaWrapperCPU, "add_shrink", seen):
        runner._dummy_run(num_tokens=8)
    return scales


def test_layers_multiply_by_the_scale_of_adapters(tmp_path: Path, run_ranks: RankLauncher):
    write_model(tmp_path, "qwen3", True, head_dim=32, hidden_size=64, max_position_embeddings=256)
    [found] = run_ranks(1, build_engine, tmp_path, ADAPTERS, scales_of_products)
    assert found == ([{12 / 8}], {"lora_scale": 12 / 8})


def absorbed_of_layers(runner: Any) -> list[bool]:
    """Return, for each layer, whether its absorbed matrices are in the memory of the projection that they are from.

    vLLM makes views of weights that are not quantized; graphs with copies would not follow a switch.
    """
    found = []
    for module in runner.model.modules():
        if hasattr(module, "W_UK_T"):
            storage = module.kv_b_proj.weight.untyped_storage()._cdata
            found.append(all(one.untyped_storage()._cdata == storage for one in (module.W_UK_T, module.W_UV)))
    return found


def test_absorbed_matrices_are_views_of_their_projection(tmp_path: Path, run_ranks: RankLauncher):
    write_model(tmp_path, "deepseek_v3", False, max_position_embeddings=256)
    [(seen, _)] = run_ranks(1, build_engine, tmp_path, None, absorbed_of_layers)
    assert seen == [[True] * ModelShape.from_folder(tmp_path).num_layers]

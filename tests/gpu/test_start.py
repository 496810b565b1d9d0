"""Start of the engine on a device on which a trainer has tensors already."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from hybridengine.backends.megatron.shim import device
from hybridengine.backends.vllm.construction import EngineSettings
from hybridengine.backends.vllm.engine import VllmEngine
from hybridengine.models.shapes import ModelShape
from hybridengine.topology.generation import GenerationGrid
from hybridengine.topology.sizes import GenSizes
from tests.gpu import one_device
from tests.gpu.one_device import ALONE, GIB, MIB, SMALL

pytestmark = pytest.mark.gpu

VLLM_SHARE = 0.92
"""Share of the device that vLLM demands to be free unless it is told otherwise."""


@dataclass(frozen=True)
class Started:
    free_share: float
    """Share of the device that was free before the engine was built; 0 on a CPU."""
    num_tokens: list[int]


def start_beside(rank: int, folder: Path, ballast_bytes: int, kv_cache_bytes: int) -> Started:
    """Build an engine while other tensors hold `ballast_bytes`, and draw two responses."""
    identity, _ = one_device.begin(rank)
    ballast = torch.ones(ballast_bytes, dtype=torch.uint8, device=device())
    free = torch.cuda.mem_get_info() if torch.cuda.is_available() else (0, 1)
    settings = EngineSettings(max_model_tokens=256, kv_cache_bytes=kv_cache_bytes, dtype="bfloat16")
    shape = ModelShape.from_folder(folder)
    engine = VllmEngine(folder, shape, GenerationGrid(ALONE, GenSizes(1, 1)), settings, identity)
    one_device.fill(engine.weights)
    responses = one_device.draw(engine, [[3, 5], [7]], 8)
    assert bool((ballast == 1).all()), "the engine has written over another tensor"
    return Started(free[0] / free[1], [len(response.token_ids) for response in responses])


def test_the_engine_starts_beside_a_trainer(on_device, folder, note):
    """Passes if vLLM is built and generates while 15 GiB of the device are taken: a trainer of 7B holds that much
    by then.

    vLLM refuses to start if less than its share of the device is free, even where the KV cache's size is given.
    """
    one_device.write_config(folder, **SMALL)
    [started] = on_device(1, start_beside, folder, 15 * GIB, 256 * MIB)
    note(f"{started.free_share:.0%} of the device free when the engine was built")
    assert started.free_share < VLLM_SHARE, "so much memory is left that the check shows nothing"
    assert started.num_tokens == [8, 8]

"""Runs on a rank with vLLM: what its start demands of a device. There is no GPU: a snapshot stands in for its answer."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

from vllm.config import CacheConfig
from vllm.utils.mem_utils import MemorySnapshot
from vllm.v1.worker.utils import request_memory

from hybridengine.backends.vllm.construction import EngineSettings, build_llm
from hybridengine.topology.generation import GenerationGrid
from hybridengine.topology.grid import Grid
from hybridengine.topology.sizes import GenSizes, TrainSizes

GIB = 2**30


def demanded_bytes(rank: int, folder: Path, settings: EngineSettings) -> int | str:
    """Return what vLLM demands to be free on a device of 80 GiB with 67 free, or its refusal."""
    with mock.patch("vllm.LLM") as llm:
        build_llm(
            folder,
            GenerationGrid(Grid(TrainSizes(1, 1, 1)), GenSizes(1, 1)),
            settings,
            [range(2)],
            on_gpu=False,
        )
    given = llm.call_args.kwargs
    cache = CacheConfig(
        **{name: given[name] for name in CacheConfig.__dataclass_fields__ if name in given}  # type: ignore
    )
    snapshot = MemorySnapshot(auto_measure=False, device="cpu")
    snapshot.total_memory, snapshot.free_memory = 80 * GIB, 67 * GIB
    try:
        return request_memory(snapshot, cache)
    except ValueError as error:
        return str(error)

"""Runs on a rank with vLLM: what its start demands of a device. There is no GPU: a snapshot stands in for its answer."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from vllm.config import CacheConfig
from vllm.utils.mem_utils import MemorySnapshot
from vllm.v1.worker.utils import request_memory

from hybridengine.backends.engine import Request, SamplingSettings
from hybridengine.backends.vllm import engine
from hybridengine.backends.vllm.construction import EngineSettings, build_llm
from hybridengine.backends.vllm.requests import RunningRequests
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


class _Built(Exception):
    """Raised in place of building an engine."""


def graphs_chosen(rank: int, wanted: bool | None, on_gpu: bool) -> bool:
    """Return whether vLLM is built to capture CUDA graphs; `on_gpu` is what torch would say."""
    stand_ins = {
        "install_groups": mock.DEFAULT,
        "vllm_layout": mock.DEFAULT,
        "process_state_kept": mock.MagicMock(),
    }
    build = mock.Mock(side_effect=_Built)
    with (
        mock.patch.multiple(engine, build_llm=build, **stand_ins),
        mock.patch.object(engine.torch.cuda, "is_available", return_value=on_gpu),
        contextlib.suppress(_Built),
    ):
        engine.VllmEngine("", mock.Mock(), mock.Mock(), EngineSettings(64, cuda_graphs=wanted), "")
    return build.call_args.args[2].cuda_graphs


def seeds_of(rank: int, runner: SimpleNamespace) -> list[int]:
    """Return the seeds that an engine with this model runner is given for a request and for the rest of another."""
    llm_engine = mock.Mock(**{"step.return_value": []})
    requests, sampling = RunningRequests(llm_engine, runner), SamplingSettings(4)
    requests.add(
        [Request("whole", (1, 2), 7, sampling), Request("rest", (1, 2, 3), 7, sampling, 1)], version=0
    )
    requests.step(version=0)
    return [call.args[2].seed for call in llm_engine.add_request.call_args_list]

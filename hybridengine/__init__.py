"""A Megatron 3D-parallel HybridEngine for RL post-training of large language models.

The names in `__all__` are the public API. Each is imported on first use, so planning needs neither torch nor Ray.
"""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridengine.version import __version__

# ruff: noqa: F401
if TYPE_CHECKING:  # the public names, which are read from here below
    from hybridengine.algorithms.losses.aggregation import SummedLoss
    from hybridengine.algorithms.masking import over_tokens
    from hybridengine.backends.engine import Engine, Request, Response, SamplingSettings, generate
    from hybridengine.backends.megatron.groups import initialize_globals
    from hybridengine.backends.megatron.trainer import MegatronTrainer
    from hybridengine.backends.megatron.weights import load_weights
    from hybridengine.backends.policy import Policy
    from hybridengine.backends.predictions import Predictions
    from hybridengine.backends.vllm.construction import EngineSettings
    from hybridengine.backends.vllm.engine import VllmEngine
    from hybridengine.backends.vllm.environment import rank_environment
    from hybridengine.config import RunConfig, load_config
    from hybridengine.config.algorithm import Algorithm, Conflict
    from hybridengine.config.role_sections import MegatronSettings, OptimizerSection
    from hybridengine.config.values import ImportPath
    from hybridengine.controller.pool import ResourcePool
    from hybridengine.controller.rows import Rows
    from hybridengine.controller.worker_group import WorkerGroup
    from hybridengine.drivers.advantages import counted_rows
    from hybridengine.drivers.dataflow import measure_rollout, switch_metrics, with_advantages
    from hybridengine.drivers.roles import Roles, Sampling
    from hybridengine.errors import ConfigError, HybridEngineError
    from hybridengine.models.shapes import ModelShape
    from hybridengine.reshard.compiler import compile_plan
    from hybridengine.reshard.domains import domains
    from hybridengine.reshard.megatron import megatron_layout
    from hybridengine.reshard.vllm import vllm_layout
    from hybridengine.rows.protocols import (
        ALL_TO_ALL,
        DP_PROTO,
        ONE_TO_ALL,
        PROTO_3D,
        PROTO_3D_ALL_MICRO_DP,
        PROTO_3D_PP_ONLY,
        RankContext,
        register,
    )
    from hybridengine.topology.generation import GenerationGrid
    from hybridengine.topology.grid import Grid, group_with
    from hybridengine.topology.sizes import GenSizes, TrainSizes
    from hybridengine.training.files import prepare_files
    from hybridengine.training.launch import RunPools
    from hybridengine.training.run import train
    from hybridengine.weights.hybrid_engine import HybridEngine, WeightPush
    from hybridengine.weights.process_groups import process_groups
    from hybridengine.weights.transport import PointToPointTransport

_MODULES = {
    imported.name: node.module
    for node in ast.walk(ast.parse(Path(__file__).read_text(encoding="utf-8")))
    if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(f"{__name__}.")
    for imported in node.names
}
"""Module of each public name; editors and type checkers see the same list."""

__all__ = [*_MODULES]  # noqa: PLE0604  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]

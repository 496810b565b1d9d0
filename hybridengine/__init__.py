"""A Megatron 3D-parallel HybridEngine for RL post-training of large language models.

The names in `__all__` are the public API. Each is imported on first use, so planning needs neither torch nor Ray.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "algorithms.losses.aggregation": "SummedLoss",
    "algorithms.masking": "over_tokens",
    "backends.engine": "Engine Request Response SamplingSettings generate",
    "backends.megatron.groups": "initialize_globals",
    "backends.megatron.trainer": "MegatronTrainer",
    "backends.megatron.weights": "load_weights",
    "backends.policy": "Policy",
    "backends.vllm.construction": "EngineSettings",
    "backends.vllm.engine": "VllmEngine",
    "backends.vllm.environment": "rank_environment",
    "config": "RunConfig load_config",
    "config.algorithm": "Algorithm Conflict",
    "config.sections": "OptimizerSection",
    "config.values": "ImportPath",
    "controller.pool": "ResourcePool",
    "controller.rows": "Rows",
    "controller.worker_group": "WorkerGroup",
    "drivers.advantages": "counted_rows",
    "drivers.dataflow": "measure_rollout switch_metrics with_advantages",
    "drivers.roles": "Roles Sampling",
    "errors": "ConfigError HybridEngineError",
    "models.shapes": "ModelShape",
    "rows.protocols": (
        "ALL_TO_ALL DP_PROTO ONE_TO_ALL PROTO_3D PROTO_3D_ALL_MICRO_DP PROTO_3D_PP_ONLY RankContext register"
    ),
    "reshard.domains": "domains",
    "reshard.megatron": "megatron_layout",
    "reshard.planner": "compile_plan",
    "reshard.vllm": "vllm_layout",
    "weights.hybrid_engine": "HybridEngine WeightPush",
    "weights.process_groups": "process_groups",
    "weights.transport": "PointToPointTransport",
    "topology.generation": "GenerationGrid",
    "topology.grid": "Grid group_with",
    "topology.sizes": "GenSizes TrainSizes",
    "training.files": "prepare_files",
    "training.launch": "RunPools",
    "training.run": "train",
}
"""Public names of each module."""

_MODULES = {name: f"{__name__}.{module}" for module, names in _HOMES.items() for name in names.split()}

__all__ = [*_MODULES]  # noqa: PLE0604  # pyright: ignore[reportUnsupportedDunderAll]

if TYPE_CHECKING:  # the same names, for editors and type checkers; a test compares the two lists
    from hybridengine.algorithms.losses.aggregation import SummedLoss as SummedLoss
    from hybridengine.algorithms.masking import over_tokens as over_tokens
    from hybridengine.backends.engine import Engine as Engine
    from hybridengine.backends.engine import Request as Request
    from hybridengine.backends.engine import Response as Response
    from hybridengine.backends.engine import SamplingSettings as SamplingSettings
    from hybridengine.backends.engine import generate as generate
    from hybridengine.backends.megatron.groups import initialize_globals as initialize_globals
    from hybridengine.backends.megatron.trainer import MegatronTrainer as MegatronTrainer
    from hybridengine.backends.megatron.weights import load_weights as load_weights
    from hybridengine.backends.policy import Policy as Policy
    from hybridengine.backends.vllm.construction import EngineSettings as EngineSettings
    from hybridengine.backends.vllm.engine import VllmEngine as VllmEngine
    from hybridengine.backends.vllm.environment import rank_environment as rank_environment
    from hybridengine.config import RunConfig as RunConfig
    from hybridengine.config import load_config as load_config
    from hybridengine.config.algorithm import Algorithm as Algorithm
    from hybridengine.config.algorithm import Conflict as Conflict
    from hybridengine.config.sections import OptimizerSection as OptimizerSection
    from hybridengine.config.values import ImportPath as ImportPath
    from hybridengine.controller.pool import ResourcePool as ResourcePool
    from hybridengine.controller.rows import Rows as Rows
    from hybridengine.controller.worker_group import WorkerGroup as WorkerGroup
    from hybridengine.drivers.advantages import counted_rows as counted_rows
    from hybridengine.drivers.dataflow import measure_rollout as measure_rollout
    from hybridengine.drivers.dataflow import switch_metrics as switch_metrics
    from hybridengine.drivers.dataflow import with_advantages as with_advantages
    from hybridengine.drivers.roles import Roles as Roles
    from hybridengine.drivers.roles import Sampling as Sampling
    from hybridengine.errors import ConfigError as ConfigError
    from hybridengine.errors import HybridEngineError as HybridEngineError
    from hybridengine.models.shapes import ModelShape as ModelShape
    from hybridengine.reshard.domains import domains as domains
    from hybridengine.reshard.megatron import megatron_layout as megatron_layout
    from hybridengine.reshard.planner import compile_plan as compile_plan
    from hybridengine.reshard.vllm import vllm_layout as vllm_layout
    from hybridengine.rows.protocols import ALL_TO_ALL as ALL_TO_ALL
    from hybridengine.rows.protocols import DP_PROTO as DP_PROTO
    from hybridengine.rows.protocols import ONE_TO_ALL as ONE_TO_ALL
    from hybridengine.rows.protocols import PROTO_3D as PROTO_3D
    from hybridengine.rows.protocols import PROTO_3D_ALL_MICRO_DP as PROTO_3D_ALL_MICRO_DP
    from hybridengine.rows.protocols import PROTO_3D_PP_ONLY as PROTO_3D_PP_ONLY
    from hybridengine.rows.protocols import RankContext as RankContext
    from hybridengine.rows.protocols import register as register
    from hybridengine.topology.generation import GenerationGrid as GenerationGrid
    from hybridengine.topology.grid import Grid as Grid
    from hybridengine.topology.grid import group_with as group_with
    from hybridengine.topology.sizes import GenSizes as GenSizes
    from hybridengine.topology.sizes import TrainSizes as TrainSizes
    from hybridengine.training.files import prepare_files as prepare_files
    from hybridengine.training.launch import RunPools as RunPools
    from hybridengine.training.run import train as train
    from hybridengine.weights.hybrid_engine import HybridEngine as HybridEngine
    from hybridengine.weights.hybrid_engine import WeightPush as WeightPush
    from hybridengine.weights.process_groups import process_groups as process_groups
    from hybridengine.weights.transport import PointToPointTransport as PointToPointTransport


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]

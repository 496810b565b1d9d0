"""verl's configuration in this project's terms. What would change a result and is not supported is refused by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hybridengine.backends.vllm.construction import EngineSettings
from hybridengine.config.role_sections import MegatronSettings, OptimizerSection
from hybridengine.errors import ConfigError, raise_all
from hybridengine.models.shapes import ModelShape
from hybridengine.topology.generation import GenerationGrid
from hybridengine.topology.grid import Grid
from hybridengine.topology.sizes import GenSizes, TrainSizes

_OFF: dict[str, Any] = {
    "expert_model_parallel_size": 1,
    "dynamic_context_parallel": False,
    "param_offload": False,
    "use_dist_checkpointing": False,
    "use_megatron_fsdp": False,
    "use_fused_kernels": False,
    "override_ddp_config": {},
}
"""Engine setting -> the only value that is supported."""
_TRANSFORMER_KEYS = (
    "recompute_granularity",
    "recompute_method",
    "recompute_modules",
    "recompute_num_layers",
    "attention_backend",
)
"""Keys of `override_transformer_config` that do not change results; the first one is obeyed."""
_DTYPES = ("float32", "bfloat16")
_FIXED_OPTIMIZER: dict[str, Any] = {
    "optimizer": "adam",
    "lr_warmup_init": 0.0,
    "weight_decay_incr_style": "constant",
    "use_precision_aware_optimizer": False,
    "override_optimizer_config": None,
}
_FIXED_ROLLOUT: dict[str, Any] = {
    "data_parallel_size": 1,
    "expert_parallel_size": 1,
    "quantization": None,
    "enable_rollout_routing_replay": False,
    "logprobs_mode": "processed_logprobs",
    "repetition_penalty": 1.0,
}
_OWN_ROLLOUT_KEYS = ("kv_cache_bytes",)
"""Keys of `rollout.engine_kwargs.hybridengine`."""
CPU_KV_CACHE_BYTES = 256 * 2**20


def check_engine(engine: Any, model: Any) -> None:
    """Raise ConfigError that lists everything in a Megatron engine's and model's configuration that is not supported."""
    raise_all(_engine_problems(engine, model))


def check_checkpoint(config: Any) -> None:
    """Raise ConfigError unless checkpoints have weights and optimizer, as those of this project do."""
    raise_all(
        f"checkpoint.{name}={list(contents)} is not supported; name model and optimizer"
        for name, contents in (
            ("save_contents", config.save_contents),
            ("load_contents", config.load_contents),
        )
        if not {"model", "optimizer"} <= set(contents)
    )


def _engine_problems(engine: Any, model: Any) -> Iterator[str]:
    yield from _differing("megatron", engine, _OFF)
    transformer = dict(engine.override_transformer_config)
    yield from _unknown("megatron.override_transformer_config", transformer, _TRANSFORMER_KEYS)
    yield from _unknown(
        "megatron.override_mcore_model_config", engine.override_mcore_model_config, ("dtype",)
    )
    modules = transformer.get("recompute_modules") or ["core_attn"]
    if transformer.get("recompute_granularity") == "selective" and set(modules) != {"core_attn", "mlp"}:
        yield (
            f"megatron.override_transformer_config.recompute_modules={list(modules)} is not supported; choose"
            " [core_attn, mlp], or recompute_granularity=full"
        )
    if model.lora_rank or model.lora.get("rank"):
        yield "model.lora_rank is not supported; set 0, which trains all weights"
    overridden = [name for name, value in model.override_config.items() if value or name != "model_config"]
    yield from _unknown("model.override_config", overridden, ("attn_implementation",))
    if model.hf_config_path not in (None, model.path):
        yield f"model.hf_config_path={model.hf_config_path} is not supported; change config.json in {model.path}"
    if model.lora_adapter_path:
        yield f"model.lora_adapter_path={model.lora_adapter_path} is not supported; merge the adapter into the model"
    if model.mtp.enable:
        yield "model.mtp.enable=True is not supported; set False"
    if engine.qat.enable:
        yield "megatron.qat.enable=True is not supported; set False"
    if engine.router_replay.mode != "disabled":
        yield f"megatron.router_replay.mode={engine.router_replay.mode} is for mixtures of experts; set disabled"
    dtype = dtype_of(engine)
    if dtype not in _DTYPES:
        yield f"megatron.dtype={dtype} is not supported; choose one of {', '.join(_DTYPES)}"


def _unknown(section: str, given: Iterable[str], known: Sequence[str]) -> Iterator[str]:
    for name in given:
        if name not in known:
            yield f"{section}.{name} is not supported; remove it, or choose of {', '.join(known)}"


def _differing(section: str, given: Any, supported: dict[str, Any]) -> Iterator[str]:
    for name, value in supported.items():
        found = getattr(given, name)
        if (found or None) != (value or None) and found != value:
            yield f"{section}.{name}={found} is not supported; set {value}"


def dtype_of(engine: Any) -> str:
    """Return the type of the weights; `override_mcore_model_config.dtype` allows float32, verl's own key does not."""
    return engine.override_mcore_model_config.get("dtype", engine.dtype)


def megatron_settings(engine: Any) -> MegatronSettings:
    """Return the features of Megatron-core that are in use."""
    recompute = engine.override_transformer_config.get("recompute_granularity") or "none"
    return MegatronSettings(recompute=recompute, sequence_parallel=engine.sequence_parallel)


def train_grid(engine: Any, world_size: int) -> Grid:
    """Return the grid of all ranks: verl names p, t, c and v, and d follows from their number."""
    names = ("pipeline_model_parallel_size", "tensor_model_parallel_size", "context_parallel_size")
    stages, shards, contexts = (getattr(engine, name) for name in names)
    replicas, rest = divmod(world_size, stages * shards * contexts)
    if rest or not replicas:
        given = " x ".join(f"{name}={getattr(engine, name)}" for name in names)
        raise ConfigError(
            f"{world_size} ranks are not a multiple of {given}; choose sizes whose product divides the number of ranks"
        )
    virtual_stages = engine.virtual_pipeline_model_parallel_size or 1
    return Grid(TrainSizes(stages, shards, replicas, contexts, virtual_stages))


def optimizer_of(config: Any) -> tuple[OptimizerSection, int]:
    """Return (optimizer, number of steps until the schedule's end); ConfigError for what is not supported."""
    problems = list(_differing("optim", config, _FIXED_OPTIMIZER))
    schedules = ("constant", "linear", "cosine")
    if config.lr_decay_style not in schedules:
        problems.append(
            f"optim.lr_decay_style={config.lr_decay_style} is not supported; choose one of {', '.join(schedules)}"
        )
    raise_all(problems)
    steps = config.lr_decay_steps or max(config.total_training_steps, 1)
    warmup = config.lr_warmup_steps
    if warmup is None or warmup <= 0:  # verl's rule
        warmup = int(config.lr_warmup_steps_ratio * steps)
    section = OptimizerSection(
        lr=config.lr,
        min_lr=config.min_lr,
        schedule=config.lr_decay_style,
        warmup_steps=warmup,
        weight_decay=config.weight_decay,
        clip_grad=config.clip_grad,
        betas=tuple(config.betas),
    )
    return section, steps


@dataclass(frozen=True)
class RolloutPlan:
    """How the ranks of an actor generate."""

    generation: GenerationGrid
    engine: EngineSettings
    bucket_bytes: int


def rollout_plan(config: Any, grid: Grid, shape: ModelShape, dtype: str) -> RolloutPlan:
    """Return the generation of an actor with weights of `dtype`; ConfigError for what is not supported."""
    own = dict(config.engine_kwargs.get("hybridengine") or {})
    problems = list(_differing("rollout", config, _FIXED_ROLLOUT))
    if config.dtype != dtype:
        problems.append(
            f"rollout.dtype={config.dtype} differs from the actor's {dtype}, whose weights it generates with; set"
            f" rollout.dtype={dtype}"
        )
    problems += _unknown("rollout.engine_kwargs.hybridengine", own, _OWN_ROLLOUT_KEYS)
    raise_all(problems)
    sizes = GenSizes(config.pipeline_model_parallel_size, config.tensor_model_parallel_size)
    settings = EngineSettings(
        max_model_tokens=config.max_model_len or config.prompt_length + config.response_length,
        max_sequences=config.max_num_seqs,
        kv_cache_bytes=own.get("kv_cache_bytes")
        or _kv_cache_bytes(config, shape.weight_bytes(dtype) // sizes.num_ranks),
        dtype=dtype,
        seed=config.seed,
        cuda_graphs=torch.cuda.is_available() and not config.enforce_eager,
    )
    megabytes = config.checkpoint_engine.update_weights_bucket_megabytes
    return RolloutPlan(GenerationGrid(grid, sizes), settings, megabytes << 20)


def _kv_cache_bytes(config: Any, weight_bytes: int) -> int:
    """Return the part of the GPU that `gpu_memory_utilization` gives to generation, less a rank's weights."""
    if not torch.cuda.is_available():
        return CPU_KV_CACHE_BYTES
    _, total = torch.cuda.mem_get_info()
    left = int(total * config.gpu_memory_utilization) - weight_bytes
    if left <= 0:
        raise ConfigError(
            f"rollout.gpu_memory_utilization={config.gpu_memory_utilization} of {total / 2**30:.0f} GiB is less than a"
            f" rank's weights, {weight_bytes / 2**30:.1f} GiB; raise it, or choose a larger tensor_model_parallel_size"
        )
    return left

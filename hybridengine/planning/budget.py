"""Budget of a run's memory: bytes of a rank of a pool in each phase, on the device and in host memory.

    start           the engine is built beside the actor's weights, without gradients; no other model is there yet
    load            the other models are built, one after the other
    training step   one model computes with activations of a micro-batch, the others wait
    switch          one copy of the actor's weights and the buckets in flight, beside the models that wait
    generation      the engine's weights, KV cache and activations
    judging         the same of a generative judge, beside the models that wait
    save            device as between two steps; copies of the state in host memory

Weights, gradients, optimizer state, cache and activations are counted; what CUDA, NCCL and graphs take is an estimate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from hybridengine.config import ModelHolder, RunConfig, holder_shape, model_holders, model_shape
from hybridengine.config.run_config import TRAINED
from hybridengine.config.sections import MAIN_POOL
from hybridengine.formatting import format_bytes
from hybridengine.models.shapes import DTYPE_BYTES
from hybridengine.planning.costs.activations import activation_bytes
from hybridengine.planning.costs.lengths import MicroBatches
from hybridengine.planning.costs.memory import (
    ModelMemory,
    StateBytes,
    engine_weight_bytes,
    generation_bytes,
    model_memory,
)
from hybridengine.planning.engine_memory import (
    JudgeMemory,
    engine_activations,
    judge_changes,
    judges_memory,
)
from hybridengine.planning.switch.switch_cost import SwitchCost
from hybridengine.topology.sizes import GenSizes

HOST_BYTES = 2**30
"""Approximate host memory of the libraries in one rank's process, without weights."""
SAVE_BYTES = 4
"""Bytes per parameter of a rank's shard, below which the copies of a save stay (backends/megatron/checkpoint.py)."""
SAVE_BUFFER_BYTES = 64 * 2**20
"""Size of the pinned buffer through which a save copies (backends/megatron/offload.py)."""
GPU_BYTES = 4 * 2**30
"""Estimate of what a rank holds beside tensors: CUDA's context and kernels 1 GiB, buffers of 8 NCCL groups 3 GiB."""
GRAPH_BYTES = 2**30
"""Estimate of the memory of an engine's CUDA graphs."""


@dataclass(frozen=True)
class Budget:
    """Bytes of a rank of a pool."""

    pool: str
    rank: int | None
    """None for the fullest one."""
    device_bytes: Mapping[str, int]
    """Bytes on the device by phase, in the order in which a run goes through them."""
    host_bytes: int
    """Largest number of bytes in host memory if models compute on GPUs."""
    offloaded_bytes: int
    """Bytes of state that waits in host memory; without GPUs, beside the device's bytes in the same memory."""
    remedies: Callable[[str], str]
    """Up to three changes that lower a phase's bytes, as text."""
    fp8: Mapping[str, str] = field(default_factory=dict)
    """Matrix products in 8 bits of the rank's models and of its engine: kind by key."""

    @property
    def peak(self) -> str:
        """Phase with the most bytes on the device."""
        return max(self.device_bytes, key=lambda phase: self.device_bytes[phase])

    def shortage(self, phase: str, needed_bytes: int, where: str, device_bytes: int, device: str) -> str:
        """Return by how much a phase of ranks (`where`) exceeds a device, as text."""
        return (
            f"phase {phase!r} of pool {self.pool} needs {format_bytes(needed_bytes)} on {where}, and {device} has"
            f" {format_bytes(device_bytes)}: {(needed_bytes - device_bytes) / 1e9:.1f} GB are missing"
        )


class SwitchedWeights(NamedTuple):
    """Bytes of the actor's weights of a rank in the switch and after it."""

    gen_shard: int
    redundant: int
    peak: int
    received_back: int
    """Received on the way back to training."""


def switched_weights(config: RunConfig, cost: SwitchCost, rank: int | None = None) -> SwitchedWeights:
    """Return the weights of a rank, by default the largest number of each of any rank."""
    if config.rollout.quantization != "none":
        return _quantized_weights(config, cost)
    if rank is None:
        return SwitchedWeights(
            cost.gen_shard_bytes_max, cost.redundant_bytes_max, cost.peak_weight_bytes_max, 0
        )
    there, back = cost.of_rank(rank)
    peak = max(there.peak_bytes, back.peak_bytes)
    return SwitchedWeights(there.destination_bytes, there.redundant_bytes, peak, 0)


def _quantized_weights(config: RunConfig, cost: SwitchCost) -> SwitchedWeights:
    """Return the weights of the fullest rank with an engine in FP8, whose matrices arrive in the model's type."""
    sizes, gen, train = config.actor.parallel, config.actor.generate, cost.train_shard_bytes_max
    shard = generation_bytes(
        model_shape(config), sizes.pp_size, gen, config.model.dtype, config.rollout.quantization
    )
    in_flight = int(1.51 * cost.bucket_bytes_max)  # what arrives, and what it becomes, with scales
    if config.rollout.training_weights == "kept":
        return SwitchedWeights(shard, train, train + shard + in_flight, 0)
    num_replicas = sizes.dp_size * sizes.cp_size
    received = train * (num_replicas - 1) // num_replicas
    return SwitchedWeights(shard, 0, max(shard, train) + in_flight, received)


def budget_of(
    config: RunConfig, pool: str, cost: SwitchCost, *, on_gpus: bool, rank: int | None = None
) -> Budget:
    """Return the budget of a rank of a pool, by default of the fullest; `cost` is that of the actor's switch.

    Ranks of engines on a pool of their own all count as the fullest.
    """
    graphs = on_gpus and config.captures_graphs
    generates = config.algorithm.generates
    has_engine = generates and (pool == MAIN_POOL or "generation" in config.pools[pool].roles)
    judges = judges_memory(config, pool)
    captures = graphs and (has_engine or any(judge.is_alone for judge in judges))
    fixed = (GPU_BYTES if on_gpus else 0) + (GRAPH_BYTES if captures else 0)
    fixed += loaded_adapters_bytes(config, pool) if has_engine else 0
    fixed += _vision_bytes(config, pool)
    models = pool_models(config, pool, rank)
    offloaded = _offloaded_bytes(models) + sum(judge.weights for judge in judges if judge.is_offloaded)
    return Budget(
        pool,
        rank,
        {phase: num_bytes + fixed for phase, num_bytes in _pool_phases(config, pool, cost, rank).items()},
        HOST_BYTES + offloaded + _save_bytes(config, models) + _waiting_bytes(config, models),
        offloaded,
        partial(_remedies, config, pool, cost, rank, on_gpus),
        _fp8(config, models, has_engine),
    )


def loaded_adapters_bytes(config: RunConfig, pool: str) -> int:
    """Return the bytes of the adapters that a server's engine loads, which stay while the actor trains."""
    if not config.num_loaded_adapters:
        return 0
    shape, train_pp_size, gen = model_shape(config), config.actor.parallel.pp_size, config.actor.generate
    if pool != MAIN_POOL:
        gen = config.generation.parallel
        train_pp_size = gen.pp_size
    adapted, plain = (
        generation_bytes(one, train_pp_size, gen, config.model.dtype)
        for one in (shape, shape.with_adapters(None))
    )
    return config.num_loaded_adapters * (adapted - plain)


def _waiting_bytes(config: RunConfig, models: Sequence[HeldModel]) -> int:
    """Return the bytes in host memory of the models that a server's clients train in turn."""
    memories = [held.memory for held in models if held.holder.role == "actor"]
    return config.num_loaded_adapters * sum(
        one.trained_bytes + one.gradients_bytes + one.optimizer_bytes for one in memories
    )


def _fp8(config: RunConfig, models: list[HeldModel], has_engine: bool) -> dict[str, str]:
    kinds = {f"{model.holder.key}.fp8": model.holder.settings.fp8 for model in models}
    if has_engine:
        kinds["rollout.quantization"] = config.rollout.quantization
    return {key: kind for key, kind in kinds.items() if kind != "none"}


def _vision_bytes(config: RunConfig, pool: str) -> int:
    """Return the bytes of the frozen vision tower, which each rank of the actor, its reference or an engine has once."""
    reads = {"actor", "reference", "generation"} & {*config.pools[pool].roles}
    return model_shape(config).num_frozen * DTYPE_BYTES[config.model.dtype] if reads else 0


def _pool_phases(config: RunConfig, pool: str, cost: SwitchCost, rank: int | None) -> dict[str, int]:
    if "generation" in config.pools[pool].roles:
        return _engine_phases(config)
    switches = pool == MAIN_POOL and config.algorithm.generates
    weights = switched_weights(config, cost, rank) if switches else None
    phases = _phases(config, pool_models(config, pool, rank), weights)
    judges = judges_memory(config, pool)
    return _with_judges(phases, judges) if judges else phases


class HeldModel(NamedTuple):
    """A model of a rank."""

    holder: ModelHolder
    stage: int | None
    """None for the fullest."""
    memory: ModelMemory


def pool_models(config: RunConfig, pool: str, rank: int | None = None) -> list[HeldModel]:
    """Return the models of a pool on one of its ranks, by default on the fullest."""
    found = []
    for holder in model_holders(config):
        if config.pool_of(holder.role) == pool:
            stage = None if rank is None else holder.grid.coordinate(rank).pp_rank
            memory = model_memory(
                holder_shape(config, holder),
                holder.sizes,
                config.model.dtype,
                holder.settings,
                trains=holder.role in TRAINED,
                stage=stage,
            )
            found.append(HeldModel(holder, stage, memory))
    return found


def _engine_phases(config: RunConfig) -> dict[str, int]:
    held = engine_weight_bytes(config) + _cache_bytes(config, config.generation.parallel)
    computing = held + engine_activations(config, model_shape(config), config.generation.parallel)
    return {"start": computing, "switch": held + config.actor.bucket_bytes, "generation": computing}


def _cache_bytes(config: RunConfig, gen: GenSizes) -> int:
    """Return the bytes of an engine's KV cache, and of the experts of its tokens (`rollout.routing_replay`)."""
    num_bytes, shape = config.rollout.kv_cache_bytes, model_shape(config)
    if not config.rollout.routing_replay or (experts := shape.experts) is None:
        return num_bytes
    train = config.actor.parallel.pp_size
    slots = num_bytes // shape.kv_token_bytes(train, gen.pp_size, gen.tp_size, config.model.dtype)
    chosen = (shape.num_layers - experts.num_dense_layers) * experts.num_active
    return num_bytes + slots * chosen * (1 if experts.num_experts <= 128 else 2)


def _phases(config: RunConfig, models: list[HeldModel], weights: SwitchedWeights | None) -> dict[str, int]:
    """Return the bytes by phase; `weights` are those of an actor in this pool that generates."""
    states = [_states(config, model) for model in models]
    idle = sum(state.idle for state in states)
    peaks = [max(state.infer, state.update) - state.idle for state in states]
    training = {"training step": idle + max(peaks, default=0), "save": idle}
    if weights is None:
        return {"load": _load(models, states), **training}
    actor = next(model.memory for model in models if model.holder.role == "actor")
    waiting = sum(state.generating for state in states)
    cache = _cache_bytes(config, config.actor.generate)
    computing = engine_activations(config, model_shape(config), config.actor.generate)
    return {
        "start": actor.weights_bytes + weights.gen_shard + cache + computing,
        "load": _load(models, states),
        "training step": training["training step"],
        "switch": waiting + weights.peak + actor.kept_bytes,
        "generation": waiting + actor.kept_bytes + weights.gen_shard + weights.redundant + cache + computing,
        "save": training["save"],
    }


def _with_judges(phases: dict[str, int], judges: list[JudgeMemory]) -> dict[str, int]:
    """Return the bytes by phase of ranks that have judges too, which may be built before other models."""
    held = sum(judge.idle for judge in judges)
    drawing = held + max(judge.awake - judge.idle for judge in judges)
    idle = phases["save"]
    changed = {phase: num_bytes + held for phase, num_bytes in phases.items() if phase != "start"}
    return phases | changed | {"load": max(changed["load"], idle + drawing), "judging": idle + drawing}


def _load(models: list[HeldModel], states: list[StateBytes]) -> int:
    """Return the peak while models are built: each has its trained weights twice until Megatron's buffers replace its
    own."""
    held = peak = 0
    for (holder, _, memory), state in zip(models, states, strict=True):
        peak = max(peak, held + memory.weights_bytes + memory.trained_bytes + memory.gradients_bytes)
        # The actor may have trained before the others are built, in a supervised warm-up.
        if holder.role == "actor":
            held += memory.weights_bytes + memory.gradients_bytes + memory.optimizer_bytes
        else:
            held += state.idle - memory.fp8_bytes
        peak = max(peak, held)
    return peak


def _offloads(holder: ModelHolder, what: str) -> bool:
    return getattr(holder.section, "offload", None) == what


def _states(config: RunConfig, model: HeldModel) -> StateBytes:
    holder, _, memory = model
    passes = [
        _activations(config, model, trains=False),
        _activations(config, model, trains=True) if holder.role in TRAINED else 0,
    ]
    return memory.states(
        is_actor=holder.role == "actor",
        offload=getattr(holder.section, "offload", "none"),
        infer=passes[0],
        update=passes[1],
    )


def _activations(config: RunConfig, model: HeldModel, *, trains: bool) -> int:
    """Return the bytes of activations of the largest micro-batches of a pass, of rows of the greatest length."""
    holder = model.holder
    section, longest = holder.section, config.max_tokens
    parts = holder.sizes.dp_size * (section.mini_batches if trains else 1)
    all_tokens = -(-config.rows_per_step // parts) * longest
    tokens = min(all_tokens, max(section.micro_batch_tokens, longest))
    responses = tokens * config.max_response_tokens / longest
    return activation_bytes(
        holder_shape(config, holder),
        holder.sizes,
        config.model.dtype,
        MicroBatches(-(-all_tokens // tokens), tokens, responses, longest),
        holder.settings,
        trains=trains,
        stage=model.stage,
    )


def _offloaded_bytes(models: list[HeldModel]) -> int:
    """Return the bytes of offloaded state: its own, but for the alignment of its tensors (`HostBuffer`)."""
    return sum(
        memory.optimizer_bytes * _offloads(holder, "optimizer")
        + memory.weights_bytes * _offloads(holder, "weights")
        for holder, _, memory in models
    )


def _save_bytes(config: RunConfig, models: list[HeldModel]) -> int:
    """Return the bytes of copies and buffers of a save, all models of which save at once."""
    saved = 0
    for holder, _, memory in models:
        if config.checkpoint.every and memory.gradients_bytes:
            num_parameters = memory.weights_bytes // DTYPE_BYTES[config.model.dtype]
            whole = memory.optimizer_bytes + memory.trained_bytes // holder.sizes.dp_size
            saved += min(SAVE_BYTES * num_parameters, whole) + SAVE_BUFFER_BYTES
    return saved


def _remedies(
    config: RunConfig, pool: str, cost: SwitchCost, rank: int | None, on_gpus: bool, phase: str
) -> str:
    """Return the three changes that help a phase most: settings with an effect first, the largest one before others."""
    before = _pool_phases(config, pool, cost, rank)[phase]
    saved = {
        text: before - _pool_phases(changed, pool, cost, rank)[phase]
        for text, changed in _changes(config, pool, on_gpus)
    }
    helpful = sorted((text for text in saved if saved[text] > 0), key=lambda text: -saved[text])
    return ", ".join([*helpful[:2], *_larger_changes(config, pool, rank, phase)][:3])


def _changes(config: RunConfig, pool: str, on_gpus: bool) -> Iterator[tuple[str, RunConfig]]:
    """Yield changes of settings, each with a configuration that has it; smaller numbers are halved.

    Without GPUs, what is offloaded stays in the same memory.
    """

    def changed(section: str, **values: object) -> RunConfig:
        return config.model_copy(update={section: getattr(config, section).model_copy(update=values)})

    rollout = config.rollout
    for name in ("kv_cache_bytes", "max_num_seqs") if config.algorithm.generates else ():
        value = getattr(rollout, name)
        yield f"lower rollout.{name}={value}", changed("rollout", **{name: value // 2})
    yield from judge_changes(config, pool)
    for holder in model_holders(config):
        name, section = holder.key, holder.section
        if config.pool_of(holder.role) != pool or "." in name:
            continue
        if section.micro_batch_tokens > config.max_tokens:
            text = f"lower {name}.micro_batch_tokens={section.micro_batch_tokens}"
            yield text, changed(name, micro_batch_tokens=config.max_tokens)
        if holder.role in TRAINED and section.recompute != "full":
            yield f"set {name}.recompute=full", changed(name, recompute="full")
        if on_gpus and holder.role in TRAINED and section.offload == "none":
            yield f"set {name}.offload=optimizer", changed(name, offload="optimizer")
        if on_gpus and holder.role in ("reference", "teacher") and section.offload == "none":
            yield f"set {name}.offload=weights", changed(name, offload="weights")


def _larger_changes(config: RunConfig, pool: str, rank: int | None, phase: str) -> Iterator[str]:
    """Yield changes of sizes and placement; the model that needs most comes first."""
    if phase == "switch":
        yield f"lower actor.bucket_bytes={config.actor.bucket_bytes}"
    if phase in ("start", "switch", "generation"):
        yield f"raise t_g in {'generation.parallel' if 'generation' in config.pools[pool].roles else 'actor.generate'}"
    models = pool_models(config, pool, rank)
    states = {model.holder.name: _states(config, model) for model in models}
    models.sort(key=lambda model: -max(states[model.holder.name].update, states[model.holder.name].infer))
    yield from (f"raise p or t in {model.holder.key}.parallel={model.holder.sizes}" for model in models)
    yield "move roles to ranks of their own (cluster.pools)"
    yield "take more ranks, or devices with more memory"

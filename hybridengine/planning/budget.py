"""Budget of a run's memory: bytes of a rank of a pool in each phase, on the device and in host memory.

    start           the engine is built beside the actor's weights, without gradients; no other model is there yet
    load            the other models are built, one after the other
    training step   one model computes with activations of a micro-batch, the others wait
    switch          one copy of the actor's weights and the buckets in flight, beside the models that wait
    generation      the engine's weights, KV cache and activations
    save            device as between two steps; copies of the state in host memory

Weights, gradients, optimizer state, cache and activations are counted; what CUDA, NCCL and graphs take is an estimate.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from hybridengine.config import ModelHolder, RunConfig, holder_shape, model_holders, model_shape
from hybridengine.config.run_config import TRAINED
from hybridengine.config.sections import MAIN_POOL
from hybridengine.formatting import format_bytes
from hybridengine.models.shapes import DTYPE_BYTES, ModelShape
from hybridengine.planning.costs.activations import activation_bytes
from hybridengine.planning.costs.lengths import MicroBatches
from hybridengine.planning.costs.memory import (
    ModelMemory,
    StateBytes,
    engine_weight_bytes,
    model_memory,
)
from hybridengine.planning.switch.switch_cost import SwitchCost

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
BATCHED_TOKENS = 8192
"""Largest number of prompt tokens in an engine's forward pass, as in backends/vllm/construction.py."""
LOGIT_COPIES = 3
"""Float32 tensors of the size of the logits in vLLM's sampler: logits, log-probs, and probabilities or noise."""


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
    remedies: Mapping[str, str]
    """Three changes that lower a phase's bytes, as text, by phase."""

    @property
    def peak(self) -> str:
        """Phase with the most bytes on the device."""
        return max(self.device_bytes, key=lambda phase: self.device_bytes[phase])

    def excess(self, device_bytes: int, device: str = "the device") -> str | None:
        """Return by how much the largest phase exceeds a device of this size, as text; None if the budget fits."""
        needed = self.device_bytes[self.peak]
        where = "its fullest rank" if self.rank is None else f"rank {self.rank}"
        return self.shortage(self.peak, needed, where, device_bytes, device)

    def shortage(
        self, phase: str, needed_bytes: int, where: str, device_bytes: int, device: str
    ) -> str | None:
        """Return by how much a phase of ranks (`where`) exceeds a device, as text; None if it does not."""
        if needed_bytes <= device_bytes:
            return None
        return (
            f"phase {phase!r} of pool {self.pool} needs {format_bytes(needed_bytes)} on {where}, and {device} has"
            f" {format_bytes(device_bytes)}: {(needed_bytes - device_bytes) / 1e9:.1f} GB are missing"
        )


class _Weights(NamedTuple):
    """Bytes of the actor's weights of a rank in the switch."""

    gen_shard: int
    redundant: int
    peak: int


def _weights_of(cost: SwitchCost, rank: int | None) -> _Weights:
    if rank is None:
        return _Weights(cost.gen_shard_bytes_max, cost.redundant_bytes_max, cost.peak_weight_bytes_max)
    there, back = cost.of_rank(rank)
    return _Weights(there.destination_bytes, there.redundant_bytes, max(there.peak_bytes, back.peak_bytes))


def budget_of(
    config: RunConfig, pool: str, cost: SwitchCost, *, on_gpus: bool, rank: int | None = None
) -> Budget:
    """Return the budget of a rank of a pool, by default of the fullest; `cost` is that of the actor's switch.

    Ranks of engines on a pool of their own all count as the fullest.
    """
    graphs = on_gpus and config.captures_graphs
    has_engine = pool == MAIN_POOL or "generation" in config.pools[pool].roles
    fixed = (GPU_BYTES if on_gpus else 0) + (GRAPH_BYTES if graphs and has_engine else 0)
    if "generation" in config.pools[pool].roles:
        phases, offloaded, saved = _engine_phases(config), 0, 0
    else:
        models = pool_models(config, pool, rank)
        phases = _phases(config, pool, models, _weights_of(cost, rank) if pool == MAIN_POOL else None)
        offloaded, saved = _offloaded_bytes(models), _save_bytes(config, models)
    return Budget(
        pool,
        rank,
        {phase: num_bytes + fixed for phase, num_bytes in phases.items()},
        HOST_BYTES + offloaded + saved,
        offloaded,
        {phase: ", ".join(_three(config, pool, phase)) for phase in phases},
    )


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
    held = engine_weight_bytes(config) + config.rollout.kv_cache_bytes
    computing = held + engine_activations(config, model_shape(config), config.generation.parallel.tp_size)
    return {"start": computing, "switch": held + config.actor.bucket_bytes, "generation": computing}


def _phases(
    config: RunConfig, pool: str, models: list[HeldModel], weights: _Weights | None
) -> dict[str, int]:
    """Return the bytes by phase; `weights` are those of the actor, if it is in this pool."""
    states = [_states(config, model) for model in models]
    idle = sum(state.idle for state in states)
    peaks = [max(state.infer, state.update) - state.idle for state in states]
    training = {"training step": idle + max(peaks, default=0), "save": idle}
    if weights is None:
        return {"load": _load(models, states), **training}
    actor = next(model.memory for model in models if model.holder.role == "actor")
    waiting = sum(state.generating for state in states)
    cache = config.rollout.kv_cache_bytes
    computing = engine_activations(config, model_shape(config), config.actor.generate.tp_size)
    return {
        "start": actor.weights_bytes + weights.gen_shard + cache + computing,
        "load": _load(models, states),
        "training step": training["training step"],
        "switch": waiting + weights.peak + actor.kept_bytes,
        "generation": waiting + actor.kept_bytes + weights.gen_shard + weights.redundant + cache + computing,
        "save": training["save"],
    }


def _load(models: list[HeldModel], states: list[StateBytes]) -> int:
    """Return the peak while models are built: each has its trained weights twice until Megatron's buffers replace its
    own."""
    held = peak = 0
    for (_, _, memory), state in zip(models, states, strict=True):
        peak = max(peak, held + memory.weights_bytes + memory.trained_bytes + memory.gradients_bytes)
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
    if _offloads(holder, "weights"):
        return StateBytes(0, memory.weights_bytes + passes[0], 0, 0)
    return memory.states(
        is_actor=holder.role == "actor",
        offloads=_offloads(holder, "optimizer"),
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
    responses = tokens * config.rollout.max_response_tokens / longest
    return activation_bytes(
        holder_shape(config, holder),
        holder.sizes,
        config.model.dtype,
        MicroBatches(-(-all_tokens // tokens), tokens, responses, longest),
        holder.settings,
        trains=trains,
        stage=model.stage,
    )


def engine_activations(config: RunConfig, shape: ModelShape, tp_size: int) -> int:
    """Return the bytes of an engine's largest forward pass: one layer's tensors, and logits of all sequences."""
    tokens, element = max(config.max_tokens, BATCHED_TOKENS), DTYPE_BYTES[config.model.dtype]
    layer = (
        4 * shape.hidden_size + (3 * shape.ffn_hidden_size + 2 * shape.q_size + 2 * shape.kv_size) / tp_size
    )
    logits = LOGIT_COPIES * 4 * config.rollout.max_num_seqs * shape.vocab_size
    return int(tokens * element * layer + logits)


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


def _three(config: RunConfig, pool: str, phase: str) -> list[str]:
    """Return the three changes that lower a phase's bytes most directly, without those that are made already."""
    return list(_remedies(config, pool, phase))[:3]


def _remedies(config: RunConfig, pool: str, phase: str) -> Iterator[str]:
    models = [holder for holder in model_holders(config) if config.pool_of(holder.role) == pool]
    trained = [holder for holder in models if holder.role in TRAINED]
    sizes = "generation.parallel" if "generation" in config.pools[pool].roles else "actor.generate"
    if phase in ("start", "generation"):
        yield f"lower rollout.kv_cache_bytes={config.rollout.kv_cache_bytes}"
        yield f"raise t_g in {sizes}"
        yield f"lower rollout.max_num_seqs={config.rollout.max_num_seqs}"
    if phase == "switch":
        yield f"lower actor.bucket_bytes={config.actor.bucket_bytes}"
        yield f"raise t_g in {sizes}"
    if phase == "training step":
        yield from (f"set {one.name}.recompute=full" for one in trained if one.section.recompute != "full")
        yield from (
            f"lower {one.name}.micro_batch_tokens={one.section.micro_batch_tokens}"
            for one in models
            if one.section.micro_batch_tokens > config.max_tokens
        )
    yield from (f"set {one.name}.offload=optimizer" for one in trained if one.section.offload == "none")
    stays = any(one.role == "reference" and not _offloads(one, "weights") for one in models)
    if stays and phase not in ("start", "load"):
        yield "set reference.offload=weights"
    yield from (f"raise p or t in {one.name}.parallel={one.sizes}" for one in models)
    yield "move roles to ranks of their own (cluster.pools)"
    yield "take more ranks, or devices with more memory"
    yield "take a smaller model"

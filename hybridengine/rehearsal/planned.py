"""The planner's memory for each phase of a rehearsal, on the fullest rank of the actor's pool."""

from __future__ import annotations

from typing import Any

from hybridengine.config import RunConfig, model_holders, model_shape
from hybridengine.config.sections import MAIN_POOL
from hybridengine.planning.budget import budget_of
from hybridengine.planning.costs.activations import activation_bytes
from hybridengine.planning.costs.dataflows import Work
from hybridengine.planning.costs.lengths import Lengths
from hybridengine.planning.costs.memory import model_memory
from hybridengine.planning.costs.workload import workload_of
from hybridengine.planning.engine_memory import engine_activations
from hybridengine.training.dry_run import cost_of


def planned_peaks(config: RunConfig) -> dict[str, int]:
    """Return phase -> peak bytes, for calls with a model on the actor's ranks; rows are as long as the run allows."""
    config = for_cpu(config)
    limit = config.rollout.max_response_tokens
    workload = workload_of(config, Lengths.of(f"constant:{limit}", limit))
    sizes = {holder.name: holder.sizes for holder in model_holders(config)}
    here = [model for model in workload.models if config.pool_of(model.role) == MAIN_POOL]
    memory = {
        model.name: model_memory(
            model.shape, sizes[model.name], workload.dtype, model.settings, trains=model.trains
        )
        for model in here
    }
    states = {
        model.name: memory[model.name].states(is_actor=model.role == "actor", offload=model.offload)
        for model in here
    }
    idle = sum(state.idle for state in states.values())
    phases = budget_of(config, MAIN_POOL, cost_of(config), on_gpus=False).device_bytes
    computing = engine_activations(config, model_shape(config), config.actor.generate)
    switched = max(phases["switch"], phases["generation"] - computing)  # it ends with an empty cache
    found: dict[str, int] = {}
    for call in workload.calls:
        if call.role not in states:
            continue
        label, model = f"{call.role}.{call.method}", workload.model(call.role)
        if call.work in (Work.SWITCH, Work.GENERATE):
            found[label] = switched if call.work is Work.SWITCH else phases["generation"]
        else:
            updates = call.work is Work.UPDATE
            micro = workload.micro_batches(model, call, sizes[model.name])
            kept = activation_bytes(
                model.shape,
                sizes[model.name],
                workload.dtype,
                micro,
                model.settings,
                trains=updates,
            )
            state = states[model.name]
            found[label] = idle + (state.update if updates else state.infer) - state.idle + kept
    return found


def for_cpu(config: RunConfig) -> RunConfig:
    """Return the configuration without CUDA graphs, with which a switch has the same peak, and without FP8."""
    changed: dict[str, Any] = {"rollout": config.rollout.model_copy(update={"cuda_graphs": False})}
    for name in ("actor", "critic", "cost_critic"):
        section = getattr(config, name, None)
        if section is not None:
            changed[name] = section.model_copy(update={"fp8": "none"})
    return config.model_copy(update=changed)

"""Lower bounds of the seconds of a model's calls on a number of ranks, without its options.

All ranks share the arithmetic evenly and do nothing else; an engine's weights are the least that a stage can have, and
its responses all run at once.
"""

from __future__ import annotations

import math

from hybridengine.models.shapes import DTYPE_BYTES
from hybridengine.planning.costs.dataflows import Call, Work
from hybridengine.planning.costs.decoding import Engine
from hybridengine.planning.costs.memory import GRADIENT_BYTES, layer_weights, optimizer_weight_bytes
from hybridengine.planning.costs.workload import PlannedModel
from hybridengine.planning.search.options import Options
from hybridengine.topology.fitting import gen_problems
from hybridengine.topology.sizes import GenSizes, divisors


def least_seconds(options: Options, name: str, num_ranks: int, capacity_bytes: int) -> list[float]:
    """Return lower bounds of the seconds of a model's calls; infinite if its state cannot fit on these ranks."""
    model = options.workload.model(name)
    calls = [call for call in options.workload.calls if call.role == name]
    if _least_bytes(options, model) > capacity_bytes * num_ranks:
        return [math.inf] * len(calls)
    return [_least_s(options, model, call, num_ranks, capacity_bytes) for call in calls]


def _least_bytes(options: Options, model: PlannedModel) -> int:
    """Return the bytes of a model's state on all ranks together, each parameter once."""
    dtype = options.workload.dtype
    each = DTYPE_BYTES[dtype]
    if model.trains:
        each += GRADIENT_BYTES + optimizer_weight_bytes(dtype)
    return each * model.shape.num_parameters


def _least_s(options: Options, model: PlannedModel, call: Call, num_ranks: int, capacity_bytes: int) -> float:
    workload, compute, shape = options.workload, options.compute, model.shape
    if call.work is Work.GENERATE:
        return _least_generation_s(options, model, call, num_ranks, capacity_bytes)
    if call.work is Work.SWITCH:
        return compute.call_s
    weights = layer_weights(shape, range(shape.num_layers)).of_token
    tokens = call.num_rows * _least_tokens(options, model, call, num_ranks)
    pass_s = 2 * tokens * weights / num_ranks / (compute.rate(workload.dtype) * compute.efficiency)
    if call.work is Work.INFER:
        return compute.call_s + pass_s
    step_s = compute.optimizer_step_s * model.mini_batches
    return compute.call_s + model.ppo_epochs * (3 * pass_s + step_s)


def _least_tokens(options: Options, model: PlannedModel, call: Call, num_ranks: int) -> float:
    """Return the least mean number of tokens of a replica's rows, whose lengths are quantiles."""
    workload, parts = options.workload, model.mini_batches if call.work is Work.UPDATE else 1
    counts = {-(-call.num_rows // (replicas * parts)) for replicas in divisors(num_ranks)}
    return round(workload.prompt_tokens) + min(workload.lengths.spread(count).mean() for count in counts)


def _least_generation_s(
    options: Options, model: PlannedModel, call: Call, num_ranks: int, capacity_bytes: int
) -> float:
    workload, node, best = options.workload, options.cluster.devices_per_node, math.inf
    for pp_size in divisors(num_ranks):
        if pp_size > model.shape.num_layers:
            break
        for tp_size in divisors(num_ranks // pp_size):
            if tp_size > node:
                break
            experts = model.shape.experts
            gen = GenSizes(pp_size, tp_size, tp_size if experts and experts.num_experts % tp_size == 0 else 1)
            if gen_problems(model.shape, gen, tp_size):
                continue
            engine = Engine(model.shape, gen, pp_size, workload.dtype, options.cluster, num_ranks)
            if engine.weight_bytes > capacity_bytes:
                continue
            rows = -(-call.num_rows * gen.num_ranks // num_ranks)
            running = min(rows, workload.max_num_seqs)
            seconds = engine.generate_s(rows, workload.prompt_tokens, workload.lengths, running)
            best = min(best, seconds + options.compute.call_s)
    return best

"""Dry run: groups, switch plan and memory per rank, computed without torch or any process."""

from __future__ import annotations

from rich.console import Console

from hybridengine.config import RunConfig, holder_shape, model_holders, model_shape
from hybridengine.config.algorithm import ServedAlgorithm
from hybridengine.config.reward_sections import scorer_key
from hybridengine.config.run_config import TRAINED, reward_sections
from hybridengine.drivers.dataflow import check_functions
from hybridengine.formatting import format_bytes
from hybridengine.models.shapes import DTYPE_BYTES, ModelShape
from hybridengine.planning.budget import Budget, budget_of, pool_models, switched_weights
from hybridengine.planning.costs.memory import (
    engine_shape,
    engine_weight_bytes,
    generation_bytes,
    model_memory,
)
from hybridengine.planning.engine_memory import judges_memory
from hybridengine.planning.simulation.bound_prices import price_lines
from hybridengine.planning.switch.switch_cost import SwitchCost, SwitchPricer
from hybridengine.topology.experts import named_expert_groups
from hybridengine.topology.grid import format_groups, named_groups
from hybridengine.topology.links import NodeMap

SHOWN_PLANS = 8


def print_dry_run(config: RunConfig) -> None:
    """Print groups, plan summary and memory; raise ConfigError for a missing or unsuitable function of the algorithm."""
    check_functions(config.algorithm)
    console = Console(highlight=False)
    cost = cost_of(config)
    lines = [*layout_lines(config, cost), *group_lines(config, cost), *memory_lines(config, cost)]
    if config.engines:
        lines += ["", *price_lines(config)]
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)


def layout_lines(config: RunConfig, cost: SwitchCost) -> list[str]:
    """Return lines with the sizes of every role and the cost of the switch."""
    shape = model_shape(config)
    in_place = "actor.generate" in config.engine_sizes
    return [
        f"model: {shape.family}, {shape.num_layers} layers, {shape.num_parameters:,} parameters,"
        f" {format_bytes(shape.weight_bytes(config.model.dtype))} in {config.model.dtype}"
        + (f"; {shape.num_trained:,} are trained, those of adapters" if shape.adapters else ""),
        *_vision_lines(shape, config.model.dtype),
        *_pool_lines(config),
        *_engine_lines(config),
        "roles: "
        + ", ".join(f"{holder.name} {holder.sizes}" for holder in model_holders(config))
        + f" (p-t-d){_generation_text(config) if in_place else ''}",
        *_judge_lines(config),
        *_padding_lines(config),
        *([_decoding_line(config), *_draws_lines(config)] if config.algorithm.generates else []),
        *([_switch_line(config, cost)] if in_place else []),
    ]


def _generation_text(config: RunConfig) -> str:
    """Return the sizes at which the actor's ranks generate, as text."""
    generation = config.generation_grid
    itself = "the actor itself generates at" if config.engines else "generation"
    nesting = f"d_g={generation.micro_dp_size}" if generation.nests else "sizes that do not nest"
    return f"; {itself} {config.actor.generate} (p_g-t_g) in {generation.num_replicas} engine(s), {nesting}"


def _judge_lines(config: RunConfig) -> list[str]:
    """Return a line about the engines of each judge."""
    return [
        f"judge: {scorer_key(role, term)} at {judge.engine} (p_g-t_g) in"
        f" {config.pools[config.pool_of(role)].num_ranks // judge.engine.num_ranks} engine(s)"
        for role, section in reward_sections(config).items()
        for term, judge in section.judges.items()
    ]


def _vision_lines(shape: ModelShape, dtype: str) -> list[str]:
    """Return the line of a frozen vision tower, which the ledger of the switch does not count."""
    if shape.vision is None:
        return []
    size = format_bytes(shape.num_frozen * DTYPE_BYTES[dtype])
    return [
        f"vision: {shape.num_frozen:,} parameters, frozen, {size} on every rank besides the weights that switch"
    ]


def _switch_line(config: RunConfig, cost: SwitchCost) -> str:
    """Return the line with the cost of the actor's switch."""
    shape, weights, quantization = (
        model_shape(config),
        switched_weights(config, cost),
        config.rollout.quantization,
    )
    share = cost.received_bytes_max / shape.weight_bytes(config.model.dtype)
    quantized = f" in {quantization}" if quantization != "none" else ""
    kept = model_memory(shape, config.actor.parallel, config.model.dtype).kept_bytes
    return (
        f"switch: each rank receives at most {format_bytes(cost.received_bytes_max)} ({share:.1%} of the model), peak"
        f" {format_bytes(weights.peak)} of weights (training shard {format_bytes(cost.train_shard_bytes_max)}, generation"
        f" shard {format_bytes(weights.gen_shard)}{quantized}), redundant {format_bytes(weights.redundant)}; back:"
        f" {format_bytes(weights.received_back)} received"
        + (f"; {format_bytes(kept)} of frozen weights stay beside merged ones" if kept else "")
    )


def _padding_lines(config: RunConfig) -> list[str]:
    """Return a line for each role with context-parallel ranks, which divide every row among them."""
    return [
        f"padding: {holder.name} pads every row to a multiple of 2c = {2 * holder.sizes.cp_size} tokens"
        for holder in model_holders(config)
        if holder.sizes.cp_size > 1
    ]


def _decoding_line(config: RunConfig) -> str:
    """Return a line that says whether decoding captures CUDA graphs."""
    if not config.captures_graphs:
        why = "on a CPU" if config.cluster.device == "cpu" else "rollout.cuda_graphs=false"
        return f"decoding: eager ({why})"
    why = "rollout.cuda_graphs=true" if config.rollout.cuda_graphs else "the default on GPUs"
    where = "" if config.cluster.device == "cuda" else ", eager where ranks have no GPUs"
    return f"decoding: CUDA graphs ({why}){where}"


def _draws_lines(config: RunConfig) -> list[str]:
    """Return a line for engines with pipeline stages on GPUs, whose sampler takes the responses one after another."""
    sizes = config.generation.parallel if config.engines else config.actor.generate
    if sizes.pp_size == 1 or config.cluster.device == "cpu":
        return []
    return [
        f"draws: p_g={sizes.pp_size} takes vLLM's first model runner, which draws one response after another, about 10 us"
        " each in every step; p_g=1 draws all at once, and other tokens for the same seeds"
    ]


def _pool_lines(config: RunConfig) -> list[str]:
    """Return lines with the ranks and nodes of each pool."""
    lines = []
    for name, pool in config.pools.items():
        ranks = f"{pool.num_ranks} on {len(pool.ranks_per_node)} node(s)"
        if not config.cluster.pools:
            return [f"ranks: {ranks}, {config.cluster.rank_order} order"]
        lines.append(f"pool {name}: ranks {ranks}, for {', '.join(pool.roles)}")
    return [*lines, f"ranks: {config.num_ranks} in all, {config.cluster.rank_order} order"]


def _engine_lines(config: RunConfig) -> list[str]:
    """Return a line with the engines on a pool of their own, if any."""
    if not config.engines:
        return []
    name, gen = config.pool_of("generation"), config.generation.parallel
    spread = sum(len(nodes) > 1 for nodes in config.engines)
    across = f", {spread} of them on several nodes" if spread else ""
    bound = config.staleness
    purpose = (
        "clients sample while the actor trains"
        if isinstance(config.algorithm, ServedAlgorithm)
        else "generation waits for the bound alone: no trained token is older than"
        f" max_versions={bound.max_versions} (bound: {bound.bound})"
    )
    received = format_bytes(generation_bytes(engine_shape(config), gen.pp_size, gen, config.model.dtype))
    return [
        f"engines: {len(config.engines)} of {gen} (p_g-t_g) in pool {name}{across}; {purpose}",
        f"push: each of their ranks receives its {received} of weights with each version, in buckets of at most"
        f" {format_bytes(config.actor.bucket_bytes)}; the trainers keep theirs",
    ]


def group_lines(config: RunConfig, cost: SwitchCost) -> list[str]:
    """Return lines with the training groups of every model and the generation groups of the actor."""
    lines = ["", "groups" + (" (each pool counts its own ranks)" if config.cluster.pools else "")]
    holders = model_holders(config)
    width = max(len("generation"), *(len(holder.name) for holder in holders))
    wide = len("expert tensor" if model_shape(config).experts else "micro-DP  ")
    for holder in holders:
        experts = named_expert_groups(holder.grid) if holder_shape(config, holder).experts else []
        for name, groups in [*named_groups(holder.grid), *experts]:
            lines.append(f"  {holder.name:<{width}} {name:<{wide}} {format_groups(groups)}")
    if not config.algorithm.generates:
        return lines
    generation = config.generation_grid
    domain = "micro-DP" if generation.nests else "gather"
    for name, groups in [*named_groups(generation), (domain, cost.groups)]:
        lines.append(f"  {'generation':<{width}} {name:<{wide}} {format_groups(groups)}")
    return [*lines, f"  {cost.num_crossing_domains} of {len(cost.groups)} {domain} groups cross nodes"]


def memory_lines(config: RunConfig, cost: SwitchCost) -> list[str]:
    """Return lines with a summary of the plan and the memory of the fullest rank, by phase."""
    lines = _plan_lines(cost) if config.algorithm.generates else []
    for name in config.pools:
        lines += _pool_memory_lines(config, name, cost)
    checks = "hybridengine doctor compares this with the devices, as training does before it builds a model"
    return [*lines, "", checks]


def _plan_lines(cost: SwitchCost) -> list[str]:
    repeated = f"{len(cost.plans)} of {len(cost.groups)} groups that gather; the others repeat them"
    return [
        "",
        f"plan ({repeated})" if len(cost.groups) > len(cost.plans) else "plan",
        *(f"  {plan}" for plan in cost.plans[:SHOWN_PLANS]),
        f"  buckets of at most {format_bytes(cost.bucket_bytes_max)}; digest {cost.plans[0].digest[:16]}",
    ]


def _pool_memory_lines(config: RunConfig, pool: str, cost: SwitchCost) -> list[str]:
    """Return lines with the memory of a rank of a pool, by model and by phase."""
    device = config.cluster.device
    of_pool = f" of pool {pool}" if config.cluster.pools else ""
    extra = "CUDA, NCCL and graphs estimated" if device == "cuda" else "without the libraries"
    lines = ["", f"memory per rank{of_pool} (on the fullest, with activations; {extra})"]
    cache = format_bytes(config.rollout.kv_cache_bytes)
    models = pool_models(config, pool)
    judges = judges_memory(config, pool)
    names = [*(holder.name for holder in model_holders(config)), *(judge.key for judge in judges)]
    width = max(map(len, ["training step", *names]))
    has_engine_alone = "generation" in config.pools[pool].roles
    if has_engine_alone:
        weights = format_bytes(engine_weight_bytes(config))
        lines.append(f"  {'generation':<{width}} weights {weights}, KV cache {cache}")
    for holder, _, memory in models:
        text = f"  {holder.name:<{width}} weights {format_bytes(memory.weights_bytes)}"
        if holder.role in TRAINED:
            text += f", gradients {format_bytes(memory.gradients_bytes)}"
            text += f", optimizer {format_bytes(memory.optimizer_bytes)}"
        lines.append(text)
    for judge in judges:
        weights = (
            f"{format_bytes(judge.weights)}{', in host memory between calls' if judge.is_offloaded else ''}"
        )
        lines.append(f"  {judge.key:<{width}} weights {weights}, KV cache {format_bytes(judge.cache)}")
    remarks = {
        "start": f"KV cache {cache}"
        if has_engine_alone
        else f"engine beside the actor's weights, KV cache {cache}",
        "load": "all models, while the last is built",
        "training step": "with activations of the largest micro-batch",
        "switch": "while new weights come" if has_engine_alone else "at its peak",
        "generation": f"KV cache {cache} included",
        "judging": "the judge with most, while it draws verdicts",
        "save": "between two steps",
    }
    budget = budget_of(config, pool, cost, on_gpus=device == "cuda")
    for phase, num_bytes in budget.device_bytes.items():
        lines.append(f"  {phase:<{width}} {format_bytes(num_bytes)}, {remarks[phase]}")
    if device == "auto":
        more = (
            budget_of(config, pool, cost, on_gpus=True).device_bytes[budget.peak]
            - budget.device_bytes[budget.peak]
        )
        lines.append(
            f"  {'on GPUs':<{width}} {format_bytes(more)} more in each phase, for CUDA, NCCL and graphs (estimate)"
        )
    if device != "cpu":
        lines.append(
            f"  {'host memory':<{width}} {format_bytes(budget.host_bytes)}, with offloaded state and copies of a save"
        )
    return lines


def budgets_of(config: RunConfig, *, on_gpus: bool) -> dict[str, list[Budget]]:
    """Return the budget of each rank, by pool."""
    cost = cost_of(config)
    return {
        name: [budget_of(config, name, cost, on_gpus=on_gpus, rank=rank) for rank in range(pool.num_ranks)]
        for name, pool in config.pools.items()
    }


def cost_of(config: RunConfig) -> SwitchCost:
    """Return the cost of switching the actor, computed from its plans."""
    pricer = SwitchPricer(engine_shape(config), config.model.dtype, config.actor.bucket_bytes)
    return pricer.price(config.generation_grid, NodeMap(config.cluster.ranks_per_node))

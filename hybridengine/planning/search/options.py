"""Options of the models: parallel sizes on a number of ranks, with the seconds of calls and the memory.

The cost of a switch follows from its plan, which is expensive to compute. Until an option is about to be chosen, a lower
bound is used instead.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

from hybridengine.planning.costs.activations import activation_bytes
from hybridengine.planning.costs.clusters import Cluster, Fabric
from hybridengine.planning.costs.dataflows import Call, Work
from hybridengine.planning.costs.decoding import Engine
from hybridengine.planning.costs.memory import (
    ModelMemory,
    StateBytes,
    model_memory,
)
from hybridengine.planning.costs.mixtures import engine_axes
from hybridengine.planning.costs.passes import ModelPasses, compute_of
from hybridengine.planning.costs.workload import PlannedModel, Workload
from hybridengine.planning.search.layouts import training_sizes
from hybridengine.planning.switch.switch_cost import SwitchPricer
from hybridengine.topology.fitting import gen_problems, train_problems
from hybridengine.topology.generation import GenerationGrid
from hybridengine.topology.grid import Grid
from hybridengine.topology.sizes import GenSizes, TrainSizes, divisors

NOT_REPLICATED = 0.98
"""Lower bound of the share of a generation shard that tensor parallelism divides; norms are replicated."""


@dataclass(frozen=True)
class SwitchFigures:
    """Cost of switching the actor's weights."""

    there_s: float
    back_s: float
    peak_bytes: int
    """Peak bytes of weights on any rank."""
    received_bytes: int = 0
    """Largest bytes received by a rank in the switch to generation; 0 in lower bounds."""
    retained_bytes: int = 0
    """Largest bytes of training weights that a rank keeps while it generates; 0 in lower bounds."""


@dataclass(frozen=True)
class EngineOption:
    """Option for the actor's engine; bytes are those of a rank."""

    sizes: GenSizes
    gen_bytes: int
    """Bytes of weights."""
    kv_bytes: int
    """Bytes of KV cache; at most those that generation can use."""
    least_kv_bytes: int
    """Bytes of KV cache for one response of the greatest length."""
    switch: SwitchFigures
    """Lower bounds, until the switch is planned."""


@dataclass(frozen=True)
class Option:
    """Sizes of a model, with the resulting seconds and memory."""

    model: str
    sizes: TrainSizes
    works: tuple[Work, ...]
    seconds_of: Callable[[], tuple[float, ...]]
    """Returns `seconds`, which options that do not fit into memory never need."""
    memory: StateBytes
    engine: EngineOption | None = None
    """Engine of the actor; None for other models."""

    @cached_property
    def seconds(self) -> tuple[float, ...]:
        """Seconds of each call, without the transfers of a switch."""
        return self.seconds_of()

    @cached_property
    def least_seconds(self) -> tuple[float, ...]:
        """Seconds of each call, with a lower bound for switches that are not planned."""
        if self.engine is None:
            return self.seconds
        switches = iter((self.engine.switch.there_s, self.engine.switch.back_s))
        return tuple(
            own + next(switches) if work is Work.SWITCH else own
            for own, work in zip(self.seconds, self.works, strict=True)
        )

    @cached_property
    def extra_bytes(self) -> int:
        """Peak bytes that the model needs in addition to those that it always holds."""
        peak = max(self.memory.infer, self.memory.update)
        if (engine := self.engine) is not None:
            generating = engine.gen_bytes + engine.switch.retained_bytes + engine.least_kv_bytes
            peak = max(peak, self.memory.generating + max(generating, engine.switch.peak_bytes))
        return max(0, peak - self.memory.idle)


def pricer_of(workload: Workload) -> SwitchPricer:
    """Return a pricer for switches of the workload's actor."""
    shape = workload.model("actor").shape
    return SwitchPricer(shape, workload.dtype, workload.bucket_bytes, groups_experts=True)


class Options:
    """Options of the models of a workload on a cluster, computed once each.

    `fixed` and `fixed_gen` are required sizes; a `pricer` from `pricer_of` for the same workload can be shared.
    """

    def __init__(
        self,
        workload: Workload,
        cluster: Cluster,
        fixed: Mapping[str, TrainSizes] | None = None,
        fixed_gen: GenSizes | None = None,
        pricer: SwitchPricer | None = None,
    ) -> None:
        self.workload, self.cluster, self.compute = workload, cluster, compute_of(cluster)
        self.fixed, self.fixed_gen = dict(fixed or {}), fixed_gen
        self._found: dict[tuple[str, int], list[Option]] = {}
        self._fitting: dict[tuple[str, int, int], list[Option]] = {}
        self._engines: dict[tuple[object, ...], Engine] = {}
        self._switches: dict[tuple[TrainSizes, GenSizes], SwitchFigures] = {}
        self._generations: dict[tuple[object, ...], float] = {}
        self._pricer = pricer or pricer_of(workload)

    def of(self, name: str, num_ranks: int) -> list[Option]:
        """Return the options of a model on `num_ranks` ranks; empty if there are none."""
        key, model = (name, num_ranks), self.workload.model(name)
        if key not in self._found:
            sizes = self._train_sizes(model, num_ranks)
            self._found[key] = [option for one in sizes for option in self._options(model, one)]
        return self._found[key]

    def fitting(self, name: str, num_ranks: int, capacity_bytes: int) -> list[Option]:
        """Return the options of a model on `num_ranks` ranks that need at most `capacity_bytes` by themselves."""
        key, model = (name, num_ranks, capacity_bytes), self.workload.model(name)
        if key not in self._fitting:
            self._fitting[key] = [
                option
                for sizes in self._train_sizes(model, num_ranks)
                for option in self._options(model, sizes, capacity_bytes)
                if option.memory.idle + option.extra_bytes <= capacity_bytes
            ]
        return self._fitting[key]

    def planned(self, option: Option) -> Option:
        """Return the option with the figures of its switch's plan."""
        engine = option.engine
        if engine is None:
            return option
        switch = self._switch(option.sizes, engine.sizes)
        return replace(option, engine=replace(engine, switch=switch))

    def with_cache(self, option: Option, kv_bytes: int) -> Option:
        """Return the actor's option with `kv_bytes` of KV cache."""
        assert option.engine is not None, "the actor has an engine"
        sizes, gen, without = option.sizes, option.engine.sizes, option.seconds_of

        def seconds() -> tuple[float, ...]:
            return tuple(
                self._generate_s(sizes, gen, call, kv_bytes) if call.work is Work.GENERATE else own
                for call, own in zip(self._calls("actor"), without(), strict=True)
            )

        return replace(option, seconds_of=seconds, engine=replace(option.engine, kv_bytes=kv_bytes))

    def _calls(self, name: str) -> list[Call]:
        return [call for call in self.workload.calls if call.role == name]

    def _train_sizes(self, model: PlannedModel, num_ranks: int) -> Iterator[TrainSizes]:
        """Yield the sizes that Megatron supports, with tensor shards on one node and rows for every rank and replica."""
        if num_ranks > self.workload.rank_rows.get(model.role, num_ranks):
            return
        node = self.cluster.devices_per_node
        if (fixed := self.fixed.get(model.name)) is None:
            generates = any(call.work is Work.GENERATE for call in self._calls(model.name))
            tokens = self.workload.max_tokens
            tried = training_sizes(model.shape, num_ranks, node, tokens, generates=generates)
        else:
            possible = fixed.num_ranks == num_ranks and fixed.tp_size <= node
            tried = [fixed] if possible and not train_problems(model.shape, fixed) else []
        yield from (sizes for sizes in tried if self._splits_evenly(model, sizes))

    def _splits_evenly(self, model: PlannedModel, sizes: TrainSizes) -> bool:
        """Return True if replicas get equal numbers of rows in updates, and at least one row of a step in inference."""
        if model.name == "actor" and (self.workload.warmup_rows or 0) % sizes.dp_size:
            return False
        for call in self._calls(model.name):
            if call.work is Work.UPDATE and call.num_rows % (sizes.dp_size * model.mini_batches):
                return False
            # ReMax has fewer greedy responses, so that some replicas may have none.
            if call.work is Work.INFER and self.workload.rows_per_step < sizes.dp_size:
                return False
        return True

    def _options(
        self, model: PlannedModel, sizes: TrainSizes, capacity_bytes: float = math.inf
    ) -> Iterator[Option]:
        """Yield the options with given sizes; none if the model's state alone exceeds the capacity."""
        calls, held = self._calls(model.name), self._held(model, sizes)
        state = held.states(is_actor=model.name == "actor", offload=model.offload)
        if max(state.idle, state.infer, state.update if model.trains else 0) > capacity_bytes:
            return
        passes = ModelPasses(model.shape, sizes, self.workload.dtype, self.cluster)
        plain = Option(
            model.name,
            sizes,
            tuple(call.work for call in calls),
            cache(lambda: tuple(self._pass_s(model, passes, held, call) for call in calls)),
            self._state_bytes(model, sizes, held),
        )
        if Work.GENERATE not in plain.works:
            yield plain
            return
        if plain.memory.idle + plain.extra_bytes > capacity_bytes:
            return
        for gen in self._engine_sizes(model, sizes):
            if gen == (self.fixed_gen or gen) and not gen_problems(model.shape, gen, sizes.tp_size):
                yield self._with_engine(plain, gen, held.weights_bytes)

    def _engine_sizes(self, model: PlannedModel, sizes: TrainSizes) -> Iterator[GenSizes]:
        """Yield the sizes of engines whose shards contain training shards; of a mixture, those of its experts, which are
        most of it. Sizes that the user fixes need not."""
        shards, parts, fixed = sizes.expert_shards, sizes.expert_parts, self.fixed_gen
        whole = model.shape.experts is not None and shards == 1
        for pp_size in divisors(sizes.pp_size):
            if pp_size > 1 and sizes.virtual_stages > 1:
                return
            for tp_size in divisors(sizes.tp_size):
                gen = GenSizes(pp_size, tp_size)
                if (
                    tp_size == 1
                    or not model.shape.experts
                    or (parts == 1 and shards == sizes.tp_size)
                    or gen == fixed
                ):
                    yield gen
            for tp_size in divisors(parts)[1:] if whole else ():
                gen = GenSizes(pp_size, tp_size, tp_size)
                if tp_size <= self.cluster.devices_per_node and not gen.problems_over(sizes):
                    yield gen

    def _held(self, model: PlannedModel, sizes: TrainSizes) -> ModelMemory:
        return model_memory(model.shape, sizes, self.workload.dtype, model.settings, trains=model.trains)

    def _pass_s(self, model: PlannedModel, passes: ModelPasses, held: ModelMemory, call: Call) -> float:
        """Return the seconds of a call, without the transfers of a switch and without generation."""
        sizes, link, host = passes.sizes, self.cluster.links.network, self.cluster.links.host
        beside_s = self.compute.call_s
        # At most, a rank fetches all rows of its replica; nothing moves if producer and consumer have the same sizes.
        if num_bytes := self.workload.row_bytes(call) * call.num_rows / sizes.dp_size:
            node_ranks = min(self.cluster.devices_per_node, sizes.num_ranks)
            beside_s += link.seconds(num_bytes, num_bytes * node_ranks) + link.latency_s
        if call.work is Work.SWITCH and model.offload == "optimizer" and host:
            beside_s += held.optimizer_bytes / host.bytes_per_s
        if model.offload == "weights" and host:
            beside_s += held.weights_bytes / host.bytes_per_s
        if call.work in (Work.SWITCH, Work.GENERATE):
            return beside_s
        micro = self.workload.micro_batches(model, call, sizes)
        if call.work is Work.INFER:
            done = passes.forward(micro)
        else:
            done = passes.update(
                micro, model.mini_batches, recompute=model.settings.recompute, num_passes=model.ppo_epochs
            )
        return done.on(self.cluster, sizes.num_ranks) + beside_s

    def _state_bytes(self, model: PlannedModel, sizes: TrainSizes, held: ModelMemory) -> StateBytes:
        kept = {Work.INFER: 0, Work.UPDATE: 0}
        for call in self._calls(model.name):
            if call.work in kept:
                own = activation_bytes(
                    model.shape,
                    sizes,
                    self.workload.dtype,
                    self.workload.micro_batches(model, call, sizes),
                    model.settings,
                    trains=call.work is Work.UPDATE,
                )
                kept[call.work] = max(kept[call.work], own)
        return held.states(
            is_actor=model.name == "actor",
            offload=model.offload,
            infer=kept[Work.INFER],
            update=kept[Work.UPDATE],
        )

    def _with_engine(self, plain: Option, gen: GenSizes, train_bytes: int) -> Option:
        workload, sizes, engine = self.workload, plain.sizes, self._engine(plain.sizes, gen)
        rows = max(call.num_rows for call in self._calls("actor") if call.work is Work.GENERATE)
        running = min(-(-rows * gen.num_ranks // sizes.num_ranks), workload.max_num_seqs)
        row_bytes = engine.row_bytes(workload.lengths, workload.prompt_tokens)
        blocks = 1 + math.ceil(workload.max_tokens / self.compute.kv_block_tokens)
        least_kv = blocks * engine.block_bytes
        kv_bytes = max(math.ceil(running * row_bytes) + engine.block_bytes, least_kv)
        switch = self._least_switch(sizes, gen, train_bytes, engine.weight_bytes)
        option = replace(plain, engine=EngineOption(gen, engine.weight_bytes, kv_bytes, least_kv, switch))
        return self.with_cache(option, kv_bytes)

    def _engine(self, sizes: TrainSizes, gen: GenSizes) -> Engine:
        shape = self.workload.model("actor").shape
        axes = engine_axes(sizes, gen) if shape.experts else ()
        key = gen, sizes.pp_size, sizes.num_ranks, axes
        if key not in self._engines:
            self._engines[key] = Engine(
                shape, gen, sizes.pp_size, self.workload.dtype, self.cluster, sizes.num_ranks, axes
            )
        return self._engines[key]

    def _generate_s(self, sizes: TrainSizes, gen: GenSizes, call: Call, kv_bytes: int) -> float:
        workload, engine = self.workload, self._engine(sizes, gen)
        rows = -(-call.num_rows * gen.num_ranks // sizes.num_ranks)
        lengths, prompt_tokens = workload.lengths, workload.prompt_tokens
        running = min(rows, engine.num_running(lengths, prompt_tokens, workload.max_num_seqs, kv_bytes))
        key = (sizes.pp_size, sizes.num_ranks, gen, rows, running, engine.tensor_axes)
        if key not in self._generations:
            self._generations[key] = engine.generate_s(rows, prompt_tokens, lengths, running)
        return self._generations[key] + self.compute.call_s

    def _least_switch(
        self, sizes: TrainSizes, gen: GenSizes, train_bytes: int, gen_bytes: int
    ) -> SwitchFigures:
        """Return a lower bound of the cost of a switch: one copy of the weights, links that are fully used, and for those
        into a node the weights that none of its ranks holds."""
        links, received = self.cluster.links, max(0, gen_bytes - train_bytes)
        between, fastest, entering_s = links.between_nodes, links.same_node.bytes_per_s, 0.0
        if between is not None:
            fastest += between.bytes_per_s
            ranks = min(self.cluster.devices_per_node, sizes.num_ranks)
            # A tensor-parallel group is on one node, which therefore needs all t_g shards of some generation stage; where
            # it is not, a node needs those of its own ranks at least.
            axes = self._engine(sizes, gen).tensor_axes
            fabric = Fabric(self.cluster, sizes.num_ranks)
            shards = math.prod(map(fabric.members_per_node, axes)) if axes else gen.tp_size
            entering = max(0.0, NOT_REPLICATED * shards * gen_bytes - ranks * train_bytes)
            entering_s = entering / (between.node_bytes_per_s or ranks * between.bytes_per_s)
        return SwitchFigures(max(received / fastest, entering_s), 0.0, max(train_bytes, gen_bytes))

    def _switch(self, sizes: TrainSizes, gen: GenSizes) -> SwitchFigures:
        """Return the figures of a switch, from a plan at sizes with the same switch."""
        key = train, _ = switched_sizes(sizes, self.cluster.devices_per_node), gen
        if key not in self._switches:
            cost = self._pricer.price(
                GenerationGrid(Grid(train), gen), self.cluster.node_map(train.num_ranks)
            )
            seconds = cost.seconds_there(self.cluster), cost.seconds_back(self.cluster)
            self._switches[key] = SwitchFigures(
                *seconds, cost.peak_weight_bytes_max, cost.received_bytes_max, cost.redundant_bytes_max
            )
        return self._switches[key]


def switched_sizes(sizes: TrainSizes, devices_per_node: int) -> TrainSizes:
    """Return the sizes with the fewest ranks whose switch has the same figures: a rank for each position on the nodes.

    Ranks of a stage that fill whole nodes have the same positions, however many there are. Virtual stages have no
    influence: each bucket is one parameter of a layer, and a stage has as many layers, whichever they are. Replicas that
    share experts are in the same domains.
    """
    if (both := sizes.expert_parts * sizes.expert_shards) > 1 and sizes.expert_parts > 1:
        sharing = both // math.gcd(both, sizes.tp_size * sizes.cp_size)
        ranks = sizes.replica_size * sharing
        repeats = min(sizes.dp_size // sharing, devices_per_node // math.gcd(ranks, devices_per_node))
        return replace(sizes, dp_size=sharing * repeats, virtual_stages=1)
    t, c = sizes.tp_size, sizes.cp_size
    fewest = TrainSizes(sizes.pp_size, t, 1, devices_per_node // t if t * c % devices_per_node == 0 else c)
    replicas = devices_per_node // math.gcd(fewest.replica_size, devices_per_node)
    return replace(fewest, dp_size=min(sizes.dp_size, replicas))


def undominated(options: Sequence[Option], devices_per_node: int) -> list[Option]:
    """Return the options without those that cannot be better than another one in any plan.

    An option is no better than another with the same switch that is no slower in any call and needs no more memory at
    any time, since neither longer calls nor more memory make an iteration shorter.
    """
    kept: dict[tuple[object, ...], list[tuple[float, ...]]] = {}
    found = []
    for option in sorted(options, key=lambda option: sum(option.least_seconds)):
        memory, engine = option.memory, option.engine
        same = (switched_sizes(option.sizes, devices_per_node), engine.sizes) if engine else ()
        costs = (*option.least_seconds, memory.idle, memory.generating, memory.idle + option.extra_bytes)
        others = kept.setdefault(same, [])
        if not any(all(map(operator.le, other, costs)) for other in others):
            others.append(costs)
            found.append(option)
    return found

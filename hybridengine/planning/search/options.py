"""Options of the models: sizes on a number of ranks, with the seconds of calls and the memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

from hybridengine.models.shapes import DTYPE_BYTES
from hybridengine.planning.costs.clusters import Cluster
from hybridengine.planning.costs.dataflows import Call, Work
from hybridengine.planning.costs.decoding import Engine
from hybridengine.planning.costs.memory import ModelMemory, StateBytes, activation_bytes, model_memory
from hybridengine.planning.costs.passes import ModelPasses, compute_of
from hybridengine.planning.costs.shards import generation_holding
from hybridengine.planning.costs.workload import PlannedModel, Workload
from hybridengine.planning.search.layouts import gen_problems, train_problems
from hybridengine.planning.search.option import EngineOption, Option, SwitchFigures
from hybridengine.planning.switch.switch_cost import SwitchPricer
from hybridengine.topology.generation import GenerationGrid
from hybridengine.topology.grid import Grid
from hybridengine.topology.sizes import GenSizes, TrainSizes, divisors

NOT_REPLICATED = 0.98
"""Lower bound of the share of a generation shard that tensor parallelism divides; norms are replicated."""


def pricer_of(workload: Workload) -> SwitchPricer:
    """Return a pricer for switches of the workload's actor."""
    return SwitchPricer(workload.model("actor").shape, workload.dtype, workload.bucket_bytes)


class Options:
    """Options of the models of a workload on a cluster, computed once each.

    Args:
        fixed: required sizes of models, by name.
        fixed_gen: required sizes of the engine.
        pricer: pricer of switches, from `pricer_of` for the same workload; by default a new one.
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
        self._switches: dict[tuple[int, int, int, GenSizes], SwitchFigures] = {}
        self._generations: dict[tuple[object, ...], float] = {}
        self._pricer = pricer or pricer_of(workload)

    @property
    def _actor(self) -> PlannedModel:
        return self.workload.model("actor")

    def of(self, name: str, num_ranks: int) -> list[Option]:
        """Return the options of a model on `num_ranks` ranks; empty if there are none."""
        key = (name, num_ranks)
        if key not in self._found:
            model = self.workload.model(name)
            self._found[key] = [
                option
                for sizes in self._train_sizes(model, num_ranks)
                for option in self._options(model, sizes)
            ]
        return self._found[key]

    def planned(self, option: Option) -> Option:
        """Return the option with the figures of its switch's plan."""
        engine = option.engine
        if engine is None or engine.is_planned:
            return option
        switch = self._switch(option.sizes, engine.sizes)
        return replace(option, engine=replace(engine, switch=switch, is_planned=True))

    def with_cache(self, option: Option, kv_bytes: int) -> Option:
        """Return the actor's option with `kv_bytes` of KV cache."""
        assert option.engine is not None, "the actor has an engine"
        seconds = list(option.seconds)
        for place, call in enumerate(self._calls("actor")):
            if call.work is Work.GENERATE:
                seconds[place] = self._generate_s(option.sizes, option.engine.sizes, call, kv_bytes)
        return replace(option, seconds=tuple(seconds), engine=replace(option.engine, kv_bytes=kv_bytes))

    def _calls(self, name: str) -> list[Call]:
        return [call for call in self.workload.calls if call.role == name]

    def _train_sizes(self, model: PlannedModel, num_ranks: int) -> Iterator[TrainSizes]:
        """Yield the sizes that Megatron supports, with tensor shards on one node and rows for every rank and replica."""
        if num_ranks > self.workload.rank_rows.get(model.role, num_ranks):
            return
        for parts in divisors(num_ranks):
            for tp_size in divisors(parts):
                sizes = TrainSizes(parts // tp_size, tp_size, num_ranks // parts)
                if (
                    tp_size <= self.cluster.devices_per_node
                    and sizes == self.fixed.get(model.name, sizes)
                    and self._splits_evenly(model, sizes)
                    and not train_problems(model.shape, sizes)
                ):
                    yield sizes

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

    def _options(self, model: PlannedModel, sizes: TrainSizes) -> Iterator[Option]:
        calls = self._calls(model.name)
        passes = ModelPasses(model.shape, sizes, self.workload.dtype, self.cluster)
        plain = Option(
            model.name,
            sizes,
            tuple(call.work for call in calls),
            tuple(self._pass_s(model, passes, call) for call in calls),
            self._state_bytes(model, sizes),
        )
        if Work.GENERATE not in plain.works:
            yield plain
            return
        for gen in self._gen_sizes(sizes):
            yield self._with_engine(plain, gen)

    def _pass_s(self, model: PlannedModel, passes: ModelPasses, call: Call) -> float:
        beside_s = self.compute.call_s + self._fetch_s(call, passes.sizes)
        if call.work is Work.SWITCH:
            return beside_s + self._offload_s(model, passes.sizes)
        if call.work is Work.GENERATE:
            return beside_s
        micro = self.workload.micro_batches(model, call, passes.sizes.dp_size)
        if call.work is Work.INFER:
            done = passes.forward(micro)
        else:
            done = passes.update(
                micro, model.mini_batches, recompute=model.recompute, num_passes=model.ppo_epochs
            )
        return done.on(self.cluster, passes.sizes.num_ranks) + beside_s

    def _offload_s(self, model: PlannedModel, sizes: TrainSizes) -> float:
        """Return the seconds of moving optimizer state to host memory, or back."""
        host = self.cluster.links.host
        return self._held(model, sizes).optimizer_bytes / host.bytes_per_s if model.offloads and host else 0.0

    def _fetch_s(self, call: Call, sizes: TrainSizes) -> float:
        """Return an upper bound of the seconds in which a rank fetches its replica's rows from other ranks; nothing moves
        if producer and consumer have the same sizes."""
        link, ranks = self.cluster.links.network, min(self.cluster.devices_per_node, sizes.num_ranks)
        num_bytes = self.workload.row_bytes(call) * call.num_rows / sizes.dp_size
        seconds = link.seconds(num_bytes, num_bytes * ranks)
        return seconds + link.latency_s if num_bytes else 0.0

    def _state_bytes(self, model: PlannedModel, sizes: TrainSizes) -> StateBytes:
        workload, held = self.workload, self._held(model, sizes)
        kept = {Work.INFER: 0, Work.UPDATE: 0}
        for call in self._calls(model.name):
            if call.work in kept:
                micro = workload.micro_batches(model, call, sizes.dp_size)
                own = activation_bytes(
                    model.shape,
                    sizes,
                    workload.dtype,
                    micro,
                    trains=call.work is Work.UPDATE,
                    recompute=model.recompute,
                )
                kept[call.work] = max(kept[call.work], own)
        return held.states(
            is_actor=model.name == "actor",
            offloads=model.offloads,
            infer=kept[Work.INFER],
            update=kept[Work.UPDATE],
        )

    def _held(self, model: PlannedModel, sizes: TrainSizes) -> ModelMemory:
        return model_memory(model.shape, sizes, self.workload.dtype, trains=model.trains)

    def _gen_sizes(self, sizes: TrainSizes) -> Iterator[GenSizes]:
        """Yield the engine sizes that nest in the training sizes."""
        for pp_size in divisors(sizes.pp_size):
            for tp_size in divisors(sizes.tp_size):
                gen = GenSizes(pp_size, tp_size)
                if gen == (self.fixed_gen or gen) and not gen_problems(self._actor.shape, sizes, gen):
                    yield gen

    def _with_engine(self, plain: Option, gen: GenSizes) -> Option:
        workload, model, sizes = self.workload, self._actor, plain.sizes
        held, engine = self._held(model, sizes), self._engine(sizes, gen)
        elements = generation_holding(model.shape, sizes.pp_size, gen.pp_size, gen.tp_size).num_elements
        gen_bytes = elements * DTYPE_BYTES[workload.dtype]
        rows = max(call.num_rows for call in self._calls("actor") if call.work is Work.GENERATE)
        running = min(-(-rows * gen.num_ranks // sizes.num_ranks), workload.max_num_seqs)
        row_bytes = engine.row_bytes(workload.lengths, workload.prompt_tokens)
        blocks = 1 + math.ceil(workload.max_tokens / self.compute.kv_block_tokens)
        least_kv = blocks * engine.block_bytes
        kv_bytes = max(math.ceil(running * row_bytes) + engine.block_bytes, least_kv)
        option = replace(
            plain,
            engine=EngineOption(
                gen,
                gen_bytes,
                kv_bytes=kv_bytes,
                least_kv_bytes=least_kv,
                switch=self._least_switch(sizes, gen, held.weights_bytes, gen_bytes),
            ),
        )
        return self.with_cache(option, kv_bytes)

    def _engine(self, sizes: TrainSizes, gen: GenSizes) -> Engine:
        return Engine(
            self._actor.shape, gen, sizes.pp_size, self.workload.dtype, self.cluster, sizes.num_ranks
        )

    def _generate_s(self, sizes: TrainSizes, gen: GenSizes, call: Call, kv_bytes: int) -> float:
        workload, engine = self.workload, self._engine(sizes, gen)
        rows = -(-call.num_rows * gen.num_ranks // sizes.num_ranks)
        running = engine.num_running(
            workload.lengths, workload.prompt_tokens, workload.max_num_seqs, kv_bytes
        )
        key = (sizes.pp_size, sizes.num_ranks, gen, rows, running := min(running, rows))
        if key not in self._generations:
            self._generations[key] = engine.generate_s(
                rows, workload.prompt_tokens, workload.lengths, running
            )
        return self._generations[key] + self.compute.call_s

    def _least_switch(
        self, sizes: TrainSizes, gen: GenSizes, train_bytes: int, gen_bytes: int
    ) -> SwitchFigures:
        """Return a lower bound of the cost of a switch.

        It assumes one copy of the weights and fully used links; the links into a node carry the weights that none of its
        ranks holds.
        """
        links, received = self.cluster.links, max(0, gen_bytes - train_bytes)
        between, fastest, entering_s = links.between_nodes, links.same_node.bytes_per_s, 0.0
        if between is not None:
            fastest += between.bytes_per_s
            ranks = min(self.cluster.devices_per_node, sizes.num_ranks)
            # A tensor-parallel group is on one node, which therefore needs all t_g shards of some generation stage.
            entering = max(0.0, NOT_REPLICATED * gen.tp_size * gen_bytes - ranks * train_bytes)
            entering_s = entering / (between.node_bytes_per_s or ranks * between.bytes_per_s)
        return SwitchFigures(max(received / fastest, entering_s), 0.0, max(train_bytes, gen_bytes))

    def _switch(self, sizes: TrainSizes, gen: GenSizes) -> SwitchFigures:
        """Return the figures of a switch from its plan, cached.

        Only as many replicas are planned as differ in their position on the nodes; the others repeat them.
        """
        node = self.cluster.devices_per_node
        replicas = min(sizes.dp_size, node // math.gcd(sizes.model_parallel_size, node))
        key = (sizes.pp_size, sizes.tp_size, replicas, gen)
        if key not in self._switches:
            train = TrainSizes(sizes.pp_size, sizes.tp_size, replicas)
            cost = self._pricer.price(
                GenerationGrid(Grid(train), gen), self.cluster.node_map(train.num_ranks)
            )
            self._switches[key] = SwitchFigures(
                cost.seconds_there(self.cluster),
                cost.seconds_back(self.cluster),
                cost.peak_weight_bytes_max,
                cost.received_bytes_max,
            )
        return self._switches[key]

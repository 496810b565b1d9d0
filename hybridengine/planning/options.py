"""Which sizes a model can have on a number of ranks, how long its calls then take, and what memory it needs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

from hybridengine.model_shapes import DTYPE_BYTES
from hybridengine.planning.clusters import Cluster
from hybridengine.planning.dataflows import Call, Count, Work
from hybridengine.planning.decoding import Engine
from hybridengine.planning.layouts import gen_problems, train_problems
from hybridengine.planning.memory import TrainingMemory, activation_bytes, training_memory
from hybridengine.planning.option import EngineOption, Option, StateBytes, SwitchFigures, undominated
from hybridengine.planning.passes import ModelPasses, compute_of
from hybridengine.planning.shards import generation_holding
from hybridengine.planning.switch_cost import SwitchPricer
from hybridengine.planning.workload import PlannedModel, Workload
from hybridengine.topology.generation import GenerationGrid
from hybridengine.topology.grid import Grid
from hybridengine.topology.sizes import GenSizes, TrainSizes, divisors

MOST_OF_LINE_RATE = 3.0
"""A switch takes at most so many times what its bytes would take, and a second."""
NOT_REPLICATED = 0.98
"""Share of a generation shard that tensor parallelism divides, at least: norms are on every rank."""
MOST_BUCKETS = 1000
"""Of a switch, beside those that its bytes fill."""


def pricer_of(workload: Workload) -> SwitchPricer:
    """What prices switches of the workload's actor."""
    return SwitchPricer(workload.model("actor").shape, workload.dtype, workload.bucket_bytes)


class Options:
    """Options of the models of a workload on a cluster; each is worked out once.

    Args:
        fixed: sizes that a model must have, by name.
        fixed_gen: sizes that the engine must have.
        pricer: what knows switches already; from `pricer_of` the same workload.
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
        """Options of a model on so many ranks that nothing dominates; none where it cannot be there."""
        key = (name, num_ranks)
        if key not in self._found:
            model = self.workload.model(name)
            options = [
                option
                for sizes in self._train_sizes(model, num_ranks)
                for option in self._options(model, sizes)
            ]
            # Where pools share devices, a call that ends earlier may slow down another one, and nothing is surely better.
            self._found[key] = options if self.compute.devices_at_once else undominated(options)
        return self._found[key]

    def planned(self, option: Option) -> Option:
        """The option with what its switch's plan says."""
        engine = option.engine
        if engine is None or engine.is_planned:
            return option
        figures = self._switch(option.sizes, engine.sizes)
        figures = replace(
            figures, there_s=figures.there_s + engine.state_s, back_s=figures.back_s + engine.state_s
        )
        return replace(option, engine=replace(engine, least=figures, most=figures))

    def generating_seconds(self, option: Option, kv_bytes: int) -> Option:
        """The option with so much KV cache."""
        assert option.engine is not None, "the actor has an engine"
        seconds = list(option.seconds)
        for place, call in enumerate(self._calls("actor")):
            if call.work is Work.GENERATE:
                seconds[place] = self._generate_s(option.sizes, option.engine.sizes, call, kv_bytes)
            elif call.method == "switch_to_generate":
                filled_s = self._fill_s(kv_bytes, option.sizes.num_ranks)
                seconds[place] = self.compute.call_s + filled_s
        return replace(option, seconds=tuple(seconds))

    def _fill_s(self, num_bytes: int, num_ranks: int) -> float:
        """Until every rank has taken so much memory, where that takes time."""
        if self.compute.fill_bytes_per_s is None:
            return 0.0
        ranks = min(self.cluster.devices_per_node, num_ranks)
        return num_bytes / self.compute.fill_bytes_per_s * self.compute.waiting(ranks)

    def num_calls(self, name: str) -> int:
        return len(self._calls(name))

    def _calls(self, name: str) -> list[Call]:
        return [call for call in self.workload.calls if call.role == name]

    def _train_sizes(self, model: PlannedModel, num_ranks: int) -> Iterator[TrainSizes]:
        """Sizes that Megatron can have, tensor shards on one node, rows for every replica."""
        fixed = self.fixed.get(model.name)
        for parts in divisors(num_ranks):
            for tp_size in divisors(parts):
                sizes = TrainSizes(parts // tp_size, tp_size, num_ranks // parts)
                if num_ranks > self.workload.rank_rows.get(model.role, num_ranks):
                    continue
                if fixed is not None and sizes != fixed:
                    continue
                if tp_size > self.cluster.devices_per_node or not self._splits_evenly(model, sizes):
                    continue
                if not train_problems(model.shape, sizes):
                    yield sizes

    def _splits_evenly(self, model: PlannedModel, sizes: TrainSizes) -> bool:
        """Whether replicas have as many rows each in a mini-batch, as configurations demand; else some rows at all."""
        if model.name == "actor" and (self.workload.warmup_rows or 0) % sizes.dp_size:
            return False
        for call in self._calls(model.name):
            rows = self.workload.num_rows(call.count)
            if call.work is Work.UPDATE and rows % (sizes.dp_size * model.mini_batches):
                return False
            # ReMax's greedy responses are fewer, and some replicas may have none.
            if call.work is Work.INFER and call.count is not Count.PROMPTS and rows < sizes.dp_size:
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
        fetched_s = self._fetch_s(call, passes.sizes)
        if call.work not in (Work.INFER, Work.UPDATE):
            return self.compute.call_s + fetched_s
        micro = self.workload.micro_batches(model, call, passes.sizes.dp_size)
        if call.work is Work.INFER:
            done = passes.forward(micro)
        else:
            done = passes.update(
                micro, model.mini_batches, recompute=model.recompute, num_passes=model.ppo_epochs
            )
        return done.on(self.cluster, passes.sizes.num_ranks) + self.compute.call_s + fetched_s

    def _fetch_s(self, call: Call, sizes: TrainSizes) -> float:
        """Return the most seconds until a rank has its replica's rows from other ranks; where producer and consumer are
        alike nothing moves."""
        links, ranks = self.cluster.links, min(self.cluster.devices_per_node, sizes.num_ranks)
        link = links.same_node if links.between_nodes is None else links.between_nodes
        num_bytes = self.workload.row_bytes(call) * self.workload.num_rows(call.count) / sizes.dp_size
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
        whole = held.weights_bytes + held.gradients_bytes + held.optimizer_bytes
        idle = held.weights_bytes
        if model.name == "actor":
            idle = whole
        elif model.trains and not model.offloads:
            idle += held.optimizer_bytes
        update = whole + kept[Work.UPDATE] if model.trains else 0
        return StateBytes(idle, idle + kept[Work.INFER], update)

    def _held(self, model: PlannedModel, sizes: TrainSizes) -> TrainingMemory:
        return training_memory(model.shape, sizes, self.workload.dtype)

    def _gen_sizes(self, sizes: TrainSizes) -> Iterator[GenSizes]:
        """Sizes of engines that nest."""
        for pp_size in divisors(sizes.pp_size):
            for tp_size in divisors(sizes.tp_size):
                gen = GenSizes(pp_size, tp_size)
                if self.fixed_gen is not None and gen != self.fixed_gen:
                    continue
                if not gen_problems(self._actor.shape, sizes, gen):
                    yield gen

    def _with_engine(self, plain: Option, gen: GenSizes) -> Option:
        workload, model, sizes = self.workload, self._actor, plain.sizes
        held, engine = self._held(model, sizes), self._engine(sizes, gen)
        elements = generation_holding(model.shape, sizes.pp_size, gen.pp_size, gen.tp_size).num_elements
        gen_bytes = elements * DTYPE_BYTES[workload.dtype]
        rows = max(
            workload.num_rows(call.count) for call in self._calls("actor") if call.work is Work.GENERATE
        )
        running = min(-(-rows * gen.num_ranks // sizes.num_ranks), workload.max_num_seqs)
        row_bytes = engine.row_bytes(workload.lengths, workload.prompt_tokens)
        host = self.cluster.links.host
        moved_s = held.optimizer_bytes / host.bytes_per_s if model.offloads and host is not None else 0.0
        blocks = 1 + math.ceil(workload.max_tokens / self.compute.kv_block_tokens)
        least_kv = blocks * engine.block_bytes
        least, most = self._switch_bounds(sizes, gen, held.weights_bytes, gen_bytes)
        option = replace(
            plain,
            engine=EngineOption(
                gen,
                gen_bytes,
                state_bytes=0 if model.offloads else held.optimizer_bytes,
                state_s=moved_s,
                kv_bytes=max(math.ceil(running * row_bytes) + engine.block_bytes, least_kv),
                least_kv_bytes=least_kv,
                least=replace(least, there_s=least.there_s + moved_s, back_s=least.back_s + moved_s),
                most=replace(most, there_s=most.there_s + moved_s, back_s=most.back_s + moved_s),
            ),
        )
        assert option.engine is not None
        return self.generating_seconds(option, option.engine.kv_bytes)

    def _engine(self, sizes: TrainSizes, gen: GenSizes) -> Engine:
        return Engine(
            self._actor.shape, gen, sizes.pp_size, self.workload.dtype, self.cluster, sizes.num_ranks
        )

    def _generate_s(self, sizes: TrainSizes, gen: GenSizes, call: Call, kv_bytes: int) -> float:
        workload, engine = self.workload, self._engine(sizes, gen)
        rows = -(-workload.num_rows(call.count) * gen.num_ranks // sizes.num_ranks)
        running = engine.num_running(
            workload.lengths, workload.prompt_tokens, workload.max_num_seqs, kv_bytes
        )
        key = (sizes.pp_size, sizes.num_ranks, gen, rows, running := min(running, rows))
        if key not in self._generations:
            self._generations[key] = engine.generate_s(
                rows, workload.prompt_tokens, workload.lengths, running
            )
        return self._generations[key] + self.compute.call_s

    def _switch_bounds(
        self, sizes: TrainSizes, gen: GenSizes, train_bytes: int, gen_bytes: int
    ) -> tuple[SwitchFigures, SwitchFigures]:
        """The least and the most that a switch can cost.

        One copy of the weights, and all links busy all the time, those of a node with what none of its ranks holds; both
        shards at once, and a multiple of what its bytes take on the slowest links.
        """
        links, received = self.cluster.links, max(0, gen_bytes - train_bytes)
        remote = links.same_node
        if sizes.model_parallel_size > self.cluster.devices_per_node and links.between_nodes is not None:
            remote = links.between_nodes
        ranks = min(self.cluster.devices_per_node, sizes.num_ranks)
        # At worst nodes take turns, each sending what it holds to every other one.
        other_nodes = math.ceil(sizes.model_parallel_size / self.cluster.devices_per_node) - 1
        sent = max(received * ranks, train_bytes * sizes.model_parallel_size * other_nodes)
        line_s = remote.seconds(received, sent)
        copied = 2 * (gen_bytes + train_bytes)
        copied_s = links.same_device.seconds(copied, copied * ranks)
        fastest = links.same_node.bytes_per_s + (
            links.between_nodes.bytes_per_s if links.between_nodes else 0.0
        )
        least_s = received / fastest
        if (between := links.between_nodes) is not None:
            # A tensor-parallel group lies on a node, which therefore needs all t_g shards of some generation stage.
            entering = max(0.0, NOT_REPLICATED * gen.tp_size * gen_bytes - ranks * train_bytes)
            least_s = max(least_s, entering / (between.node_bytes_per_s or ranks * between.bytes_per_s))
        least = SwitchFigures(least_s, 0.0, max(train_bytes, gen_bytes))
        buckets = gen_bytes / self.workload.bucket_bytes + MOST_BUCKETS
        beside_s = buckets * sizes.model_parallel_size * self.compute.switch_bucket_s
        most = SwitchFigures(
            MOST_OF_LINE_RATE * (line_s + copied_s) + beside_s + 1.0,
            MOST_OF_LINE_RATE * copied_s + 1.0,
            train_bytes + gen_bytes + 2 * self.workload.bucket_bytes,
        )
        return least, most

    def _switch(self, sizes: TrainSizes, gen: GenSizes) -> SwitchFigures:
        """From the plan. Replicas repeat each other wherever they lie on nodes alike: no more of them are planned."""
        node = self.cluster.devices_per_node
        replicas = min(sizes.dp_size, node // math.gcd(sizes.model_parallel_size, node))
        key = (sizes.pp_size, sizes.tp_size, replicas, gen)
        if key not in self._switches:
            train = TrainSizes(sizes.pp_size, sizes.tp_size, replicas)
            cost = self._pricer.price(
                GenerationGrid(Grid(train), gen), self.cluster.node_map(train.num_ranks)
            )
            beside_s = cost.num_meetings * self.compute.switch_bucket_s
            self._switches[key] = SwitchFigures(
                cost.seconds_there(self.cluster) + beside_s,
                cost.seconds_back(self.cluster),
                cost.peak_weight_bytes_max,
                cost.received_bytes_max,
            )
        return self._switches[key]

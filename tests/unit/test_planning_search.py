"""The search, compared with trying everything on small clusters, and its parts with their definitions."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hybridengine.config.algorithm import ALGORITHMS, algorithm_class
from hybridengine.config.role_sections import MegatronSettings
from hybridengine.families.sizes import ExpertSizes
from hybridengine.models.presets import resolve_model
from hybridengine.models.shapes import ModelShape
from hybridengine.planning.costs.clusters import Cluster, load_cluster
from hybridengine.planning.costs.dataflows import HELPERS, Call, Work, calls_of
from hybridengine.planning.costs.lengths import Lengths
from hybridengine.planning.costs.workload import PlannedModel, Workload
from hybridengine.planning.search.options import Options
from hybridengine.planning.search.placements import allocations, placements, pool_sizes
from hybridengine.planning.search.plan import Plan, Schedule, phases
from hybridengine.planning.search.search import Search
from hybridengine.topology.fitting import train_problems
from hybridengine.topology.generation import GenerationGrid
from hybridengine.topology.grid import Grid
from hybridengine.topology.sizes import GenSizes, TrainSizes

A100 = load_cluster("configs/clusters/a100-80gb-16x8.yaml")
SMALL = ModelShape("llama", 4, 512, 1024, 8, 8, 64, 1024, 4096)


def cluster_of(nodes: int, devices: int, memory_bytes: int) -> Cluster:
    assert A100.compute is not None
    compute = A100.compute.model_dump() | {"process_bytes": 2**20}
    sizes = {"nodes": nodes, "devices_per_node": devices, "device_memory_bytes": memory_bytes}
    return Cluster.model_validate(A100.model_dump() | sizes | {"compute": compute})


def workload_of(algorithm: str, shape: ModelShape = SMALL, rows: int = 16, offloads: bool = True) -> Workload:
    """Return a workload with all roles, on models of one shape; rewards and costs are models too."""
    samples = 1 if algorithm in ("ppo", "safe_rlhf") else 2
    calls = calls_of(algorithm_class(algorithm)(), rows // samples, samples)
    roles = list(dict.fromkeys(call.role for call in calls if call.role not in HELPERS))
    judges = replace(shape, num_labels=1)
    models = tuple(
        PlannedModel(
            role,
            role,  # type: ignore[arg-type]
            shape if role in ("actor", "reference") else judges,
            4096,
            trains=role in ("actor", "critic", "cost_critic"),
            mini_batches=2 if role in ("actor", "critic") else 1,
            offload=("weights" if role == "reference" else "optimizer") if offloads else "none",
        )
        for role in sorted(roles, key=lambda role: role != "actor")
    )
    lengths = Lengths.of("uniform:1-512", 512)
    return Workload(
        algorithm, calls, models, rows // samples, samples, 256.0, lengths, 1024, 64, "bfloat16", 2**24
    )


@pytest.mark.parametrize(("count", "bell"), [(1, 1), (2, 2), (3, 5), (4, 15), (5, 52), (6, 203)])
def test_every_partition_of_the_models_once(count: int, bell: int) -> None:
    names = [f"m{number}" for number in range(count)]
    found = list(placements(names))
    assert len(found) == bell
    assert len({frozenset(map(frozenset, one)) for one in found}) == bell
    for one in found:
        assert sorted(itertools.chain(*one)) == names
        assert one[0][0] == "m0"


@pytest.mark.parametrize(("nodes", "node"), [(1, 8), (2, 4), (3, 2), (4, 1)])
@pytest.mark.parametrize("num_pools", [1, 2, 3])
def test_allocations_are_all_that_fill_the_devices(nodes: int, node: int, num_pools: int) -> None:
    cluster = cluster_of(nodes, node, 2**30)
    devices = nodes * node
    sizes = pool_sizes(cluster, devices)
    assert all(size % node == 0 or node % size == 0 for size in sizes)
    expected = {
        one
        for one in itertools.product(sizes, repeat=num_pools)
        if sum(one) == devices and sum(size for size in one if size < node) % node == 0
    }
    found = [tuple(one) for one in allocations(sizes, num_pools, devices, node).tolist()]
    assert set(found) == expected
    assert len(found) == len(expected)


@given(
    st.lists(st.tuples(st.integers(0, 2), st.floats(0, 10, width=32)), min_size=1, max_size=7),
    st.data(),
)
def test_calls_begin_when_their_rows_and_their_ranks_are_there(
    made: list[tuple[int, float]], data: st.DataObject
) -> None:
    """Compared with the longest path over both kinds of dependencies, path by path."""
    calls, seconds = [], {}
    for place, (_, own) in enumerate(made):
        reads = data.draw(st.sets(st.integers(0, place - 1))) if place else set()
        calls.append(Call(f"m{place}", "update", tuple(sorted(reads))))
        seconds[f"m{place}"] = [own]
    pools = [pool for pool, _ in made]

    def end(place: int) -> float:
        before = [
            other for other in range(place) if other in calls[place].reads or pools[other] == pools[place]
        ]
        return made[place][1] + max((end(other) for other in before), default=0.0)

    placement = [
        tuple(call.role for call, own in zip(calls, pools, strict=True) if own == pool) for pool in range(3)
    ]
    schedule = Schedule(calls, tuple(placement), 1.0)
    bars = schedule.bars(seconds)
    assert [bar.end_s for bar in bars] == pytest.approx([end(place) for place in range(len(calls))])
    assert schedule.step_s(seconds) == pytest.approx(max(end(place) for place in range(len(calls))))
    arrays = {name: [np.array([own[0], 2 * own[0]])] for name, own in seconds.items()}
    once = schedule.step_s(seconds)
    assert schedule.step_s(arrays, np.maximum).tolist() == pytest.approx([once, 2 * once])


def every_size(options: Options, name: str, num_ranks: int) -> list[TrainSizes]:
    """Return all sizes of a model, from the rules of runs alone."""
    model, node = options.workload.model(name), options.cluster.devices_per_node
    updates = [
        call.num_rows for call in options.workload.calls if (call.role, call.work) == (name, Work.UPDATE)
    ]
    found = []
    for p, t, d, c in itertools.product(range(1, num_ranks + 1), repeat=4):
        fits = p * t * d * c == num_ranks and t <= node and p <= model.shape.num_layers
        shared = not any(rows % (d * model.mini_batches) for rows in updates)
        if not (fits and shared and options.workload.rows_per_step >= d):
            continue
        blocks = [
            v for v in range(2, model.shape.num_layers + 1) if p > 1 and model.shape.num_layers % (p * v) == 0
        ]
        found += [TrainSizes(p, t, d, c, v) for v in (1, *blocks)]
    return found


every_size_of = every_size


def everything(options: Options, num_devices: int) -> dict[tuple, float]:
    """Return the least step time of every placement, over all sizes of pools and models, without pruning."""
    workload, cluster = options.workload, options.cluster
    assert cluster.compute is not None
    capacity = cluster.device_memory_bytes - (cluster.compute.process_bytes or 0)
    sizes = pool_sizes(cluster, num_devices)
    found: dict[tuple, float] = {}
    for placement in placements(tuple(workload.roles)):
        pool_of = {name: place for place, pool in enumerate(placement) for name in pool}
        schedule = Schedule(workload.calls, placement, cluster.compute.call_s)
        for ranks in itertools.product(sizes, repeat=len(placement)):
            whole = sum(size for size in ranks if size >= cluster.devices_per_node)
            parts = sum(size for size in ranks if size < cluster.devices_per_node)
            if whole - (-parts // cluster.devices_per_node * cluster.devices_per_node) > max(
                num_devices, parts
            ):
                continue
            if sum(ranks) > num_devices:
                continue
            names = [name for pool in placement for name in pool]
            choices = [
                [
                    options.planned(option)
                    for sizes_ in every_size_of(options, name, ranks[pool_of[name]])
                    for option in options._options(workload.model(name), sizes_)
                ]
                for name in names
            ]
            for chosen in itertools.product(*choices):
                seconds = {}
                for place in range(len(placement)):
                    here = [option for option in chosen if pool_of[option.model] == place]
                    idle = sum(option.memory.idle for option in here)
                    if idle + max(option.extra_bytes for option in here) > capacity:
                        break
                    for option in here:
                        if option.engine is not None:
                            others = (
                                idle - option.memory.idle + option.memory.generating + option.engine.gen_bytes
                            ) + option.engine.switch.retained_bytes
                            kv_bytes = min(option.engine.kv_bytes, capacity - others)
                            option = options.with_cache(option, kv_bytes)
                        seconds[option.model] = option.least_seconds
                else:
                    bars = schedule.bars(seconds)
                    step_s = max(bar.end_s for bar in bars)
                    found[placement] = min(step_s, found.get(placement, math.inf))
    return found


@pytest.mark.parametrize("algorithm", ["ppo", "grpo", "remax", "online_dpo"])
@pytest.mark.parametrize("memory_mib", [64, 160, 4096])
def test_nothing_is_better_than_what_the_search_finds(algorithm: str, memory_mib: int) -> None:
    """Memory ranges from too little for any plan, over amounts that decide between plans, to plenty."""
    cluster = cluster_of(2, 2, memory_mib * 2**20)
    options = Options(workload_of(algorithm, offloads=memory_mib != 160), cluster)
    found = Search(options, 4).run()
    assert found.exact
    expected = everything(options, 4)
    assert {plan.placement: plan.step_s for plan in found.plans} == pytest.approx(expected)
    assert [plan.step_s for plan in found.plans] == sorted(plan.step_s for plan in found.plans)
    for plan in found.plans:
        assert plan.headroom_bytes >= 0
        assert sum(pool.num_ranks for pool in plan.pools) <= 4


LONG = Lengths.of("constant:30000", 30_000)


def crowd_of(rows: int, lengths: Lengths, micro_batch_tokens: int, shape: ModelShape = SMALL) -> Workload:
    """Return a GRPO workload with rows of 256 tokens and a response; optimizer steps have half of the rows."""
    plain = workload_of("grpo", shape, rows)
    full = MegatronSettings(recompute="full")
    models = (replace(model, micro_batch_tokens=micro_batch_tokens, settings=full) for model in plain.models)
    return replace(plain, models=tuple(models), lengths=lengths, max_tokens=256 + lengths.max_tokens)


@pytest.mark.parametrize("nodes", [2, 4])
@pytest.mark.parametrize("memory_mib", [1200, 4096])
def test_nothing_is_better_for_few_long_rows(nodes: int, memory_mib: int) -> None:
    options = Options(crowd_of(4, LONG, 32_768), cluster_of(nodes, 4 // nodes, memory_mib * 2**20))
    found = Search(options, 4).run()
    assert {plan.placement: plan.step_s for plan in found.plans} == pytest.approx(everything(options, 4))
    assert any(
        option.sizes.cp_size > 1 for plan in found.plans for pool in plan.pools for option in pool.options
    )


def test_virtual_stages_win_with_pipelines_of_few_micro_batches() -> None:
    """The state of a 7B model needs two stages, and each of two replicas has two micro-batches in a step.

    Two stages are idle for one slot beside two, with v blocks for a v-th of one. Messages between them take little.
    """
    workload = crowd_of(16, Lengths.of("constant:512", 512), 2048, resolve_model("llama2-7b"))
    cluster, together = cluster_of(4, 1, 48 * 2**30), [(("actor", "reference", "reward"),)]
    (plan,) = Search(Options(workload, cluster), 4, together).run().plans
    actor = plan.option("actor")
    v = actor.sizes.virtual_stages
    assert actor.sizes == TrainSizes(2, 1, 2, 1, v) and v > 1
    plain = Options(workload, cluster, {"actor": TrainSizes(2, 1, 2)})
    (without,) = Search(plain, 4, together).run().plans
    assert plan.step_s < without.step_s

    def update_s(plan: Plan) -> float:
        option = plan.option("actor")
        return option.seconds[option.works.index(Work.UPDATE)]

    assert (2 + 1 / v) / (2 + 1) < update_s(plan) / update_s(without) < 0.9  # optimizer steps take as long


def test_context_ranks_win_with_very_long_rows() -> None:
    """A step has two rows of 30,000 tokens, so that the rows occupy two of four ranks; the others need another axis.

    Stages wait for each other, since a replica has one micro-batch. Tensor ranks exchange the hidden states of each
    layer four times, context ranks keys and values, which are a quarter as wide here.
    """
    grouped = replace(SMALL, num_kv_heads=2)
    workload, together = crowd_of(4, LONG, 32_768, grouped), [(("actor", "reference", "reward"),)]
    cluster = cluster_of(4, 1, 4 * 2**30)
    (plan,) = Search(Options(workload, cluster), 4, together).run().plans
    assert plan.option("actor").sizes == TrainSizes(1, 1, 2, 2)
    for other in ("2-1-2", "2-1-2 v=2", "4-1-1"):
        options = Options(workload, cluster, {"actor": TrainSizes.parse(other)})
        (worse,) = Search(options, 4, together).run().plans
        assert worse.step_s > plan.step_s


@pytest.mark.parametrize(
    "sizes",
    [
        "2-2-2 v=2",
        "2-1-2 v=4",
        "4-1-1 v=2",
        "3-1-2 v=2",
        "3-2-2 v=4",
        "2-4-1 c=2",
        "1-2-2 c=4",
        "2-2-1 c=6",
        "2-2-1 c=4 v=4",
    ],
)
@pytest.mark.parametrize("t_g", [1, 2])
def test_switches_that_share_their_figures(sizes: str, t_g: int) -> None:
    """The figures of the whole switch, planned with all of its ranks, against those of the sizes that stand for it."""
    train, gen = TrainSizes.parse(sizes), GenSizes(1, t_g)
    if train.tp_size % t_g:
        return
    shape = replace(SMALL, num_layers=24, num_kv_heads=4)
    options = Options(workload_of("grpo", shape), cluster_of(32, 4, 2**32))
    cost = options._pricer.price(GenerationGrid(Grid(train), gen), options.cluster.node_map(train.num_ranks))
    found = options._switch(train, gen)
    assert found.there_s == pytest.approx(cost.seconds_there(options.cluster), rel=1e-9)
    assert found.back_s == pytest.approx(cost.seconds_back(options.cluster), rel=1e-9)
    assert (found.peak_bytes, found.received_bytes) == (cost.peak_weight_bytes_max, cost.received_bytes_max)


def test_ranks_that_share_cores_are_not_split() -> None:
    cluster = cluster_of(1, 4, 2**32)
    assert cluster.compute is not None
    shared = cluster.model_copy(update={"compute": cluster.compute.model_copy(update={"devices_at_once": 2})})
    (plan,) = Search(Options(workload_of("ppo"), shared), 4).run().plans
    assert len(plan.pools) == 1


@settings(deadline=None, max_examples=20)
@given(st.sampled_from(sorted(ALGORITHMS)), st.integers(0, 3))
def test_a_plan_says_what_its_models_say(algorithm: str, which: int) -> None:
    assume(algorithm_class(algorithm).generates)  # others the planner refuses
    options = Options(workload_of(algorithm).synchronous(), cluster_of(2, 2, 2**32))
    only = [list(placements(tuple(options.workload.roles)))[which]]
    plans = Search(options, 4, only).run().plans
    assume(plans)
    (plan,) = plans
    assert isinstance(plan, Plan)
    for call, bar in zip(options.workload.calls, plan.bars, strict=True):
        assert bar.call is call
        if call.role not in HELPERS:
            calls = [other for other in options.workload.calls if other.role == call.role]
            place = next(place for place, other in enumerate(calls) if other is call)
            assert bar.seconds == pytest.approx(plan.option(call.role).least_seconds[place])
    assert sum(plan.phases_s.values()) == pytest.approx(sum(bar.seconds for bar in plan.bars))
    assert phases(plan.bars) == plan.phases_s
    engine = plan.option("actor").engine
    planned = options.planned(plan.option("actor")).engine
    assert engine is not None and planned is not None and engine.switch == planned.switch
    assert any(call.work is Work.GENERATE for call in options.workload.calls)


def test_the_fullest_moment_of_a_pool_has_the_cache_too() -> None:
    """Colocated PPO with more responses than there is room for: the cache takes the memory that the models leave."""
    crowd = replace(workload_of("ppo", rows=4096), max_num_seqs=4096)
    options = Options(crowd, cluster_of(1, 2, 2**30))
    (plan,) = Search(options, 2, [(("actor", "critic", "reference", "reward"),)]).run().plans
    (pool,) = plan.pools
    actor, idle = plan.option("actor"), sum(option.memory.idle for option in pool.options)
    engine = actor.engine
    assert engine is not None and engine.least_kv_bytes < pool.kv_bytes == engine.kv_bytes
    wanted = [option.engine for option in options.of("actor", 2) if option.sizes == actor.sizes]
    assert all(one is not None and pool.kv_bytes < one.kv_bytes for one in wanted)
    generating = idle - actor.memory.idle + actor.memory.generating + engine.gen_bytes + pool.kv_bytes
    assert pool.peak_bytes == generating + 2**20 == 2**30
    assert plan.headroom_bytes == 0


def test_passes_over_the_rows_and_the_rows_that_are_fetched_take_time() -> None:
    plain = workload_of("ppo")
    twice = replace(plain, models=tuple(replace(model, ppo_epochs=2) for model in plain.models))
    cluster = cluster_of(1, 2, 2**40)
    assert cluster.links.between_nodes is not None and cluster.compute is not None
    slow = cluster.links.between_nodes.model_copy(update={"bytes_per_s": 1e6, "node_bytes_per_s": None})
    slower = cluster.model_copy(update={"links": cluster.links.model_copy(update={"between_nodes": slow})})

    def update_s(workload: Workload, cluster: Cluster, name: str = "critic") -> float:
        (option,) = Options(workload, cluster, {name: TrainSizes(1, 1, 2)}).of(name, 2)
        return option.least_seconds[option.works.index(Work.UPDATE)]

    # Rows are fetched once, however many passes are made over them.
    fetched = update_s(plain, slower) - update_s(plain, cluster)
    call = next(call for call in plain.calls if call.role == "critic" and call.work is Work.UPDATE)
    assert (
        plain.row_bytes(call) == 1024 * 8 + 2 * 512 * 4
    )  # tokens, values and returns; the lengths are negligible
    assert fetched == pytest.approx(16 / 2 * plain.row_bytes(call) / 1e6, rel=0.02)
    own = update_s(plain, slower) - 16 / 2 * plain.row_bytes(call) / 1e6 - cluster.compute.call_s
    assert update_s(twice, slower) - update_s(plain, slower) == pytest.approx(own, rel=0.02)


@pytest.mark.parametrize("algorithm", ["ppo", "safe_rlhf"])
def test_who_wants_fewer_plans_gets_the_best_ones(algorithm: str) -> None:
    options = Options(workload_of(algorithm), cluster_of(2, 2, 2**32))
    every = Search(options, 4).run()
    for num_best in (1, 3):
        found = Search(options, 4, num_best=num_best).run()
        assert found.exact and found.num_placements == every.num_placements
        assert [plan.step_s for plan in found.plans] == [plan.step_s for plan in every.plans[:num_best]]
        assert found.num_solved < every.num_solved


@pytest.mark.parametrize(("model", "num_ranks"), [("llama2-7b", 8), ("qwen2.5-7b", 32)])
def test_bounds_of_switches_hold(model: str, num_ranks: int) -> None:
    """The costs from a switch's plan are at least the bounds that replace them, on one node and over several."""
    shallow = replace(resolve_model(model), num_layers=8)  # planning time is proportional to layers
    options = Options(workload_of("grpo", shallow, rows=512), A100)
    checked = 0
    for sizes in options._train_sizes(options.workload.model("actor"), num_ranks):
        plain = (sizes.cp_size, sizes.virtual_stages) in ((1, 1), (1, 2), (2, 1))
        if sizes.dp_size > 2 or not plain or (num_ranks == 8 and sizes.pp_size > 4):
            continue
        every = list(options._options(options.workload.model("actor"), sizes))
        for option in every[:: {8: 2, 32: 6, 64: 18}[num_ranks]]:  # plans of many ranks take a while
            planned = options.planned(option).engine
            assert option.engine is not None and planned is not None
            least, found = option.engine.switch, planned.switch
            for name in ("there_s", "back_s", "peak_bytes"):
                assert getattr(least, name) <= getattr(found, name), (sizes, option.engine.sizes, name)
            checked += least.there_s > 0.1 * found.there_s > 0
    assert checked, "no bound is worth anything"


MIXED = ModelShape("qwen3_moe", 2, 256, 256, 4, 2, 64, 1024, 4096, experts=ExpertSizes(4, 2, 256))


def every_mixed_size(options: Options, name: str, num_ranks: int) -> list[TrainSizes]:
    """Return all sizes with all parts and shards of experts."""
    ranks = range(1, num_ranks + 1)
    return [
        replace(sizes, expert_parts=parts, expert_shards=shards)
        for sizes in every_size(options, name, num_ranks)
        for parts, shards in itertools.product(ranks, ranks)
        if num_ranks // sizes.pp_size % (parts * shards) == 0 and 4 % parts == 0
        if not train_problems(MIXED, replace(sizes, expert_parts=parts, expert_shards=shards))
    ]


@pytest.mark.parametrize("memory_mib", [64, 4096])
def test_nothing_is_better_for_a_mixture(memory_mib: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts and shards of experts that the search leaves out are tried here."""
    monkeypatch.setitem(everything.__globals__, "every_size_of", every_mixed_size)
    options = Options(workload_of("grpo", MIXED), cluster_of(2, 2, memory_mib * 2**20))
    found = Search(options, 4).run()
    expected = everything(options, 4)
    assert {plan.placement: plan.step_s for plan in found.plans} == pytest.approx(expected)
    if memory_mib == 64:
        assert any(
            option.sizes.expert_parts > 1
            for plan in found.plans
            for pool in plan.pools
            for option in pool.options
        )

"""Plans carried out on numpy arrays, bucket by bucket, message by message: every nested pair of layouts on up to 8
ranks, sizes that do not nest, and layouts that no grid describes."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridengine.errors import PlanError
from hybridengine.families.family import NameSet
from hybridengine.models.shapes import ModelShape
from hybridengine.reshard.audit import audit, audit_return
from hybridengine.reshard.boxes import num_elements
from hybridengine.reshard.compiler import compile_plan, inverse_local
from hybridengine.reshard.cost import plan_costs
from hybridengine.reshard.layout import Layout, LocalParameter, Shard, hf_layout, row_stack
from hybridengine.reshard.megatron import megatron_layout
from hybridengine.reshard.vllm import vllm_layout
from hybridengine.topology.generation import GenerationGrid, Grouping
from hybridengine.topology.grid import Grid
from hybridengine.topology.links import NodeMap
from hybridengine.topology.sizes import GenSizes, TrainSizes
from tests.unit.numpy_shards import (
    assert_same,
    cut_shard,
    numbered,
    small_shape,
)
from tests.unit.plan_cases import (
    FEW,
    FLOAT32,
    GENERAL,
    Case,
    elements,
    every_nested_pair,
    execute,
    fitting_shape,
    peak_bound,
)

ROOT = Path(__file__).parents[2]


@every_nested_pair
def test_switch_and_return_for_every_nested_pair(case: Case) -> None:
    """To generation: each rank's generation shard. Back: its training shard, without the network. Costs as counted."""
    tensors = numbered(case.shape)
    for plan in case.plans():
        training = {rank: case.training(rank) for rank in plan.ranks}
        before = {rank: elements(training[rank]) for rank in plan.ranks}
        received = Counter(dict.fromkeys(plan.ranks, 0))
        for move in plan.moves:
            if not move.is_local:
                receiver = move.destination.rank
                box = tensors[move.tensor][tuple(slice(a, b) for a, b in move.box)]
                assert not np.isin(box, before[receiver]).any(), f"{move}: rank {receiver} holds it already"
                received[receiver] += move.num_elements
        generating, costs = execute(plan, training), plan_costs(plan, FLOAT32)
        for rank in plan.ranks:
            assert_same(generating[rank], case.generating(rank), f"{case} rank {rank}")
            assert training[rank] == {}, f"{case} rank {rank} keeps training weights"
            missing = np.setdiff1d(elements(generating[rank]), before[rank])
            assert received[rank] == len(missing)
            assert costs[rank].received_bytes == FLOAT32 * len(missing)
            assert costs[rank].redundant_bytes == costs[rank].extra_bytes == 0

        back = inverse_local(plan)
        assert all(move.is_local for move in back.moves)
        restored, costs = execute(back, generating), plan_costs(back, FLOAT32)
        for rank in plan.ranks:
            assert_same(restored[rank], case.training(rank), f"{case} rank {rank}, back")
            assert generating[rank] == {}, f"{case} rank {rank} keeps generation weights"
            assert costs[rank].received_bytes == costs[rank].redundant_bytes == 0


@pytest.mark.parametrize(
    ("case", "direct_elements"),
    [(case, (1, 24, 10**9)[turn % 3]) for turn, case in enumerate(GENERAL)],
    ids=str,
)
def test_switch_and_return_for_layouts_that_need_not_nest(case: Case, direct_elements: int) -> None:
    """To generation: the generation shard, complete, and what is retained. Back: the rest of the training shard."""
    nodes = NodeMap.uniform(case.grid.num_ranks, 2)
    for plan in case.plans(300, nodes, direct_elements=direct_elements):
        training = {rank: case.training(rank) for rank in plan.ranks}
        generating = execute(plan, training)
        for rank in plan.ranks:
            assert_same(generating[rank], case.generating(rank), f"{case} rank {rank}")
            assert list(training[rank]) == [
                name for name in case.training(rank) if name in plan.retained(rank)
            ]
            needed = elements(generating[rank])
            for name, values in case.training(
                rank
            ).items():  # only parameters that the rank could not cut back out are retained
                inside = np.isin(values[values > 0], needed).all()
                assert (name in plan.retained(rank)) == (not inside), f"{case} rank {rank} {name}"
        restored = execute(inverse_local(plan), generating)
        for rank in plan.ranks:
            assert not set(restored[rank]) & set(training[rank])
            assert_same(restored[rank] | training[rank], case.training(rank), f"{case} rank {rank}, back")
            assert generating[rank] == {}, f"{case} rank {rank} keeps generation weights"


def sized_nodes(num_ranks: int) -> st.SearchStrategy[NodeMap]:
    """Return a strategy for nodes of any sizes with at least `num_ranks` ranks."""
    sizes = st.lists(st.integers(1, num_ranks), min_size=1, max_size=num_ranks)
    return sizes.filter(lambda found: sum(found) >= num_ranks).map(lambda found: NodeMap(tuple(found)))


@given(st.sampled_from(FEW + GENERAL), st.data())
@settings(max_examples=20, deadline=None)
def test_switch_over_any_nodes(case: Case, data: st.DataObject) -> None:
    """On any nodes, in one step or in two, every rank ends with its shard, and the plan passes its audit."""
    nodes = data.draw(sized_nodes(case.grid.num_ranks))
    two_step, direct = data.draw(st.booleans()), data.draw(st.sampled_from((1, 50, 10**9)))
    for plan in case.plans(data.draw(st.integers(1, 3000)), nodes, two_step, direct):
        made = execute(plan, {rank: case.training(rank) for rank in plan.ranks})
        for rank in plan.ranks:
            assert_same(made[rank], case.generating(rank), f"{case} {nodes} rank {rank}")
        assert audit(plan) == [] and audit_return(plan, inverse_local(plan)) == []


@pytest.mark.parametrize(
    ("train", "gen"), [("1-4-1", "1-4"), ("1-4-1", "1-2"), ("2-4-1", "1-1"), ("1-8-1", "1-8")]
)
@pytest.mark.parametrize("tied", [False, True])
def test_shares_of_padding_only_appear_and_vanish_like_others(train: str, gen: str, tied: bool) -> None:
    """131 rows, padded to 192, over 4 ranks: the last rank's share, rows 144 to 191, holds no weight at all."""
    case = Case(small_shape(tied=tied, vocab=131, kv_heads=8), train, gen)
    for plan in case.plans():
        held = {rank: case.training(rank) for rank in plan.ranks}
        made = execute(plan, held)
        for rank in plan.ranks:
            assert_same(made[rank], case.generating(rank), f"{case} rank {rank}")
            assert held[rank] == {}, f"rank {rank} keeps training weights"
        restored = execute(inverse_local(plan), made)
        for rank in plan.ranks:
            assert_same(restored[rank], case.training(rank), f"{case} rank {rank}, back")
            assert made[rank] == {}, f"rank {rank} keeps generation weights"


@pytest.mark.parametrize(("train", "family", "tied"), [("2-2-1", "qwen2", True), ("1-4-1", "qwen3", False)])
def test_load_and_export_are_the_identity(train: str, family: str, tied: bool) -> None:
    shape = small_shape(family, tied=tied)
    case = Case(shape, train, "1-1")
    megatron, tensors = megatron_layout(shape, case.grid), numbered(shape)
    load = compile_plan(hf_layout(shape, (0,)), megatron, range(4), bucket_elements=300)
    loaded = execute(load, {0: dict(tensors), **{rank: {} for rank in (1, 2, 3)}})
    for rank in range(4):
        held = {name: values for name, values in case.training(rank).items() if values.any()}
        assert_same({name: loaded[rank][name] for name in held}, held, f"rank {rank}")
    export = compile_plan(megatron, hf_layout(shape, (0,)), range(4), bucket_elements=300)
    assert_same(execute(export, loaded)[0], tensors, "exported")


@st.composite
def row_layouts(draw: st.DrawFn, shape: ModelShape, num_ranks: int, kind: str) -> Layout:
    """Return a layout with each tensor cut into rows at random, and every range on one to three ranks."""
    parameters: dict[int, list[LocalParameter]] = {rank: [] for rank in range(num_ranks)}
    for tensor, size in shape.tensors.items():
        cuts = sorted(draw(st.sets(st.integers(1, size[0] - 1), max_size=3))) if size[0] > 1 else []
        for index, rows in enumerate(zip([0, *cuts], [*cuts, size[0]], strict=True)):
            for rank in draw(st.sets(st.integers(0, num_ranks - 1), min_size=1, max_size=3)):
                parameters[rank].append(row_stack(f"{tensor}.{index}", [(tensor, size, rows)]))
    shards = {(rank,): Shard(tuple(found)) for rank, found in parameters.items()}
    return Layout(shape, {rank: (rank,) for rank in parameters}, shards, kind=kind)


RANDOM_SHAPE = small_shape("qwen2", layers=1, vocab=7, kv_heads=1)


@given(
    row_layouts(RANDOM_SHAPE, 4, "one"),
    row_layouts(RANDOM_SHAPE, 4, "other"),
    st.integers(1, 500),
    st.none() | sized_nodes(4),
    st.sampled_from((1, 10, 10**9)),
)
@settings(max_examples=20, deadline=None)
def test_plans_between_random_layouts(
    source: Layout, destination: Layout, bucket_elements: int, nodes: NodeMap | None, direct_elements: int
) -> None:
    """Layouts that no grid describes: destinations are exact, and no rank receives elements that it holds."""
    tensors = numbered(RANDOM_SHAPE)
    plan = compile_plan(
        source, destination, range(4), bucket_elements, nodes, direct_elements=direct_elements
    )
    assert audit(plan) == [] and audit_return(plan, inverse_local(plan)) == []
    costs = plan_costs(plan, 1)
    before = {rank: elements(cut_shard(source.shard(rank), tensors)) for rank in range(4)}
    made = execute(plan, {rank: cut_shard(source.shard(rank), tensors) for rank in range(4)})
    for rank in range(4):
        expected = cut_shard(destination.shard(rank), tensors)
        assert_same(made[rank], expected, f"rank {rank}")
        missing = np.setdiff1d(elements(expected), before[rank])
        assert costs[rank].received_bytes == len(missing)
        assert costs[rank].peak_bytes <= peak_bound(costs[rank])


PRINT_DIGESTS = """
from tests.unit.plan_cases import FEW
print([plan.digest for case in FEW[::5] for plan in case.plans()])
"""


def test_every_process_compiles_the_same_plan() -> None:
    """The other process hashes with another seed."""
    printed = subprocess.run(
        [sys.executable, "-c", PRINT_DIGESTS],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": str(ROOT)},
    ).stdout.strip()
    assert printed == str([plan.digest for case in FEW[::5] for plan in case.plans()])


def test_equal_plans_and_only_they_have_equal_digests() -> None:
    shape = fitting_shape("qwen3", False, 2, 2)
    generation = GenerationGrid(Grid(TrainSizes(2, 2, 1)), GenSizes(1, 1))
    source, destination = megatron_layout(shape, generation.train), vllm_layout(shape, generation)
    one = compile_plan(source, destination, tuple(range(4)), 400)
    assert compile_plan(source, destination, (0, 1, 2, 3), 400) is one
    again = compile_plan(dataclasses.replace(source), destination, range(4), 400)  # another layout object
    assert again is not one
    assert one == again and hash(one) == hash(again) and one.digest == again.digest
    assert len(one.digest) == 64
    narrower = vllm_layout(shape, GenerationGrid(generation.train, GenSizes(1, 2)))
    fused = megatron_layout(shape, generation.train, NameSet.TRANSFORMER_ENGINE)
    others = [
        compile_plan(source, destination, range(4), 300),
        compile_plan(source, narrower, range(4), 400),
        compile_plan(fused, destination, range(4), 400),
        compile_plan(destination, source, range(4), 400),
        inverse_local(one),
        compile_plan(source, destination, range(4), 400, NodeMap.uniform(4, 2)),
        compile_plan(source, destination, range(4), 400, direct_elements=1),
    ]
    assert len({plan.digest for plan in [one, *others]}) == 8
    assert one == compile_plan(source, destination, range(4), 400, NodeMap.uniform(4, 4), two_step=False)
    assert one != others[0] and one != "plan"


def test_a_plan_prints_its_layouts_and_its_size() -> None:
    case = Case(fitting_shape("llama", False, 1, 2), "1-2-1", "1-1")
    (plan,) = case.plans(10**9)
    remote = [move for move in plan.moves if not move.is_local]
    received = sum(num_elements(move.box) for move in remote)
    assert str(plan) == (
        f"megatron 1-2-1 -> vllm 1-1 among ranks [0, 1]: 1 buckets, {len(list(plan.moves))} moves,"
        f" {len(remote)} between ranks, {received} elements received"
    )


def test_vanilla_grouping_cannot_return_without_the_network() -> None:
    shape = fitting_shape("llama", False, 1, 4)
    vanilla = GenerationGrid(Grid(TrainSizes(1, 4, 1)), GenSizes(1, 2), Grouping.VANILLA)
    source, destination = megatron_layout(shape, vanilla.train), vllm_layout(shape, vanilla)
    plan = compile_plan(source, destination, range(4))  # the whole replica can switch
    made = execute(plan, {rank: cut_shard(source.shard(rank), numbered(shape)) for rank in range(4)})
    for rank in range(4):
        assert_same(made[rank], cut_shard(destination.shard(rank), numbered(shape)), f"rank {rank}")
    assert all(move.is_local for move in inverse_local(plan).moves)


def test_a_domain_without_a_whole_model_is_refused() -> None:
    shape = fitting_shape("llama", False, 1, 4)
    generation = GenerationGrid(Grid(TrainSizes(1, 4, 1)), GenSizes(1, 2), Grouping.VANILLA)
    assert generation.micro_dp_groups[0] == (0, 2)
    with pytest.raises(
        PlanError,
        match=r"^model\.embed_tokens\.weight\[\(64, 128\), \(0, 6\)\], which rank 0 needs for"
        r" model\.embed_tokens\.weight, is held by no rank of megatron 1-4-1 in the domain; the domain must hold"
        r" a whole model$",
    ):
        compile_plan(megatron_layout(shape, generation.train), vllm_layout(shape, generation), (0, 2))


def test_plans_connect_layouts_of_one_model() -> None:
    one, other = hf_layout(small_shape(layers=2)), hf_layout(small_shape(layers=3))
    with pytest.raises(PlanError, match=r"^layouts hugging face and hugging face describe different models"):
        compile_plan(one, other, (0,))


def test_paddings_that_do_not_nest_are_refused_before_the_switch() -> None:
    """t=6 pads 100 rows to 192, the engine pads them to 128: a third of 64 rows is not 32 rows of 6."""
    case = Case(small_shape(vocab=100, kv_heads=6), "1-6-1", "1-2")
    with pytest.raises(
        PlanError,
        match=r"^t=6 does not divide 128, which is vocab_size=100 .*choose t_g from 1$",
    ):
        case.plans()


@pytest.mark.parametrize(
    ("ranks", "bucket", "words"), [((), 8, "ranks"), ((99,), 8, "ranks"), ((0,), 0, "bucket")]
)
def test_arguments_of_a_plan_that_cannot_be(ranks: tuple[int, ...], bucket: int, words: str) -> None:
    shape = ModelShape.from_folder("configs/models/smollm2-135m-instruct.json")
    layout = hf_layout(shape)
    with pytest.raises(PlanError, match=f"{words}.* must be"):
        compile_plan(layout, layout, ranks, bucket)


def test_a_bucket_has_one_type() -> None:
    """Expert biases stay in float32 in a bfloat16 model, and messages and staging are of one type."""
    shape, grid = small_shape("deepseek_v3", layers=3), Grid(TrainSizes.parse("2-2-1 e=2 etp=1"))
    engines = vllm_layout(shape, GenerationGrid(grid, GenSizes.parse("1-2 e=2")))
    plan = compile_plan(megatron_layout(shape, grid), engines, tuple(range(4)), 10**9)
    kinds = [{name.endswith("_correction_bias") for name in bucket.tensors} for bucket in plan.buckets]
    assert {True} in kinds and {False} in kinds and {True, False} not in kinds
    audit(plan)

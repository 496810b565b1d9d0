"""Plans carried out on numpy arrays, bucket by bucket, for every nested pair of layouts on up to 8 ranks."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridengine.errors import PlanError
from hybridengine.model_shapes import ModelShape
from hybridengine.reshard.boxes import num_elements
from hybridengine.reshard.cost import rank_cost
from hybridengine.reshard.hf import hf_layout
from hybridengine.reshard.layout import Layout, LocalParameter, Shard, row_stack, whole
from hybridengine.reshard.megatron import NameSet, megatron_layout
from hybridengine.reshard.plan import Move, Place, Plan
from hybridengine.reshard.planner import check_local_return, compile_plan, fused_groups, inverse_local
from hybridengine.reshard.vllm import vllm_layout
from hybridengine.topology.generation import GenerationGrid, Grouping
from hybridengine.topology.grid import Grid, RankOrder
from hybridengine.topology.sizes import GenSizes, TrainSizes
from tests.unit.numpy_shards import (
    Arrays,
    assert_same,
    cut_shard,
    megatron_reference,
    numbered,
    small_shape,
    vllm_reference,
)

FAMILIES = ("llama", "qwen2", "qwen3")
FLOAT32 = 4
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Case:
    """A model under a training and a generation layout, and what its ranks must hold in both."""

    shape: ModelShape
    train: str
    gen: str
    order: RankOrder = RankOrder.PAPER

    @property
    def grid(self) -> Grid:
        return Grid(TrainSizes.parse(self.train), self.order)

    @property
    def generation(self) -> GenerationGrid:
        return GenerationGrid(self.grid, GenSizes.parse(self.gen))

    def plans(self, bucket_elements: int = 400) -> list[Plan]:
        """One plan for every micro-DP group."""
        source, destination = megatron_layout(self.shape, self.grid), vllm_layout(self.shape, self.generation)
        return [
            compile_plan(source, destination, group, bucket_elements)
            for group in self.generation.micro_dp_groups
        ]

    def training(self, rank: int) -> Arrays:
        """Reference: the parameters of `rank` while training."""
        place, sizes = self.grid.coordinate(rank), self.grid.sizes
        tensors = numbered(self.shape)
        return megatron_reference(
            self.shape, tensors, place.pp_rank, sizes.pp_size, place.tp_rank, sizes.tp_size
        )

    def generating(self, rank: int) -> Arrays:
        """Reference: the parameters of `rank` while generating."""
        p, gen, place = self.grid.sizes.pp_size, self.generation.sizes, self.generation.coordinate(rank)
        tensors = numbered(self.shape)
        return vllm_reference(self.shape, tensors, place.pp_rank, p, gen.pp_size, place.tp_rank, gen.tp_size)

    def __str__(self) -> str:
        tied = "tied" if self.shape.tied_embeddings else "untied"
        return f"{self.shape.family} {tied} {self.train} -> {self.gen} {self.order.value}"


def fitting_shape(family: str, tied: bool, p: int, t: int) -> ModelShape:
    """A model that t shards: uneven stages, a padded vocabulary that no degree divides and no empty share."""
    kv_heads = t if t in (3, 5, 6, 7, 8) else 4
    return small_shape(family, tied=tied, vocab=64 * t - 3, layers=p + (p > 1), kv_heads=kv_heads)


def nested_cases() -> list[Case]:
    """Every nested pair on up to 8 ranks; families, ties and rank orders take turns."""
    cases: list[Case] = []
    counts = range(1, 9)
    for p, t, d in (sizes for sizes in product(counts, repeat=3) if math.prod(sizes) <= 8):
        for p_g, t_g in product(range(1, p + 1), range(1, t + 1)):
            if p % p_g == 0 and t % t_g == 0:
                turn = len(cases)
                shape = fitting_shape(FAMILIES[turn % 3], turn % 2 == 0, p, t)
                cases.append(Case(shape, f"{p}-{t}-{d}", f"{p_g}-{t_g}", list(RankOrder)[turn // 2 % 2]))
    return cases


CASES = nested_cases()
every_nested_pair = pytest.mark.parametrize("case", CASES, ids=str)
FEW = [
    Case(fitting_shape(family, tied, p, t), f"{p}-{t}-1", gen)
    for family, tied in product(FAMILIES, (False, True))
    for p, t, gen in ((2, 2, "1-1"), (1, 4, "1-2"), (4, 2, "2-1"), (2, 4, "2-2"), (2, 4, "1-4"))
]


def at(place: Place, move: Move) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(place.offset, move.shape, strict=True))


def execute(plan: Plan, held: dict[int, Arrays]) -> dict[int, Arrays]:
    """Carry out a plan as ranks would: a parameter appears, and vanishes, with the bucket that says so.

    `held` loses what the plan releases. A move from or to a parameter without memory is a KeyError.

    Raises:
        AssertionError: an element is written twice, or a filled parameter had appeared before.
    """
    made: dict[int, Arrays] = {rank: {} for rank in plan.ranks}
    shapes = {
        rank: {name: parameter.shape for name, parameter in plan.destination.shard(rank).named().items()}
        for rank in plan.ranks
        if rank in plan.destination.keys
    }
    for bucket in plan.buckets:
        for rank, names in bucket.destinations.items():
            for name in names:
                assert name not in made[rank], f"rank {rank} fills {name} in two buckets"
                made[rank][name] = np.zeros(shapes[rank][name], dtype=np.int64)
        for move in bucket.moves:
            source, target = move.source, move.destination
            box = held[source.rank][source.parameter][at(source, move)]
            there = made[target.rank][target.parameter][at(target, move)]
            assert box.shape == there.shape == move.shape, move
            assert box.all(), f"{move} carries padding"
            assert not there.any(), f"{move} writes what another move has written"
            there[...] = box
        for rank, names in bucket.sources.items():
            for name in names:
                del held[rank][name]
    return made


def elements(local: Arrays) -> np.ndarray:
    """Numbers of all elements that a rank holds, without padding."""
    return np.unique(np.concatenate([values.ravel() for values in local.values()] + [np.array([0])]))[1:]


@every_nested_pair
def test_switch_and_return_for_every_nested_pair(case: Case) -> None:
    """There: each rank's generation shard, whole. Back: its training shard, without the network. Costs as counted."""
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
        generating = execute(plan, training)
        for rank in plan.ranks:
            assert_same(generating[rank], case.generating(rank), f"{case} rank {rank}")
            assert training[rank] == {}, f"{case} rank {rank} keeps training weights"
            missing = np.setdiff1d(elements(generating[rank]), before[rank])
            assert received[rank] == len(missing)
            assert rank_cost(plan, rank, FLOAT32).received_bytes == FLOAT32 * len(missing)

        back = inverse_local(plan)
        assert all(move.is_local for move in back.moves)
        restored = execute(back, generating)
        for rank in plan.ranks:
            assert_same(restored[rank], case.training(rank), f"{case} rank {rank}, back")
            assert generating[rank] == {}, f"{case} rank {rank} keeps generation weights"
            assert rank_cost(back, rank, FLOAT32).received_bytes == 0


@pytest.mark.parametrize("bucket_elements", [1, 400, 10**9])
@pytest.mark.parametrize("case", FEW, ids=str)
def test_costs_are_within_zero_redundancy(case: Case, bucket_elements: int) -> None:
    for plan in case.plans(bucket_elements):
        there = {rank: rank_cost(plan, rank, FLOAT32) for rank in plan.ranks}
        assert sum(cost.sent_bytes for cost in there.values()) == sum(
            cost.received_bytes for cost in there.values()
        )
        for rank, cost in there.items():
            training = sum(values.size for values in case.training(rank).values()) * FLOAT32
            generating = sum(values.size for values in case.generating(rank).values()) * FLOAT32
            assert (cost.source_bytes, cost.destination_bytes) == (training, generating)
            largest = max(
                sum(case.generating(rank)[name].size for name in bucket.destinations[rank])
                for bucket in plan.buckets
            )
            assert cost.bucket_bytes == largest * FLOAT32
            assert cost.peak_bound_bytes == max(training, generating) + cost.bucket_bytes
            assert max(training, generating) <= cost.peak_bytes <= cost.peak_bound_bytes
            back = rank_cost(inverse_local(plan), rank, FLOAT32)
            assert (back.received_bytes, back.sent_bytes) == (0, 0)
            assert (back.source_bytes, back.destination_bytes) == (generating, training)
            assert max(training, generating) <= back.peak_bytes <= back.peak_bound_bytes


def test_peak_of_one_bucket_counts_both_shards_and_the_arriving_bytes() -> None:
    """1-2-1 -> 1-1 in one bucket: the half that is held, the whole that appears, the half that arrives."""
    case = Case(fitting_shape("llama", False, 1, 2), "1-2-1", "1-1")
    (plan,) = case.plans(10**9)
    assert len(plan.buckets) == 1
    for rank in (0, 1):
        held, appears = (
            sum(values.size for values in local.values())
            for local in (case.training(rank), case.generating(rank))
        )
        arrives = len(np.setdiff1d(elements(case.generating(rank)), elements(case.training(rank))))
        assert rank_cost(plan, rank, 1).peak_bytes == held + arrives + appears


def replica_received(case: Case) -> int:
    """Elements received by all ranks of the first training replica."""
    replica = case.grid.groups("pp", "tp")[0]
    return sum(
        rank_cost(plan, rank, 1).received_bytes
        for plan in case.plans()
        for rank in plan.ranks
        if rank in replica
    )


def table_2_total(case: Case) -> int:
    """Elements a replica receives by table 2, times p·t: (d_g - 1)·M for what is sharded.

    Two things are held more often than the table's M knows: norms, by all t ranks of a stage, so that they travel
    between stages only; and a tied embedding, by the first and by the last stage.
    """
    shape, sizes, gen = case.shape, case.grid.sizes, case.generation.sizes
    p, t, p_g, t_g = sizes.pp_size, sizes.tp_size, gen.pp_size, gen.tp_size
    norms = sum(math.prod(size) for name, size in shape.tensors.items() if "norm" in name)
    tied = shape.vocab_size * shape.hidden_size if shape.tied_embeddings else 0
    sharded = shape.num_parameters - norms - tied
    joined = p // p_g * t // t_g  # ranks that hold one generation shard
    if p_g > 1:
        embedding = 2 * (joined - 1)
    else:
        embedding = joined - (2 if p > 1 else 1)
    return (joined - 1) * sharded + (p // p_g - 1) * t * norms + embedding * tied


@pytest.mark.parametrize("case", CASES + FEW, ids=str)
def test_received_bytes_are_those_of_table_2(case: Case) -> None:
    assert replica_received(case) == table_2_total(case)


@pytest.mark.parametrize(
    ("train", "gen", "fraction"), [("1-4-2", "1-2", 1 / 4), ("2-4-1", "1-2", 3 / 8), ("2-2-1", "1-1", 3 / 4)]
)
def test_mean_received_bytes_approach_the_fraction_of_the_paper(
    train: str, gen: str, fraction: float
) -> None:
    """(d_g - 1)/(tp)·M per rank: exact but for the norms, which are 1 in 400 of these weights."""
    sizes = TrainSizes.parse(train)
    shape = ModelShape("llama", 2, 96, 384, 8, 8, 12, 1000, 64)
    case = Case(shape, train, gen)
    mean = replica_received(case) / sizes.model_parallel_size
    assert mean / shape.num_parameters == pytest.approx(fraction, rel=0.005)


@pytest.mark.parametrize("bucket_elements", [1, 150, 400, 3000])
@pytest.mark.parametrize("case", FEW[::3], ids=str)
def test_buckets_are_bounded_and_hold_every_tensor_once(case: Case, bucket_elements: int) -> None:
    for plan in case.plans(bucket_elements):
        assert sorted(name for bucket in plan.buckets for name in bucket.tensors) == sorted(
            case.shape.tensors
        )
        groups = fused_groups(plan.source, plan.destination)
        for bucket in plan.buckets:
            assert all(
                set(group) <= set(bucket.tensors) or not set(group) & set(bucket.tensors) for group in groups
            )
            assert {move.tensor for move in bucket.moves} <= set(bucket.tensors)
            if len([group for group in groups if set(group) <= set(bucket.tensors)]) > 1:
                for rank in plan.ranks:
                    local = case.generating(rank)
                    assert sum(local[name].size for name in bucket.destinations[rank]) <= bucket_elements
        for one, following in zip(plan.buckets, plan.buckets[1:], strict=False):  # none is closed too early
            added = next(group for group in groups if following.tensors[0] in group)
            sizes = []
            for rank in plan.ranks:
                parameters = plan.destination.shard(rank).parameters
                fits = {*one.tensors, *added}
                sizes.append(
                    sum(q.num_elements for q in parameters if q.pieces and q.pieces[0].tensor in fits)
                )
            assert max(sizes) > bucket_elements


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


@pytest.mark.parametrize("case", FEW, ids=str)
def test_messages_carry_every_remote_move_once(case: Case) -> None:
    for plan in case.plans():
        for bucket in plan.buckets:
            remote = [move for move in bucket.moves if not move.is_local]
            carried = [move for pack in bucket.packs for moves in pack.moves for move in moves]
            assert Counter(map(repr, carried)) == Counter(map(repr, remote))
            packed = [
                (pack.source_rank, move.source.parameter, move.tensor, move.box)
                for pack in bucket.packs
                for move in pack.moves[0]
            ]
            assert len(packed) == len(set(packed)), "a box is packed twice"
            for pack in bucket.packs:
                assert pack.source_rank not in pack.receivers
                assert len({tuple(move.source for move in moves) for moves in pack.moves}) == 1
                for receiver in pack.receivers:
                    moves = pack.moves_to(receiver)
                    assert {move.destination.rank for move in moves} == {receiver}
                    assert sum(move.num_elements for move in moves) == pack.num_elements
            for rank in plan.ranks:
                assert bucket.sends(rank) == [pack for pack in bucket.packs if pack.source_rank == rank]
                assert bucket.receives(rank) == [pack for pack in bucket.packs if rank in pack.receivers]
                assert [m for m in bucket.moves if m.is_local and m.source.rank == rank] == bucket.local(rank)


def test_two_parameters_of_a_rank_that_hold_one_tensor_both_arrive() -> None:
    shape = small_shape(layers=1)
    name, size = "model.norm.weight", (6,)
    twice = Shard((whole("first", name, size), whole("second", name, size)))
    source = Layout(shape, {0: "all"}, {"all": Shard((whole("norm", name, size),))}, kind="one")
    plan = compile_plan(source, Layout(shape, {1: "twice"}, {"twice": twice}, kind="two"), (0, 1))
    (bucket,) = (bucket for bucket in plan.buckets if name in bucket.tensors)
    filled = {
        move.destination.parameter
        for pack in bucket.receives(1)
        for moves in pack.moves
        for move in moves
        if move.destination.rank == 1
    }
    assert filled == {"first", "second"}


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
    """Each tensor cut into rows at random; every range at one to three ranks."""
    parameters: dict[int, list[LocalParameter]] = {rank: [] for rank in range(num_ranks)}
    for tensor, size in shape.tensors.items():
        cuts = sorted(draw(st.sets(st.integers(1, size[0] - 1), max_size=3))) if size[0] > 1 else []
        for index, rows in enumerate(zip([0, *cuts], [*cuts, size[0]], strict=True)):
            for rank in draw(st.sets(st.integers(0, num_ranks - 1), min_size=1, max_size=3)):
                parameters[rank].append(row_stack(f"{tensor}.{index}", [(tensor, size, rows)]))
    shards = {rank: Shard(tuple(found)) for rank, found in parameters.items()}
    return Layout(shape, {rank: rank for rank in shards}, shards, kind=kind)


RANDOM_SHAPE = small_shape("qwen2", layers=1, vocab=7, kv_heads=1)


@given(row_layouts(RANDOM_SHAPE, 4, "one"), row_layouts(RANDOM_SHAPE, 4, "other"), st.integers(1, 500))
@settings(max_examples=60, deadline=None)
def test_plans_between_random_layouts(source: Layout, destination: Layout, bucket_elements: int) -> None:
    """Layouts that no grid describes: destinations are exact, and nothing that a rank holds is received."""
    tensors = numbered(RANDOM_SHAPE)
    plan = compile_plan(source, destination, range(4), bucket_elements)
    before = {rank: elements(cut_shard(source.shard(rank), tensors)) for rank in range(4)}
    made = execute(plan, {rank: cut_shard(source.shard(rank), tensors) for rank in range(4)})
    for rank in range(4):
        expected = cut_shard(destination.shard(rank), tensors)
        assert_same(made[rank], expected, f"rank {rank}")
        missing = np.setdiff1d(elements(expected), before[rank])
        assert rank_cost(plan, rank, 1).received_bytes == len(missing)


def test_no_rank_packs_an_element_twice() -> None:
    (plan,) = Case(fitting_shape("llama", False, 2, 4), "2-4-1", "1-1").plans()
    for rank in plan.ranks:
        sources = [
            (pack.moves[0][index].tensor, pack.moves[0][index].box)
            for bucket in plan.buckets
            for pack in bucket.sends(rank)
            for index in range(len(pack.moves[0]))
        ]
        assert len(sources) == len(set(sources)) > 0


def test_replicas_share_the_sending() -> None:
    """Four replicas of a model and one rank without: each replica sends a quarter, but for the largest tensor."""
    shape = fitting_shape("llama", False, 1, 2)
    plan = compile_plan(megatron_layout(shape, Grid(TrainSizes(1, 1, 4))), hf_layout(shape, (4,)), range(5))
    sent = [rank_cost(plan, rank, 1).sent_bytes for rank in range(5)]
    assert sum(sent) == shape.num_parameters and sent[4] == 0
    assert max(sent[:4]) - min(sent[:4]) <= max(math.prod(size) for size in shape.tensors.values())


PRINT_DIGESTS = """
from tests.unit.test_plans import FEW
print([plan.digest for case in FEW[::5] for plan in case.plans()])
"""


def test_every_process_compiles_the_same_plan() -> None:
    printed = {
        subprocess.run(
            [sys.executable, "-c", PRINT_DIGESTS],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert printed == {str([plan.digest for case in FEW[::5] for plan in case.plans()])}


def test_equal_plans_and_only_they_have_equal_digests() -> None:
    shape = fitting_shape("qwen3", False, 2, 2)
    generation = GenerationGrid(Grid(TrainSizes(2, 2, 1)), GenSizes(1, 1))
    source, destination = megatron_layout(shape, generation.train), vllm_layout(shape, generation)
    one, again = (compile_plan(source, destination, range(4), 400) for _ in range(2))
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
    ]
    assert len({plan.digest for plan in [one, *others]}) == 6
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
    for check in (check_local_return, inverse_local):
        with pytest.raises(
            PlanError,
            match=r"of rank 1 in megatron 1-4-1 holds .* which vllm 1-2 does not give that rank; the layouts must"
            r" nest \(interval grouping, p_g \| p and t_g \| t\)$",
        ):
            check(plan)


def test_a_domain_without_a_whole_model_is_refused() -> None:
    shape = fitting_shape("llama", False, 1, 4)
    generation = GenerationGrid(Grid(TrainSizes(1, 4, 1)), GenSizes(1, 2), Grouping.VANILLA)
    assert generation.micro_dp_groups[0] == (0, 2)
    with pytest.raises(
        PlanError,
        match=r"^model\.embed_tokens\.weight\[\(64, 128\), \(0, 6\)\], which rank 0 needs for model\.embed_tokens\.weight,"
        r" is held by no rank of megatron 1-4-1 in the domain; the domain must hold a whole model$",
    ):
        compile_plan(megatron_layout(shape, generation.train), vllm_layout(shape, generation), (0, 2))


def test_plans_connect_layouts_of_one_model() -> None:
    one, other = hf_layout(small_shape(layers=2)), hf_layout(small_shape(layers=3))
    with pytest.raises(PlanError, match="^layouts hugging face and hugging face describe different models"):
        compile_plan(one, other, (0,))


def test_paddings_that_do_not_nest_are_refused_before_the_switch() -> None:
    """t=6 pads 100 rows to 192, the engine pads them to 128: a third of 64 rows is not 32 rows of 6."""
    case = Case(small_shape(vocab=100, kv_heads=6), "1-6-1", "1-2")
    with pytest.raises(PlanError, match="vocab|must nest|domain"):
        for plan in case.plans():
            inverse_local(plan)

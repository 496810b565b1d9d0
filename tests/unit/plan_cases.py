"""Cases of plans, the expected contents of their ranks, and a strict executor on numpy arrays."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product

import numpy as np
import pytest

from hybridengine.families import registry as families
from hybridengine.models.shapes import ModelShape
from hybridengine.reshard.compiler import DIRECT_ELEMENTS, compile_plan
from hybridengine.reshard.cost import RankCost
from hybridengine.reshard.domains import domains
from hybridengine.reshard.megatron import megatron_layout
from hybridengine.reshard.plan import Bucket, Move, Pack, Place, Plan
from hybridengine.reshard.vllm import vllm_layout
from hybridengine.topology.generation import GenerationGrid, Grouping
from hybridengine.topology.grid import Grid, RankOrder
from hybridengine.topology.links import NodeMap
from hybridengine.topology.sizes import GenSizes, TrainSizes
from tests.unit.numpy_shards import (
    Arrays,
    megatron_reference,
    numbered,
    small_shape,
    vllm_reference,
)

FLOAT32 = 4
FAMILIES = tuple(families.FAMILIES)


@dataclass(frozen=True)
class Case:
    """A model under a training and a generation layout, and the expected contents of its ranks in both."""

    shape: ModelShape
    train: str
    gen: str
    order: RankOrder = RankOrder.PAPER
    grouping: Grouping = Grouping.INTERVAL

    @cached_property
    def grid(self) -> Grid:
        return Grid(TrainSizes.parse(self.train), self.order)

    @cached_property
    def generation(self) -> GenerationGrid:
        return GenerationGrid(self.grid, GenSizes.parse(self.gen), self.grouping)

    def plans(
        self,
        bucket_elements: int = 400,
        nodes: NodeMap | None = None,
        two_step: bool = True,
        direct_elements: int = DIRECT_ELEMENTS,
    ) -> list[Plan]:
        """Return one plan for every domain."""
        source, destination = megatron_layout(self.shape, self.grid), vllm_layout(self.shape, self.generation)
        return [
            compile_plan(source, destination, domain, bucket_elements, nodes, two_step, direct_elements)
            for domain in domains(source, destination)
        ]

    def training(self, rank: int) -> Arrays:
        """Return the reference parameters of `rank` in training."""
        return dict(self._training(rank))

    def generating(self, rank: int) -> Arrays:
        """Return the reference parameters of `rank` in generation."""
        return dict(self._generating(rank))

    @lru_cache(maxsize=32)  # noqa: B019
    def _training(self, rank: int) -> Arrays:
        place, sizes = self.grid.coordinate(rank), self.grid.sizes
        tensors = numbered(self.shape)
        t, c, e, etp = sizes.tp_size, sizes.cp_size, sizes.expert_parts, sizes.expert_shards
        number = place.tp_rank + t * ((place.cp_rank if c > 1 else 0) + c * place.dp_rank)
        return megatron_reference(
            self.shape,
            tensors,
            place.pp_rank,
            sizes.pp_size,
            place.tp_rank,
            t,
            expert=(number // etp % e, e, number % etp, etp),
        )

    @lru_cache(maxsize=32)  # noqa: B019
    def _generating(self, rank: int) -> Arrays:
        p, gen, place = self.grid.sizes.pp_size, self.generation.sizes, self.generation.coordinate(rank)
        tensors = numbered(self.shape)
        return vllm_reference(
            self.shape,
            tensors,
            place.pp_rank,
            p,
            gen.pp_size,
            place.tp_rank,
            gen.tp_size,
            whole=gen.expert_parts > 1,
        )

    def __str__(self) -> str:
        tied = "tied" if self.shape.tied_embeddings else "untied"
        return (
            f"{self.shape.family} {tied} {self.train} -> {self.gen} {self.order.value} {self.grouping.value}"
        )


def fitting_shape(family: str, tied: bool, p: int, t: int) -> ModelShape:
    """Return a model that t shards: uneven stages, a padded vocabulary that no degree divides and no empty share."""
    kv_heads = t if t in (3, 5, 6, 7, 8) else 4
    return small_shape(family, tied=tied, vocab=64 * t - 3, layers=p + (p > 1), kv_heads=kv_heads)


def general_shape(family: str, tied: bool, train: TrainSizes, gen: GenSizes, turn: int) -> ModelShape:
    """Return a model for any pair of sizes; `turn` decides on the replication of KV heads and the padding of shares."""
    t, t_g = train.tp_size, gen.tp_size
    kv_heads, heads_per_group = math.lcm(t, t_g), 2
    if t_g > t and t_g % t == 0 and turn % 2:
        kv_heads, heads_per_group = t, 2 * t_g // t
    rows = math.lcm(64, t, t_g) if t % t_g == 0 and t_g > 1 else math.lcm(64, t_g)
    stages = max(train.pp_size, gen.pp_size)
    return small_shape(
        family,
        tied=tied,
        vocab=rows - (3 if turn // 2 % 2 else 61),
        layers=stages + (stages > 1),
        kv_heads=kv_heads,
        heads_per_group=heads_per_group,
    )


def nested_cases() -> list[Case]:
    """Return every nested pair on up to 8 ranks with one or two replicas; families, ties and rank orders take turns."""
    cases: list[Case] = []
    counts = range(1, 9)
    for p, t, d in (sizes for sizes in product(counts, counts, (1, 2)) if math.prod(sizes) <= 8):
        for p_g, t_g in product(range(1, p + 1), range(1, t + 1)):
            if p % p_g == 0 and t % t_g == 0:
                turn = len(cases)
                shape = fitting_shape(FAMILIES[turn % len(FAMILIES)], turn % 2 == 0, p, t)
                cases.append(Case(shape, f"{p}-{t}-{d}", f"{p_g}-{t_g}", list(RankOrder)[turn // 2 % 2]))
    return cases


CASES = nested_cases()
every_nested_pair = pytest.mark.parametrize("case", CASES, ids=str)
_PAIRS = ((2, 2, "1-1"), (1, 4, "1-2"), (4, 2, "2-1"), (2, 4, "2-2"), (2, 4, "1-4"))
FEW = [
    Case(fitting_shape(family, tied, p, t), f"{p}-{t}-1", gen)
    for turn, (family, tied) in enumerate(product(FAMILIES, (False, True)))
    for p, t, gen in (_PAIRS[turn % 5],)
]

EXPERT_CASES = [
    Case(fitting_shape(family, False, sizes.pp_size, max(sizes.tp_size, 2)), train, gen, order)
    for family, order in (("qwen3_moe", RankOrder.PAPER), ("mixtral", RankOrder.MEGATRON))
    for train, gen in (
        ("1-1-2 e=2", "1-1"),
        ("1-1-4 e=2", "1-1"),
        ("1-1-4 e=4", "1-2 e=2"),
        ("1-2-1 e=2 etp=1", "1-2 e=2"),
        ("1-2-1 e=2 etp=1", "1-2"),
        ("1-1-2 e=2", "1-2 e=2"),
        ("1-2-2 e=4 etp=1", "1-2 e=2"),
        ("1-2-2 e=2", "1-2"),
        ("1-2-2 etp=1", "1-2"),
        ("2-1-2 e=2", "1-1"),
        ("2-1-2 e=2", "2-1"),
        ("2-2-1 e=2 etp=1", "1-4 e=4"),
        ("1-1-2 c=2 e=4", "1-4 e=4"),
    )
    for sizes in (TrainSizes.parse(train),)
]
"""Mixtures whose experts are cut otherwise than the rest of the model; engines have whole experts, or parts of each."""


# (training, generation, grouping): t_g > t with and without replicated KV heads, sizes that do not nest, vanilla.
GENERAL = (
    [
        Case(
            general_shape(
                FAMILIES[turn % len(FAMILIES)],
                turn % 2 == 0,
                TrainSizes.parse(train),
                GenSizes.parse(gen),
                turn,
            ),
            train,
            gen,
            list(RankOrder)[turn // 2 % 2],
            grouping,
        )
        for turn, (train, gen, grouping) in enumerate(
            product(("1-2-2", "2-2-1", "2-1-2"), ("1-4", "2-2", "1-1"), Grouping)
        )
    ]
    + [
        Case(
            general_shape(
                FAMILIES[turn % len(FAMILIES)],
                turn % 2 == 1,
                TrainSizes.parse(train),
                GenSizes.parse(gen),
                turn,
            ),
            train,
            gen,
            list(RankOrder)[turn % 2],
        )
        for turn, (train, gen) in enumerate(
            [
                ("1-3-2", "1-2"),
                ("1-2-3", "1-3"),
                ("2-3-1", "3-2"),
                ("3-1-2", "2-1"),
                ("1-4-1", "4-1"),
                ("2-3-2", "1-4"),
            ]
        )
    ]
    + EXPERT_CASES
)


def at(place: Place, move: Move) -> tuple[slice, ...]:
    """Return the index of a move's box in the parameter at one end."""
    return tuple(slice(o, o + n) for o, n in zip(place.offset, move.shape, strict=True))


class Execution:
    """Carries out a plan as ranks would: parameters appear with the bucket that fills them, messages leave and arrive
    step by step, sources vanish at the end. A move from or to a parameter without memory is a KeyError.

    Raises:
        AssertionError: an element is written twice, a filled parameter had appeared before, or an end of a message that
            has no staging is not one run of memory.
    """

    def __init__(self, plan: Plan, held: dict[int, Arrays]) -> None:
        self.plan, self.held = plan, held
        for local in held.values():  # as on ranks: no parameter is a view of another tensor
            local.update({name: np.ascontiguousarray(values) for name, values in local.items()})
        self.made: dict[int, Arrays] = {rank: {} for rank in plan.ranks}

    def run(self) -> dict[int, Arrays]:
        """Carry out the plan and return the contents of the ranks; what the plan gives up is removed from `held`."""
        for bucket in self.plan.buckets:
            for rank, names in bucket.destinations.items():
                for name in names:
                    assert name not in self.made[rank], f"rank {rank} fills {name} in two buckets"
                    shape = self.plan.destination.shard(rank).by_name[name].shape
                    self.made[rank][name] = np.zeros(shape, dtype=np.int64)
            for rank in self.plan.ranks:
                for move in bucket.local(rank):
                    self._write(move, self.held[rank][move.source.parameter][at(move.source, move)])
            for step in range(bucket.num_steps):
                self._exchange([pack for pack in bucket.packs if pack.step == step])
            for rank, names in bucket.sources.items():
                for name in names:
                    del self.held[rank][name]
        return self.made

    def _exchange(self, packs: list[Pack]) -> None:
        """Exchange the messages of a step; all of them leave before any arrives."""
        messages = [self._gather(pack) for pack in packs]
        for pack, message in zip(packs, messages, strict=True):
            for moves, in_place in zip(pack.moves, pack.received_in_place, strict=True):
                ends = np.cumsum([move.num_elements for move in moves])
                parts = np.split(message, ends[:-1])
                for move, part in zip(moves, parts, strict=True):
                    there = self._write(move, part.reshape(move.shape))
                    assert not in_place or (len(moves) == 1 and there.flags.c_contiguous), move

    def _gather(self, pack: Pack) -> np.ndarray:
        sender = (self.made if pack.step else self.held)[pack.source_rank]
        boxes = [sender[move.source.parameter][at(move.source, move)] for move in pack.moves[0]]
        assert not pack.sent_in_place or (len(boxes) == 1 and boxes[0].flags.c_contiguous), pack
        return np.concatenate([box.ravel() for box in boxes])

    def _write(self, move: Move, box: np.ndarray) -> np.ndarray:
        there = self.made[move.destination.rank][move.destination.parameter][at(move.destination, move)]
        assert box.shape == there.shape == move.shape, move
        assert box.all(), f"{move} carries padding"
        assert not there.any(), f"{move} writes what another move has written"
        there[...] = box
        return there


def execute(plan: Plan, held: dict[int, Arrays]) -> dict[int, Arrays]:
    """Return the contents of the ranks after a plan; what the plan gives up is removed from `held`."""
    return Execution(plan, held).run()


def staged(bucket: Bucket, rank: int) -> int:
    """Return the elements of messages that a rank copies, by the moves: all received, and each box sent once."""
    direct = {
        (move, end)
        for pack in bucket.packs
        for moves, received in zip(pack.moves, pack.received_in_place, strict=True)
        for move in moves
        for end, in_place in (("sent", pack.sent_in_place), ("received", received))
        if in_place
    }
    remote = [move for move in bucket.moves if not move.is_local]
    received = sum(
        move.num_elements
        for move in remote
        if move.destination.rank == rank and (move, "received") not in direct
    )
    sent = {
        (move.step, move.source, move.box): move.num_elements
        for move in remote
        if move.source.rank == rank and (move, "sent") not in direct
    }
    return received + sum(sent.values())


def elements(local: Arrays) -> np.ndarray:
    """Return the numbers of all elements that a rank holds, without padding."""
    return np.unique(np.concatenate([values.ravel() for values in local.values()] + [np.array([0])]))[1:]


def peak_bound(cost: RankCost) -> int:
    """Return an upper bound of the peak: one copy of the weights, bytes held twice, and the buckets in flight."""
    return cost.one_copy_bytes + cost.redundant_bytes + cost.bucket_bytes


def sent_bytes(cost: RankCost) -> int:
    return sum(cost.sent_by_link.values())

"""Pairs of layouts of every kind, switched there and back twice, with an optimizer step after each round.

Nested sizes, t_g above t (with KV heads that ranks share), sizes that do not nest, vanilla grouping, both rank orders;
one step and two, messages staged and in place, sent or read from memory. Expected values are counted by hand, or cut by
hand from the weights that all ranks train with; they never come from the plan that is carried out.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path

import numpy as np
import pytest

from hybridengine.backends.megatron.trainer import MegatronTrainer
from hybridengine.config.role_sections import OptimizerSection
from hybridengine.models.shapes import DTYPE_BYTES, ModelShape
from hybridengine.reshard.compiler import DIRECT_ELEMENTS
from hybridengine.topology.generation import Grouping
from hybridengine.topology.grid import Grid, RankOrder
from hybridengine.topology.links import NodeMap
from hybridengine.topology.sizes import GenSizes, TrainSizes
from hybridengine.weights.hybrid_engine import HybridEngine
from hybridengine.weights.ledger import SwitchReport
from hybridengine.weights.process_groups import ProcessGroups
from tests.gloo import sharding_by_hand as by_hand
from tests.gloo.counting_transport import CountingTransport
from tests.gloo.megatron_by_hand import gather_unsharded, num_retained
from tests.gloo.megatron_training import copy_weights, make_trainer, same_weights
from tests.gloo.plain_generation import PlainGeneration, make_engine
from tests.gloo.ranks import RankLauncher
from tests.gloo.test_hybrid_engine_layouts import train_one_step
from tests.gloo.tiny_models import write_model

NUM_ROUNDS = 2
DTYPES = ("float32", "bfloat16")
NODES = {
    4: (None, NodeMap((2, 2)), NodeMap((3, 1))),
    6: (None, NodeMap((3, 3)), NodeMap((2, 4))),
    8: (None, NodeMap((4, 4)), NodeMap((3, 3, 2))),
}
"""Number of ranks -> their distributions over nodes; pairs take turns."""
DIRECT = (1, 1000, DIRECT_ELEMENTS)
"""Minimum sizes of boxes that are sent and received in place: all boxes, some, none of these models' boxes."""


@dataclass(frozen=True)
class Training:
    """A training layout, a model that fits it, and the generation layouts that it switches to."""

    sizes: str
    gens: str
    """Generation sizes p_g-t_g; a trailing v means vanilla grouping, otherwise grouping is by intervals."""
    kv_heads: int = 2
    family: str = "llama"
    tied: bool = False
    order: RankOrder = RankOrder.PAPER

    @property
    def grid(self) -> Grid:
        return Grid(TrainSizes.parse(self.sizes), self.order)

    @property
    def numbers(self) -> tuple[int, int, int, int, int]:
        """p, t, d, c and v, as the test reads them."""
        p, t, d = map(int, self.sizes.split()[0].split("-"))
        named = dict(part.split("=") for part in self.sizes.split()[1:])
        return p, t, d, int(named.get("c", 1)), int(named.get("v", 1))

    @property
    def model(self) -> str:
        return f"{self.family}-{self.tied}-{self.kv_heads}-{self.grid.num_ranks}"


ALL_OF_4 = "1-1 1-2 2-1 1-4 4-1 2-2 1-2v 2-1v 1-4v 4-1v 2-2v"
TRAININGS = {
    4: (
        Training("1-4-1", ALL_OF_4, kv_heads=4, tied=True),
        Training("2-2-1", ALL_OF_4, family="qwen3"),
        Training("4-1-1", ALL_OF_4, family="qwen2", tied=True),
        Training("1-2-2", ALL_OF_4, family="qwen3", tied=True),
        Training("2-1-2", ALL_OF_4, tied=True, order=RankOrder.MEGATRON),
        Training("2-1-1 c=2", ALL_OF_4, tied=True),
        Training("2-2-1 v=2", ALL_OF_4, family="qwen3"),
        Training("2-1-1 c=2 v=2", "1-1 1-2 2-1 2-2 1-2v", order=RankOrder.MEGATRON),
    ),
    6: (
        Training("2-3-1", "1-1 1-2 1-6 3-1 3-2 2-1 2-3 1-3v", kv_heads=6),
        Training("3-2-1", "1-3 1-6 2-1 2-3 3-1v", kv_heads=6, family="qwen2", tied=True),
        Training("3-1-2", "1-6 2-1 1-2 3-2", tied=True, order=RankOrder.MEGATRON),
    ),
    8: (
        Training("2-2-2", "1-8 1-4 2-4 4-2 1-2v 2-1", tied=True, order=RankOrder.MEGATRON),
        Training("4-2-1", "1-4 2-1 4-1v 1-8", kv_heads=4, family="qwen2"),
    ),
}
"""Number of ranks -> training layouts."""


@dataclass(frozen=True)
class Pair:
    """One generation layout over a training layout, and options of the switch's plan."""

    training: Training
    gen: GenSizes
    grouping: Grouping
    nodes: NodeMap | None
    direct_elements: int

    def train_part(self, shape: ModelShape, rank: int) -> by_hand.Part:
        p, t, d, c, v = self.training.numbers
        pp_rank, _, tp_rank = by_hand.train_place(rank, p, t, d, self.training.order.name, c)
        return by_hand.train_part(shape, pp_rank, tp_rank, p, t, v)

    def gen_place(self, rank: int) -> tuple[int, int]:
        p, t, d, c, _ = self.training.numbers
        is_vanilla = self.grouping is Grouping.VANILLA
        order = self.training.order.name
        return by_hand.gen_place(rank, p, t, d, order, self.gen.pp_size, self.gen.tp_size, is_vanilla, c)

    def gen_part(self, shape: ModelShape, rank: int) -> by_hand.Part:
        p = self.training.grid.sizes.pp_size
        return by_hand.gen_part(shape, *self.gen_place(rank), p, self.gen.pp_size, self.gen.tp_size)

    def __str__(self) -> str:
        nodes = f" on nodes of {self.nodes.ranks_per_node}" if self.nodes else ""
        return (
            f"{self.training.sizes} ({self.training.order.name}) -> {self.gen} {self.grouping.value}{nodes}, in place"
            f" from {self.direct_elements}"
        )


def pairs_of(training: Training) -> list[Pair]:
    """Return the pairs of a training layout that give the ranks different places."""
    num_ranks = training.grid.num_ranks
    found: dict[tuple[GenSizes, tuple[tuple[int, int], ...]], Pair] = {}
    for turn, gen in enumerate(training.gens.split()):
        grouping = Grouping.VANILLA if gen.endswith("v") else Grouping.INTERVAL
        nodes = NODES[num_ranks][(turn + 1) % 3]
        pair = Pair(training, GenSizes.parse(gen.rstrip("v")), grouping, nodes, DIRECT[turn // 3 % 3])
        found.setdefault((pair.gen, tuple(pair.gen_place(rank) for rank in range(num_ranks))), pair)
    return list(found.values())


def model_sizes(training: Training) -> dict[str, int]:
    """Return sizes that fill DDP's buckets (multiples of 128 and of d) exactly; the vocabulary needs padding."""
    hidden = 384 if training.grid.num_ranks == 6 else 256 if training.family == "qwen2" else 128
    return {
        "hidden_size": hidden,
        "num_attention_heads": 12 if training.grid.num_ranks == 6 else 8,
        "num_key_value_heads": training.kv_heads,
        "head_dim": 128 if training.family == "qwen3" else 32,
        "intermediate_size": 48,
        "num_hidden_layers": 5,  # uneven stages for p = 4 too
    }


@dataclass(frozen=True)
class Round:
    """One round trip on one rank."""

    there: SwitchReport
    back: SwitchReport
    slices_equal: bool
    """True if the generation weights were the slices, cut by hand, of the weights that all ranks train with."""
    weights_equal: bool
    """True if the training weights came back bitwise."""


@dataclass(frozen=True)
class Switched:
    """All rounds of one pair on one rank."""

    rounds: list[Round]
    received_from: Counter[int]
    """Weight bytes received in all rounds by sender, counted at the transport."""
    domain: tuple[int, ...]
    num_steps: int
    num_in_place: int
    """Number of messages that this rank received in place."""


def switch_all_pairs(rank: int, models: Path, num_ranks: int) -> list[list[Switched]]:
    """Return the results for each training layout and each of its pairs."""
    registry = ProcessGroups()
    settings = OptimizerSection(lr=1e-3)
    answers = []
    for turn, training in enumerate(TRAININGS[num_ranks]):
        dtype = DTYPES[turn % 2]
        folder = models / training.model
        shape = ModelShape.from_folder(folder)
        make = partial(make_trainer, shape, training.grid, rank, registry, folder, dtype, settings)
        trainer, twin = make(), make()
        pairs = pairs_of(training)
        made = [engine_of(pair, trainer, registry) for pair in pairs]
        rounds: list[list[Round]] = [[] for _ in pairs]
        for seed in range(NUM_ROUNDS):
            tensors = gather_unsharded(trainer)
            for pair, (engine, side, _), done in zip(pairs, made, rounds, strict=True):
                expected = by_hand.generation_weights(shape, tensors, pair.gen_part(shape, rank))
                before = copy_weights(trainer)
                there = engine.to_generate()
                slices_equal = same_weights(
                    {name: side.weights[name] for name in side.weights.names}, expected
                )
                back = engine.to_train()
                done.append(Round(there, back, slices_equal, same_weights(before, copy_weights(trainer))))
            train_one_step(trainer, seed)
            train_one_step(twin, seed)
            # Weights, master weights and moments equal those of a twin that has never switched.
            assert same_weights(copy_weights(trainer), copy_weights(twin)), (
                f"{training}: switching changed it"
            )
        answers.append(
            [
                switched(rank, engine, transport, done)
                for (engine, _, transport), done in zip(made, rounds, strict=True)
            ]
        )
    return answers


def engine_of(
    pair: Pair, trainer: MegatronTrainer, registry: ProcessGroups
) -> tuple[HybridEngine, PlainGeneration, CountingTransport]:
    transports: list[CountingTransport] = []

    def counting(group) -> CountingTransport:
        transports.append(CountingTransport(group))
        return transports[0]

    engine, side = make_engine(
        trainer,
        str(pair.gen),
        registry,
        by_hand.largest_bucket(trainer.shape),
        counting,
        pair.grouping,
        nodes=pair.nodes,
        direct_elements=pair.direct_elements,
    )
    return engine, side, transports[0]


def switched(rank: int, engine: HybridEngine, transport: CountingTransport, rounds: list[Round]) -> Switched:
    packs = [pack for bucket in engine.plan.buckets for pack in bucket.packs if rank in pack.receivers]
    return Switched(
        rounds,
        transport.received_from,
        engine.plan.ranks,
        engine.plan.num_steps,
        sum(pack.received_in_place[pack.receivers.index(rank)] for pack in packs),
    )


def test_there_are_sixty_pairs():
    pairs = [
        pair for trainings in TRAININGS.values() for training in trainings for pair in pairs_of(training)
    ]
    assert len(pairs) >= 60
    assert any(pair.gen.tp_size > pair.training.kv_heads for pair in pairs), "ranks share KV heads"


@pytest.mark.parametrize("num_ranks", TRAININGS)
def test_round_trips_with_steps_in_between(num_ranks: int, tmp_path: Path, run_ranks: RankLauncher):
    trainings = TRAININGS[num_ranks]
    for turn, training in enumerate(trainings):
        dtype = DTYPES[turn % 2]
        write_model(tmp_path / training.model, training.family, training.tied, dtype, **model_sizes(training))
    by_rank = run_ranks(num_ranks, switch_all_pairs, tmp_path, num_ranks, timeout_s=280)
    num_two_step = num_in_place = num_redundant = 0
    for turn, training in enumerate(trainings):
        shape = ModelShape.from_folder(tmp_path / training.model)
        for index, pair in enumerate(pairs_of(training)):
            found = [answers[turn][index] for answers in by_rank]
            for rank, one in enumerate(found):
                assert_rounds(pair, shape, rank, one, DTYPE_BYTES[DTYPES[turn % 2]])
            if pair.nodes:
                assert_enters_nodes_once(pair, shape, found, DTYPE_BYTES[DTYPES[turn % 2]])
            num_two_step += found[0].num_steps == 2
            num_in_place += any(one.num_in_place for one in found)
            num_redundant += any(one.rounds[0].there.redundant_bytes for one in found)
    assert min(num_two_step, num_in_place, num_redundant) >= 3


def assert_rounds(pair: Pair, shape: ModelShape, rank: int, found: Switched, element_bytes: int) -> None:
    train, gen = pair.train_part(shape, rank), pair.gen_part(shape, rank)
    train_bytes, gen_bytes, received_bytes, retained_bytes, bucket_bytes = (
        element_bytes * count
        for count in (
            by_hand.num_stored(shape, train),
            by_hand.num_stored(shape, gen),
            by_hand.num_missing(shape, train, gen),
            num_retained(shape, train, gen),
            by_hand.largest_bucket(shape),
        )
    )
    if pair.grouping is Grouping.INTERVAL and pair.gen.nests_in(pair.training.grid.sizes):
        assert retained_bytes == 0
    most = max(train_bytes, gen_bytes + retained_bytes)
    assert len(found.rounds) == NUM_ROUNDS
    for number, done in enumerate(found.rounds):
        there, back, where = done.there, done.back, f"{pair}, rank {rank}, round {number}"
        assert done.slices_equal, where
        assert done.weights_equal, where
        assert (there.received_bytes, back.received_bytes) == (received_bytes, 0), where
        assert (there.redundant_bytes, back.redundant_bytes) == (retained_bytes, 0), where
        assert (there.weight_bytes, back.weight_bytes) == (gen_bytes + retained_bytes, train_bytes), where
        assert most <= there.peak_weight_bytes <= most + bucket_bytes, where
        assert most <= back.peak_weight_bytes <= most + bucket_bytes, where


def assert_enters_nodes_once(
    pair: Pair, shape: ModelShape, found: list[Switched], element_bytes: int
) -> None:
    """Assert that the ranks of a node together receive once each element that some need and none holds."""
    assert pair.nodes is not None
    for domain in {one.domain for one in found}:
        for node in {pair.nodes.node_of(rank) for rank in domain}:
            ranks = [rank for rank in domain if pair.nodes.node_of(rank) == node]
            entered = sum(
                count
                for rank in ranks
                for peer, count in found[rank].received_from.items()
                if peer not in ranks
            )
            lacking = 0
            for tensor in shape.tensors:
                held, needed = (
                    reduce(np.logical_or, [by_hand.mask(shape, tensor, part(shape, rank)) for rank in ranks])
                    for part in (pair.train_part, pair.gen_part)
                )
                lacking += int((needed & ~held).sum())
            assert entered == NUM_ROUNDS * lacking * element_bytes, f"{pair}, node {node}"

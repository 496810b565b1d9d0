"""The switch between every nested pair of layouts on up to 4 ranks, with a real Megatron trainer.

Everything expected is counted by hand (`sharding_by_hand`), never from the plan that is carried out.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from hybridengine.backends.megatron.trainer import MegatronTrainer
from hybridengine.config.role_sections import OptimizerSection
from hybridengine.errors import StorageError
from hybridengine.models.shapes import DTYPE_BYTES, ModelShape
from hybridengine.topology.grid import Grid, RankOrder
from hybridengine.topology.sizes import TrainSizes
from hybridengine.weights.hybrid_engine import HybridEngine
from hybridengine.weights.ledger import SwitchReport
from hybridengine.weights.process_groups import ProcessGroups
from tests.gloo import sharding_by_hand as by_hand
from tests.gloo.megatron_training import copy_weights, loss_of, make_trainer, same_weights
from tests.gloo.plain_generation import make_engine
from tests.gloo.ranks import RankLauncher
from tests.gloo.tiny_models import write_model

CASES = [
    (1, "float32"),
    (2, "float32"),
    (2, "bfloat16"),
    (3, "float32"),
    (4, "float32"),
]
"""(number of ranks, dtype). Layouts that only 6 or 8 ranks have are in test_reshard_pairs.py; the element size changes
neither moves nor messages."""
TRAINED = (1, 2, 3)
"""Numbers of ranks that also train next to a twin; 4 do so in test_reshard_pairs.py."""

MODELS: dict[int, tuple[str, bool, int, int]] = {
    1: ("qwen3", True, 128, 131),
    2: ("qwen2", True, 32, 131),
    3: ("llama", False, 32, 131),
    4: ("qwen3", True, 128, 131),
}
"""Number of ranks -> (family, tied embeddings, head_dim, vocabulary): sizes that every t dividing n can shard, and that
fill DDP's buckets (multiples of 128 and of d) exactly. Vocabularies still need padding."""


def sizes_of_model(num_ranks: int, p: int) -> dict[str, int]:
    """Return sizes for (p, t, d) of `num_ranks` ranks: one layer more than stages, so that stages are uneven."""
    _, _, head_dim, vocab_size = MODELS[num_ranks]
    odd = num_ranks
    while odd % 2 == 0:
        odd //= 2
    return {
        "hidden_size": 128 * odd,
        "num_attention_heads": 2 * num_ranks,
        "num_key_value_heads": num_ranks,
        "head_dim": head_dim,
        "intermediate_size": 8 * num_ranks,
        "num_hidden_layers": p + 1,
        "vocab_size": vocab_size,
    }


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def train_layouts(num_ranks: int) -> list[tuple[int, int, int]]:
    """Return every (p, t, d)."""
    return [(p, t, num_ranks // (p * t)) for p in divisors(num_ranks) for t in divisors(num_ranks // p)]


def grids(num_ranks: int) -> list[Grid]:
    """Return every layout in every rank order; the orders are equal if p = 1 or d = 1."""
    return [
        Grid(TrainSizes(p, t, d), order)
        for p, t, d in train_layouts(num_ranks)
        for order in ((RankOrder.PAPER, RankOrder.MEGATRON) if p > 1 and d > 1 else (RankOrder.PAPER,))
    ]


@dataclass(frozen=True)
class Switch:
    """One round trip on one rank."""

    pair: str
    to_generate: SwitchReport
    to_train: SwitchReport
    expected_received_bytes: int
    train_bytes: int
    gen_bytes: int
    bucket_bytes: int
    released: bool
    """True if gradients and training weights owned no memory in generation, and the engine's weights none afterwards."""
    slices_equal: bool
    """True if the generation weights were the slices of the unsharded model."""
    weights_equal: bool
    """True if the training weights came back bitwise."""
    refused: int
    """Number of switches into the current mode that raised StorageError."""


def switch_between_all_layouts(rank: int, models: Path, num_ranks: int, dtype: str) -> list[Switch]:
    registry = ProcessGroups()
    settings = OptimizerSection(lr=1e-3)
    switches = []
    for grid in grids(num_ranks):
        p, t = grid.sizes.pp_size, grid.sizes.tp_size
        folder = models / str(p)
        shape = ModelShape.from_folder(folder)
        unsharded = load_file(folder / "model.safetensors")
        trainer = make_trainer(shape, grid, rank, registry, folder, dtype, settings)
        pairs = [(p_gen, t_gen) for p_gen in divisors(p) for t_gen in divisors(t)]
        for p_gen, t_gen in pairs:
            switches.append(round_trip(trainer, registry, unsharded, p_gen, t_gen))
        if num_ranks not in TRAINED:
            continue
        # Master weights and moments are untouched: the steps equal those of a twin that has never switched.
        twin = make_trainer(shape, grid, rank, registry, folder, dtype, settings)
        train_one_step(trainer, 0)
        train_one_step(twin, 0)
        round_trip(trainer, registry, None, *pairs[0])
        train_one_step(trainer, 1)
        train_one_step(twin, 1)
        trained, expected = copy_weights(trainer), copy_weights(twin)
        assert same_weights(trained, expected), f"{grid}: switching changed the training"
    return switches


def train_one_step(trainer: MegatronTrainer, seed: int) -> None:
    generator = torch.Generator().manual_seed(10 * seed + trainer.grid.coordinate(trainer.rank).dp_rank)
    rows = torch.randint(0, 131, (1, 4), generator=generator)
    batch = {"tokens": rows, "lengths": torch.tensor([4])}
    before = copy_weights(trainer)
    trainer.train_step([batch], loss_of(trainer))
    assert not same_weights(before, copy_weights(trainer))


def round_trip(
    trainer: MegatronTrainer,
    registry: ProcessGroups,
    unsharded: dict[str, Tensor] | None,
    p_gen: int,
    t_gen: int,
) -> Switch:
    shape, sizes, order = trainer.shape, trainer.grid.sizes, trainer.grid.order
    p, t, d = sizes.pp_size, sizes.tp_size, sizes.dp_size
    pp_rank, _, tp_rank = by_hand.train_place(trainer.rank, p, t, d, order.name)
    train = by_hand.train_part(shape, pp_rank, tp_rank, p, t)
    place = by_hand.gen_place(trainer.rank, p, t, d, order.name, p_gen, t_gen)
    gen = by_hand.gen_part(shape, *place, p, p_gen, t_gen)
    element_bytes = DTYPE_BYTES[trainer.dtype]
    bucket_elements = by_hand.largest_bucket(shape)
    engine, side = make_engine(trainer, f"{p_gen}-{t_gen}", registry, bucket_elements)
    before = copy_weights(trainer)
    refused = refuses(engine, "to_train")

    to_generate = engine.to_generate()
    slices_equal = unsharded is None or same_weights(
        {name: side.weights[name] for name in side.weights.names},
        by_hand.generation_weights(shape, unsharded, gen),
    )
    released = trainer.gradient_bytes == 0 and trainer.weights.live_bytes == 0
    refused += refuses(engine, "to_generate")

    to_train = engine.to_train()
    released &= side.weights.live_bytes == 0 and trainer.gradient_bytes == 0
    assert side.calls == ["leave", "enter", "leave"]
    return Switch(
        pair=f"{sizes} ({order.name}) -> {p_gen}-{t_gen} {trainer.dtype} rank {trainer.rank}",
        to_generate=to_generate,
        to_train=to_train,
        expected_received_bytes=by_hand.num_missing(shape, train, gen) * element_bytes,
        train_bytes=by_hand.num_stored(shape, train) * element_bytes,
        gen_bytes=by_hand.num_stored(shape, gen) * element_bytes,
        bucket_bytes=bucket_elements * element_bytes,
        released=released,
        slices_equal=slices_equal,
        weights_equal=same_weights(before, copy_weights(trainer)),
        refused=refused,
    )


def refuses(engine: HybridEngine, switch: str) -> bool:
    try:
        getattr(engine, switch)()
    except StorageError:
        return True
    return False


@pytest.mark.parametrize(("num_ranks", "dtype"), CASES)
def test_every_nested_pair_of_layouts(num_ranks: int, dtype: str, tmp_path: Path, run_ranks: RankLauncher):
    family, tied, _, _ = MODELS[num_ranks]
    for p in divisors(num_ranks):
        write_model(tmp_path / str(p), family, tied, dtype, **sizes_of_model(num_ranks, p))
    by_rank = run_ranks(num_ranks, switch_between_all_layouts, tmp_path, num_ranks, dtype, timeout_s=250)
    num_pairs = sum(
        len(divisors(grid.sizes.pp_size)) * len(divisors(grid.sizes.tp_size)) for grid in grids(num_ranks)
    )
    for switches in by_rank:
        assert len(switches) == num_pairs
        for switch in switches:
            assert_switch(switch)
    received = sum(switch.to_generate.received_bytes for switches in by_rank for switch in switches)
    assert (received > 0) is (num_ranks > 1)


def assert_switch(switch: Switch) -> None:
    there, back, pair = switch.to_generate, switch.to_train, switch.pair
    assert switch.slices_equal, pair
    assert switch.weights_equal, pair
    assert switch.released, pair
    assert switch.refused == 2, pair
    assert there.received_bytes == switch.expected_received_bytes, pair
    assert back.received_bytes == 0, pair
    assert there.redundant_bytes == 0, pair
    assert back.redundant_bytes == 0, pair
    assert there.weight_bytes == switch.gen_bytes, pair
    assert back.weight_bytes == switch.train_bytes, pair
    bound = max(switch.train_bytes, switch.gen_bytes) + switch.bucket_bytes
    assert max(switch.train_bytes, switch.gen_bytes) <= there.peak_weight_bytes <= bound, pair
    assert max(switch.train_bytes, switch.gen_bytes) <= back.peak_weight_bytes <= bound, pair

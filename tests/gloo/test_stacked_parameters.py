"""A plan into 3-d parameters and back, carried out by real ranks: messages staged and in place, digests checked."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hybridengine.reshard.compiler import compile_plan, inverse_local
from hybridengine.reshard.megatron import megatron_layout
from hybridengine.topology.grid import Grid
from hybridengine.topology.sizes import TrainSizes
from hybridengine.weights.executor import PlanExecutor, Verify
from hybridengine.weights.ledger import StorageLedger
from hybridengine.weights.process_groups import ProcessGroups
from hybridengine.weights.storage import WeightStorage
from hybridengine.weights.transport import PointToPointTransport
from tests.gloo.ranks import RankLauncher
from tests.unit.numpy_shards import Arrays, megatron_reference, numbered, small_shape
from tests.unit.stacked_layers import stacked_layout, stacked_reference

SHAPE = small_shape(layers=4, vocab=128)
GRID = Grid(TrainSizes(2, 2, 1))


def there_and_back(rank: int, direct_elements: int) -> tuple[Arrays, Arrays]:
    """Return a rank's parameters in the engine's layout, and in the trainer's afterwards."""
    place, layout = GRID.coordinate(rank), stacked_layout(SHAPE, "rows", 4)
    trained = megatron_reference(SHAPE, numbered(SHAPE), place.pp_rank, 2, place.tp_rank, 2)
    training = WeightStorage(
        {name: torch.tensor(values, dtype=torch.float32) for name, values in trained.items()}
    )
    generating = WeightStorage({p.name: torch.empty(p.shape) for p in layout.shard(rank).parameters})
    generating.release()
    group = ProcessGroups().of(GRID.groups("pp", "tp"))
    ledger = StorageLedger({"training": training, "generating": generating})
    plan = compile_plan(megatron_layout(SHAPE, GRID), layout, range(4), 300, direct_elements=direct_elements)
    transport = PointToPointTransport(group)
    PlanExecutor(plan, rank, training, generating, transport, ledger).run(verify=Verify.ALWAYS)
    assert training.live_bytes == 0
    seen = copied(generating)
    PlanExecutor(inverse_local(plan), rank, generating, training, transport, ledger).run(verify=Verify.ALWAYS)
    assert generating.live_bytes == 0
    return seen, copied(training)


def copied(weights: WeightStorage) -> Arrays:
    """Return the parameters by name as copies, since memory that numpy has seen cannot be given up."""
    return {name: weights[name].clone().numpy().astype(np.int64) for name in weights.names}


@pytest.mark.parametrize("direct_elements", [1, 10**9], ids=["in place", "staged"])
def test_ranks_fill_stacks_and_take_their_shards_back(direct_elements: int, run_ranks: RankLauncher):
    for rank, (seen, back) in enumerate(run_ranks(4, there_and_back, direct_elements)):
        expected = stacked_reference(SHAPE, numbered(SHAPE), "rows", rank)
        place = GRID.coordinate(rank)
        trained = megatron_reference(SHAPE, numbered(SHAPE), place.pp_rank, 2, place.tp_rank, 2)
        for found, wanted in ((seen, expected), (back, trained)):
            assert found.keys() == wanted.keys()
            assert all(np.array_equal(found[name], wanted[name]) for name in wanted)

"""Bytes that a switch sends between hosts, counted on the wire: those of the plan, in two steps t/t_g times fewer."""

from __future__ import annotations

from collections import Counter

import pytest

from hybridengine.bench.reshard.spec import BenchSpec, LayoutPair, MethodName
from hybridengine.models.shapes import ModelShape
from hybridengine.planning.switch.switch_cost import SwitchPricer
from hybridengine.topology.generation import GenerationGrid
from hybridengine.topology.grid import Grid
from hybridengine.topology.links import LinkClass
from tests.machines.hosts import joined_hosts
from tests.machines.ray_nodes import warm_folder
from tests.machines.switch_ranks import ONE_STEP, SwitchRanks
from tests.machines.traffic import counted, on_the_wire

TWO_STEPS = MethodName.MICRO_DP.value
HOSTS = ("first", "second")
SHAPE = ModelShape(
    family="llama",
    num_layers=4,
    hidden_size=256,
    ffn_hidden_size=768,
    num_heads=8,
    num_kv_heads=4,
    head_dim=32,
    vocab_size=2048,
    max_positions=64,
)
SPEC = BenchSpec(
    SHAPE,
    # Two stages of t = 4 on a host each; t_g = 2 and 1.
    (LayoutPair.parse("2-4-1:1-2"), LayoutPair.parse("2-4-1:1-1")),
    methods=(MethodName.MICRO_DP,),
    bucket_bytes=2**21,
    num_nodes=2,
)


@pytest.mark.parametrize("pair", SPEC.pairs, ids=str)
def test_a_box_enters_a_host_once(pair: LayoutPair, warm_ray: dict[str, str]) -> None:
    with joined_hosts(HOSTS, shared=[warm_folder(warm_ray)]) as network:
        ranks = SwitchRanks(network.hosts, SPEC, pair, warm_ray)
        on_wire = {}
        for version, label in enumerate((TWO_STEPS, ONE_STEP), start=1):
            ranks.call("there", label, version)  # checked
            ranks.call("back", label)
            with counted(network) as there:
                ranks.call("there", label)
            with counted(network) as back:
                ranks.call("back", label)
            on_wire[label] = there
            assert max(back.values()) < 0.02 * min(there.values()), "the way back is inside each rank"
            for (sender, receiver), planned in planned_bytes(pair, two_step=label == TWO_STEPS).items():
                seen = there[sender, receiver]
                assert seen == pytest.approx(on_the_wire(planned), rel=0.02), (
                    f"{label}, {sender} to {receiver}"
                )
    for receiver in HOSTS:
        (half,) = (size for (_, to), size in on_wire[TWO_STEPS].items() if to == receiver)
        assert half == pytest.approx(on_the_wire(SPEC.weight_bytes // 2), rel=0.02), "the other host's stage"
        (more,) = (size for (_, to), size in on_wire[ONE_STEP].items() if to == receiver)
        assert more / half == pytest.approx(pair.train.tp_size / pair.gen.tp_size, rel=0.02)


def planned_bytes(pair: LayoutPair, two_step: bool) -> Counter[tuple[str, str]]:
    """Return the bytes that the plan moves from each host to the other one."""
    generation = GenerationGrid(Grid(pair.train), pair.gen)
    cost = SwitchPricer(SHAPE, SPEC.dtype, SPEC.bucket_bytes).price(generation, SPEC.nodes(pair), two_step)
    received = Counter[tuple[str, str]]()
    for rank in range(pair.train.num_ranks):
        to = SPEC.nodes(pair).node_of(rank)
        there, _ = cost.of_rank(rank)
        received[HOSTS[1 - to], HOSTS[to]] += there.received_by_link[LinkClass.BETWEEN_NODES]
    return received

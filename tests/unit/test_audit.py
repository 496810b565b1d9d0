"""The audit of plans: it finds nothing in any plan on up to 8 ranks, and finds every damage that is done to one."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridengine.reshard.audit import audit, audit_return, union_elements
from hybridengine.reshard.boxes import Box
from hybridengine.reshard.compiler import compile_plan, inverse_local
from hybridengine.reshard.domains import domains
from hybridengine.reshard.megatron import megatron_layout
from hybridengine.reshard.plan import Plan
from hybridengine.reshard.vllm import vllm_layout
from hybridengine.topology.generation import GenerationGrid, Grouping
from hybridengine.topology.grid import Grid, RankOrder
from hybridengine.topology.links import NodeMap
from hybridengine.topology.sizes import MODEL_AXES, GenSizes, TrainSizes
from tests.unit.plan_cases import FAMILIES, general_shape

ROOT = Path(__file__).parents[2]
MAX_RANKS = 8


def grids(p: int, t: int) -> Iterator[GenerationGrid]:
    """Yield every generation grid over (p, t, d) of up to MAX_RANKS ranks, in both rank orders and groupings."""
    for d in range(1, MAX_RANKS // (p * t) + 1):
        sizes = TrainSizes(p, t, d)
        for p_g, t_g in product(range(1, sizes.num_ranks + 1), repeat=2):
            if sizes.num_ranks % (p_g * t_g) == 0:
                for order, grouping in product(RankOrder, Grouping):
                    yield GenerationGrid(Grid(sizes, order), GenSizes(p_g, t_g), grouping)


Content = tuple[tuple[int, ...], ...]


def distinct_grids(p: int, t: int) -> Iterator[tuple[GenerationGrid, list[tuple[int, ...]]]]:
    """Yield every generation grid that does not repeat an earlier one, with the places of its ranks in both layouts.

    No domain leaves a training replica. Two replicas are the same if p, t, p_g, t_g and the places of their ranks
    are: their ranks hold the same shards before and after, under other names. More replicas and another rank order add
    new ones only if engines straddle replicas.
    """
    seen: set[tuple[GenSizes, Content]] = set()
    for generation in grids(p, t):
        places = [
            train.along(MODEL_AXES) + gen.along(MODEL_AXES)
            for train, gen in zip(generation.train.coordinates(), generation.coordinates(), strict=True)
        ]
        new = {content(generation, replica, places) for replica in generation.train.groups("pp", "tp")} - seen
        if new:
            seen |= new
            yield generation, places


def content(
    generation: GenerationGrid, ranks: tuple[int, ...], places: list[tuple[int, ...]]
) -> tuple[GenSizes, Content]:
    """Return the contents of `ranks` before and after."""
    return generation.sizes, tuple(sorted(places[rank] for rank in ranks))


def plans(p: int, t: int) -> Iterator[Plan]:
    """Yield a plan for every distinct domain; ties, paddings, nodes, bucket and message sizes take turns."""
    seen: set[tuple[GenSizes, Content]] = set()
    for turn, (generation, places) in enumerate(distinct_grids(p, t)):
        train, num_ranks = generation.train, generation.train.num_ranks
        family = FAMILIES[turn % len(FAMILIES)]
        shape = general_shape(family, turn % 2 == 0, train.sizes, generation.sizes, turn // 2)
        source, destination = megatron_layout(shape, train), vllm_layout(shape, generation)
        nodes = NodeMap.uniform(num_ranks, (num_ranks, 2, 4, 3)[turn // 2 % 4])
        for domain in domains(source, destination):
            if content(generation, domain, places) in seen:
                continue
            seen.add(content(generation, domain, places))
            yield compile_plan(
                source,
                destination,
                domain,
                bucket_elements=(1, 700, 10**6)[turn // 3 % 3],
                nodes=nodes,
                direct_elements=(1, 30, 10**9)[turn // 5 % 3],
            )


PAIRS = [(p, t) for p, t in product(range(1, MAX_RANKS + 1), repeat=2) if p * t <= MAX_RANKS]


@pytest.fixture
def no_garbage_collection() -> Iterator[None]:
    """Disable the collector: plans are many objects without cycles, and searching them takes a third of the time."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_garbage_collection")
@pytest.mark.parametrize(("p", "t"), PAIRS)
def test_every_plan_on_up_to_8_ranks_passes(p: int, t: int) -> None:
    """All (d, p_g, t_g, rank order, grouping) are switched there and back."""
    for plan in plans(p, t):
        assert audit(plan) == [], f"{plan} {plan.source.shape}"
        assert audit_return(plan, inverse_local(plan)) == [], f"{plan} {plan.source.shape}"


def test_the_grid_has_plans_of_every_kind() -> None:
    """Every variant occurs: both numbers of steps, retained or not, in place or staged, overlapping or not."""
    kinds = set()
    for plan in plans(2, 2):
        packs = [pack for bucket in plan.buckets for pack in bucket.packs]
        kinds |= {
            ("steps", plan.num_steps),
            ("retains", any(plan.retained(rank) for rank in plan.ranks)),
            ("overlaps", any(bucket.overlaps for bucket in plan.buckets)),
            ("tied", plan.source.shape.tied_embeddings),
        }
        kinds |= {("sent in place", pack.sent_in_place) for pack in packs}
        kinds |= {("joined", len(pack.moves[0]) > 1) for pack in packs}
    names = ("retains", "overlaps", "tied", "sent in place", "joined")
    assert kinds == {("steps", 1), ("steps", 2)} | set(product(names, (False, True)))


WITHOUT_TORCH = """
import sys
from tests.unit.test_audit import audit, audit_return, inverse_local, plans
assert all(audit(plan) == audit_return(plan, inverse_local(plan)) == [] for plan in plans(1, 2))
print(sorted({"torch", "ray", "vllm", "megatron"} & set(sys.modules)))
"""


def test_the_audit_needs_no_torch() -> None:
    printed = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ).stdout
    assert printed == "[]\n"


@st.composite
def boxes_in_a_cube(draw: st.DrawFn) -> list[Box]:
    dims = draw(st.integers(1, 3))
    found = []
    for _ in range(draw(st.integers(0, 6))):
        starts = [draw(st.integers(0, 4)) for _ in range(dims)]
        found.append(tuple((start, start + draw(st.integers(1, 3))) for start in starts))
    return found


@given(boxes_in_a_cube())
@settings(max_examples=200, deadline=None)
def test_elements_of_a_union_are_those_that_numpy_marks(boxes: list[Box]) -> None:
    marked = np.zeros((8,) * (len(boxes[0]) if boxes else 1), dtype=bool)
    for box in boxes:
        marked[tuple(slice(start, stop) for start, stop in box)] = True
    assert union_elements(boxes) == marked.sum()

"""The audit of plans: finds nothing in any plan on up to 16 ranks, and every damage that is done to one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridengine.reshard.audit import audit, audit_return, union_elements
from hybridengine.reshard.boxes import Box
from hybridengine.reshard.megatron import megatron_layout
from hybridengine.reshard.planner import compile_plan, inverse_local
from hybridengine.reshard.vllm import vllm_layout
from hybridengine.topology.generation import GenerationGrid, Grouping
from hybridengine.topology.grid import Grid, RankOrder
from hybridengine.topology.links import NodeMap
from hybridengine.topology.sizes import GenSizes, TrainSizes
from tests.unit.plan_cases import FAMILIES, general_shape

ROOT = Path(__file__).parents[2]
MAX_RANKS = 16


def grids(p: int, t: int) -> Iterator[GenerationGrid]:
    """Every generation grid over (p, t, d) whose engines share out up to MAX_RANKS ranks, in both orders and groupings."""
    for d in range(1, MAX_RANKS // (p * t) + 1):
        sizes = TrainSizes(p, t, d)
        for p_g, t_g in product(range(1, sizes.num_ranks + 1), repeat=2):
            if sizes.num_ranks % (p_g * t_g) == 0:
                for order, grouping in product(RankOrder, Grouping):
                    yield GenerationGrid(Grid(sizes, order), GenSizes(p_g, t_g), grouping)


def distinct_domains(p: int, t: int) -> Iterator[tuple[GenerationGrid, tuple[int, ...], NodeMap]]:
    """Domains, with the nodes of their ranks, that differ in more than the names of ranks.

    What a domain's plan is made of: the coordinates of its ranks in both layouts, and which of them share a node.
    """
    seen = set()
    for turn, generation in enumerate(grids(p, t)):
        num_ranks = generation.train.num_ranks
        nodes = NodeMap.uniform(num_ranks, (num_ranks, 2, 4, 3)[turn % 4])
        places = [
            (generation.train.coordinate(rank), generation.coordinate(rank)) for rank in range(num_ranks)
        ]
        for domain in generation.domains:
            first_seen: dict[int, int] = {}
            content = tuple(
                (
                    *(places[rank][0].pp_rank, places[rank][0].tp_rank),
                    *(places[rank][1].pp_rank, places[rank][1].tp_rank),
                    first_seen.setdefault(nodes.node_of(rank), len(first_seen)),
                )
                for rank in domain
            )
            if (generation.sizes, content) not in seen:
                seen.add((generation.sizes, content))
                yield generation, domain, nodes


PAIRS = [(p, t) for p, t in product(range(1, MAX_RANKS + 1), repeat=2) if p * t <= MAX_RANKS]


@pytest.mark.parametrize(("p", "t"), PAIRS)
def test_every_plan_on_up_to_16_ranks_passes(p: int, t: int) -> None:
    """All (d, p_g, t_g, rank order, grouping); families, ties, nodes, bucket and message sizes take turns.

    Up to 8 ranks every family has a plan of its own.
    """
    turns = count()
    for generation, domain, nodes in distinct_domains(p, t):
        families = FAMILIES if generation.train.num_ranks <= 8 else (FAMILIES[next(turns) % 3],)
        for family in families:
            turn = next(turns)
            shape = general_shape(family, turn % 2 == 0, generation.train.sizes, generation.sizes, turn // 2)
            plan = compile_plan(
                megatron_layout(shape, generation.train),
                vllm_layout(shape, generation),
                domain,
                bucket_elements=(1, 700, 10**6)[turn % 3],
                nodes=nodes,
                direct_elements=(1, 30, 10**9)[turn // 3 % 3],
            )
            assert audit(plan) == [], f"{generation} {shape}"
            assert audit_return(plan, inverse_local(plan)) == [], f"{generation} {shape}"

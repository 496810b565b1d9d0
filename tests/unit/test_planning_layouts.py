"""Valid layouts, and the rules that invalid ones break."""

from __future__ import annotations

import re

import pytest

from hybridengine.errors import TopologyError
from hybridengine.models.presets import PRESETS
from hybridengine.planning.search.layouts import check_layouts, generation_sizes
from hybridengine.topology.sizes import GenSizes, TrainSizes

LLAMA = PRESETS["llama3-70b"].shape()


@pytest.mark.parametrize(
    ("train", "gen"),
    [("8-8-16", "1-8"), ("80-1-1", "1-1"), ("1-8-2", "1-16"), ("3-8-1", "2-4"), ("1-1-64", "1-64")],
)
def test_layouts_that_can_be(train: str, gen: str) -> None:
    check_layouts(LLAMA, TrainSizes.parse(train), GenSizes.parse(gen))


@pytest.mark.parametrize(
    ("train", "gen", "parts"),
    [
        ("8-6-16", "1-8", ["training 8-6-16", "t=6 does not divide num_heads=64; choose 1, 2, 4 or 8"]),
        ("8-16-8", "1-8", ["t=16 does not divide num_kv_heads=8"]),
        ("160-8-1", "1-8", ["p=160 pipeline stages", "num_layers=80", "choose p <= 80"]),
        (
            "8-8-16",
            "3-8",
            ["generation 3-8", "24 ranks do not divide the 1024", "choose p_g·t_g from 1, 2, 4"],
        ),
        (
            "8-8-16",
            "1-128",
            ["generation 1-128", "t_g=128 does not divide num_heads=64", "choose t_g from"],
        ),
        ("1-1-256", "128-1", ["p_g=128 pipeline stages", "choose p_g <= 80"]),
    ],
)
def test_layouts_that_cannot_be_name_the_rule(train: str, gen: str, parts: list[str]) -> None:
    with pytest.raises(TopologyError) as raised:
        check_layouts(LLAMA, TrainSizes.parse(train), GenSizes.parse(gen))
    for part in parts:
        assert part in str(raised.value)
    assert "\n" not in str(raised.value)


def test_generation_sizes_to_sweep_against_every_pair() -> None:
    """All (p_g, t_g) within a replica or a node of 8, with t_g at most that node, whose engines divide the ranks."""
    train = TrainSizes(6, 4, 2)
    # t_g = 3, 6 and their multiples do not divide the 64 heads.
    expected = {(p_g, t_g) for p_g in range(1, 25) for t_g in (1, 2, 4, 8) if 48 % (p_g * t_g) == 0}
    expected = {(p_g, t_g) for p_g, t_g in expected if p_g * t_g <= 24}
    found = [(sizes.pp_size, sizes.tp_size) for sizes in generation_sizes(LLAMA, train, 8)]
    assert sorted(found) == sorted(expected)
    assert (3, 8) in expected
    assert max(sizes.tp_size for sizes in generation_sizes(LLAMA, train, 2)) == 4
    qwen = PRESETS["qwen2.5-7b"].shape()  # 28 heads, 4 KV heads: t_g = 8 is impossible
    assert {sizes.tp_size for sizes in generation_sizes(qwen, TrainSizes(1, 4, 2), 8)} == {1, 2, 4}
    mixture = PRESETS["qwen3-30b-a3b"].shape()  # 4 KV heads, 128 experts: whole ones, or shards
    found = {str(sizes) for sizes in generation_sizes(mixture, TrainSizes(1, 4, 1), 4)}
    assert found == {"1-1", "2-1", "4-1", "1-2", "1-2 e=2", "2-2", "2-2 e=2", "1-4", "1-4 e=4"}


def test_sizes_that_are_none_stay_an_error() -> None:
    with pytest.raises(TopologyError, match=re.escape("tp_size=0 must be a positive integer")):
        check_layouts(LLAMA, TrainSizes(1, 0, 1))

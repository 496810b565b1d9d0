"""Layouts compared with shards cut in plain numpy, and with the number of copies that each weight must have."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from hybridengine.errors import PlanError
from hybridengine.families import registry as families
from hybridengine.families.family import NameSet
from hybridengine.models.shapes import ModelShape
from hybridengine.reshard.layout import Layout, Shard, hf_layout
from hybridengine.reshard.megatron import megatron_layout, padded_vocab_size
from hybridengine.reshard.vllm import vllm_layout
from hybridengine.topology.generation import GenerationGrid, Grouping
from hybridengine.topology.grid import Grid, RankOrder
from hybridengine.topology.sizes import GenSizes, TrainSizes
from tests.unit.numpy_shards import (
    EXPERTS,
    MEGATRON_NORMS,
    Arrays,
    assert_same,
    cut_shard,
    holders,
    is_replicated,
    megatron_qkv,
    megatron_reference,
    numbered,
    small_shape,
    vllm_reference,
)

FAMILIES = tuple(families.FAMILIES)
VOCABS = (64, 131, 193)
"""A multiple of the padding; one with a share of pure padding only at t=4; one whose last share is mostly padding."""
DEGREES = (1, 2, 4)


def shapes() -> list[ModelShape]:
    """Return every family, tied and untied, with 5 layers, which 2 and 4 do not divide; vocabularies take turns."""
    return [
        small_shape(family, tied=tied, vocab=VOCABS[turn % 3])
        for turn, (family, tied) in enumerate(product(FAMILIES, (False, True)))
    ]


def megatron_locals(shape: ModelShape, layout: Layout) -> dict[int, Arrays]:
    tensors = numbered(shape)
    return {rank: cut_shard(layout.shard(rank), tensors) for rank in layout.keys}


def is_embedding_or_head(name: str) -> bool:
    return "word_embeddings" in name or "output_layer" in name


def range_of(shape: ModelShape, tensor: str) -> slice:
    """Return the places of a tensor's elements in an array over all elements."""
    before = 0
    for name, size in shape.tensors.items():
        if name == tensor:
            return slice(before, before + math.prod(size))
        before += math.prod(size)
    raise KeyError(tensor)


@pytest.mark.parametrize("names", list(NameSet))
@pytest.mark.parametrize(("p", "t"), list(product(DEGREES, DEGREES)))
def test_megatron_layout_equals_shards_cut_in_numpy(p: int, t: int, names: NameSet) -> None:
    for shape in shapes():
        tensors = numbered(shape)
        grid = Grid(TrainSizes(p, t, 1))
        layout = megatron_layout(shape, grid, names)
        for rank in range(p * t):
            place = grid.coordinate(rank)
            expected = megatron_reference(shape, tensors, place.pp_rank, p, place.tp_rank, t, names.value)
            assert_same(cut_shard(layout.shard(rank), tensors), expected, f"{shape} rank {rank}")


@pytest.mark.parametrize(("p", "t"), list(product(DEGREES, DEGREES)))
def test_every_megatron_element_is_held_as_often_as_megatron_replicates_it(p: int, t: int) -> None:
    for shape in shapes():
        held = megatron_locals(shape, megatron_layout(shape, Grid(TrainSizes(p, t, 1))))
        count = holders(held, shape.num_parameters)
        for tensor in shape.tensors:
            if is_replicated(tensor):
                expected = t  # replicated over tensor shards
            elif tensor == "model.embed_tokens.weight" and shape.tied_embeddings and p > 1:
                expected = 2  # the first stage's embedding and the last stage's head
            else:
                expected = 1
            assert (count[range_of(shape, tensor)] == expected).all(), (shape, tensor)


@pytest.mark.parametrize(("p", "t"), [(1, 4), (2, 2), (4, 1)])
def test_only_vocabularies_are_padded(p: int, t: int) -> None:
    for shape in shapes():
        layout = megatron_layout(shape, Grid(TrainSizes(p, t, 1)))
        padding = {"embedding.word_embeddings.weight": 0, "output_layer.weight": 0}
        for rank, local in megatron_locals(shape, layout).items():
            for name, values in local.items():
                assert layout.shard(rank).by_name[name].has_padding == (0 in values)
                if is_embedding_or_head(name):
                    padding[name] += int((values == 0).sum())
                else:
                    assert 0 not in values, name
        rows = {64: 64, 131: 192, 193: 256}[shape.vocab_size] - shape.vocab_size
        has_head = not shape.tied_embeddings or p > 1
        assert padding == {
            "embedding.word_embeddings.weight": rows * shape.hidden_size,
            "output_layer.weight": rows * shape.hidden_size * has_head,
        }


def test_padded_vocabulary_is_the_least_multiple() -> None:
    for vocab, tp_size in product((1, 63, 64, 65, 131, 151936, 128256, 49152), (1, 2, 3, 4, 5, 6, 8, 16)):
        rows = next(n for n in range(vocab, vocab + 64 * 16 + 1) if n % 64 == 0 and n % tp_size == 0)
        assert padded_vocab_size(vocab, tp_size) == rows


def test_replicas_hold_equal_shards_in_both_rank_orders() -> None:
    shape = small_shape("qwen2")
    tensors = numbered(shape)
    for order in RankOrder:
        grid = Grid(TrainSizes(2, 2, 2), order)
        layout = megatron_layout(shape, grid)
        for rank in range(8):
            place = grid.coordinate(rank)
            expected = megatron_reference(shape, tensors, place.pp_rank, 2, place.tp_rank, 2)
            assert_same(cut_shard(layout.shard(rank), tensors), expected, f"{order} rank {rank}")


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(8, 8), (8, 4), (8, 2), (12, 4), (6, 2)])
def test_fused_qkv_rows_by_head(num_heads: int, num_kv_heads: int) -> None:
    """Each block of rows is one head: q0 q1 k0 v0 q2 q3 k1 v1 for two query heads per group."""
    shape = replace(small_shape("qwen2", kv_heads=num_kv_heads), num_heads=num_heads)
    tensors = numbered(shape)
    heads_per_group = num_heads // num_kv_heads
    for t in (t for t in (1, 2, 4) if num_kv_heads % t == 0):
        layout = megatron_layout(shape, Grid(TrainSizes(1, t, 1)))
        for kind in ("weight", "bias"):
            q, k, v = (tensors[f"model.layers.0.self_attn.{x}_proj.{kind}"] for x in "qkv")
            blocks = []
            for group in range(num_kv_heads):
                first = group * heads_per_group
                blocks += [q[2 * head : 2 * head + 2] for head in range(first, first + heads_per_group)]
                blocks += [k[2 * group : 2 * group + 2], v[2 * group : 2 * group + 2]]
            fused = np.concatenate(blocks)
            assert np.array_equal(megatron_qkv(shape, q, k, v), fused)
            name = f"decoder.layers.0.self_attention.linear_qkv.{kind}"
            parts = [cut_shard(layout.shard(rank), tensors)[name] for rank in range(t)]
            assert np.array_equal(np.concatenate(parts), fused)


def test_critic_has_a_score_head_on_every_tensor_rank_of_the_last_stage() -> None:
    for family, (p, t), num_labels in product(FAMILIES, ((1, 2), (2, 2)), (1, 3)):
        shape = small_shape(family, num_labels=num_labels)
        tensors = numbered(shape)
        grid = Grid(TrainSizes(p, t, 1))
        layout = megatron_layout(shape, grid)
        for rank in range(p * t):
            place = grid.coordinate(rank)
            local = cut_shard(layout.shard(rank), tensors)
            assert_same(local, megatron_reference(shape, tensors, place.pp_rank, p, place.tp_rank, t), family)
            assert ("output_layer.weight" in local) == (place.pp_rank == p - 1)
            if place.pp_rank == p - 1:
                assert local["output_layer.weight"].shape == (num_labels, shape.hidden_size)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in EXPERTS])
def test_name_sets_of_dense_families_differ_in_two_norms_only(family: str) -> None:
    shape = small_shape(family)
    local, fused = (megatron_layout(shape, Grid(TrainSizes(2, 2, 1)), names) for names in NameSet)
    renamed = dict(zip(MEGATRON_NORMS["local"], MEGATRON_NORMS["transformer_engine"], strict=True))
    for rank in range(4):
        ours, theirs = local.shard(rank).parameters, fused.shard(rank).parameters
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            name = one.name
            for old, new in renamed.items():
                if name.startswith("decoder.layers.") and name.split(".", 3)[3] == old:
                    name = name.replace(old, new)
            assert name == other.name
            assert (one.shape, one.pieces) == (other.shape, other.pieces)
    names = [parameter.name for parameter in fused.shard(0).parameters]
    assert sum(name.endswith("layer_norm_weight") for name in names) == 2 * 3  # first stage: 3 of 5 layers


@pytest.mark.parametrize(
    ("p", "t", "p_g", "t_g"),
    [
        (p, t, p_g, t_g)
        for p, t in product(DEGREES, DEGREES)
        for p_g, t_g in product(DEGREES, DEGREES)
        if p % p_g == 0 and t % t_g == 0
    ],
)
def test_vllm_layout_equals_shards_concatenated_in_numpy(p: int, t: int, p_g: int, t_g: int) -> None:
    untied, tied = shapes()[::2], shapes()[1::2]
    for shape in tied if p > p_g or t > t_g else untied:
        generation = GenerationGrid(Grid(TrainSizes(p, t, 1)), GenSizes(p_g, t_g))
        assert_vllm_layout(shape, generation)


def assert_vllm_layout(shape: ModelShape, generation: GenerationGrid) -> None:
    """Assert that every rank has the engine's parameters; ranks at one place share an object, which is compared once."""
    tensors, layout, compared = (
        numbered(shape),
        vllm_layout(shape, generation),
        dict[tuple[int, ...], Shard](),
    )
    p, (p_g, t_g) = generation.train.sizes.pp_size, (size for _, size in generation.sizes.items())
    for rank in range(generation.num_ranks):
        place, shard = generation.coordinate(rank), layout.shard(rank)
        if compared.get((place.pp_rank, place.tp_rank)) is not shard:
            compared[place.pp_rank, place.tp_rank] = shard
            expected = vllm_reference(shape, tensors, place.pp_rank, p, p_g, place.tp_rank, t_g)
            assert_same(cut_shard(shard, tensors), expected, f"{shape} rank {rank}")


# p, t, d, p_g, t_g: wider tensor parallelism with a KV head for two, four and eight ranks, and unnested stages.
GENERAL = [
    (1, 2, 2, 1, 4),
    (1, 2, 4, 1, 8),
    (2, 2, 2, 1, 8),
    (2, 2, 2, 2, 4),
    (1, 1, 8, 1, 8),
    (1, 1, 8, 2, 4),
    (3, 1, 2, 2, 1),
    (3, 1, 4, 2, 2),
    (2, 1, 3, 3, 1),
    (2, 2, 1, 4, 1),
]


@pytest.mark.parametrize(("p", "t", "d", "p_g", "t_g"), GENERAL)
@pytest.mark.parametrize("grouping", list(Grouping))
def test_general_vllm_layouts_equal_shards_cut_in_numpy(
    p: int, t: int, d: int, p_g: int, t_g: int, grouping: Grouping
) -> None:
    generation = GenerationGrid(Grid(TrainSizes(p, t, d)), GenSizes(p_g, t_g), grouping)
    heads = ((2, 8), (4, 4), (8, 2))  # KV heads, query heads of each; every family has one of them here
    for turn, family in enumerate(FAMILIES):
        kv_heads, heads_per_group = heads[(turn + p + t_g + len(grouping.value)) % 3]
        shape = small_shape(
            family, tied=(turn + d) % 2 == 0, kv_heads=kv_heads, heads_per_group=heads_per_group
        )
        assert_vllm_layout(shape, generation)


@pytest.mark.parametrize("kind", ["weight", "bias"])
def test_kv_heads_are_copied_to_consecutive_ranks(kind: str) -> None:
    """8 ranks, 2 KV heads of 2 rows: ranks 0 to 3 hold the first of each, ranks 4 to 7 the second."""
    shape = small_shape("qwen2", kv_heads=2, heads_per_group=8)
    layout = vllm_layout(shape, GenerationGrid(Grid(TrainSizes(1, 1, 8)), GenSizes(1, 8)))
    prefix = "model.layers.0.self_attn."
    for rank in range(8):
        pieces = layout.shard(rank).by_name[f"{prefix}qkv_proj.{kind}"].pieces
        assert [(piece.tensor, piece.box[0]) for piece in pieces] == [
            (f"{prefix}q_proj.{kind}", (4 * rank, 4 * rank + 4)),
            (f"{prefix}k_proj.{kind}", (0, 2) if rank < 4 else (2, 4)),
            (f"{prefix}v_proj.{kind}", (0, 2) if rank < 4 else (2, 4)),
        ]


def test_a_model_that_vllm_cannot_hold_is_refused_with_every_reason() -> None:
    shape = small_shape(kv_heads=4, layers=5)  # 8 heads, 12 MLP rows
    with pytest.raises(PlanError) as caught:
        vllm_layout(shape, GenerationGrid(Grid(TrainSizes(1, 4, 12)), GenSizes(8, 6)))
    assert str(caught.value).splitlines() == [
        "3 problems:",
        "  1. p_g=8 pipeline stages need as many layers, the model has num_layers=5; choose p_g <= 5",
        "  2. t_g=6 does not divide num_heads=8; choose t_g from 1, 2 or 4",
        "  3. t_g=6 neither divides num_kv_heads=4 nor is a multiple of it; choose t_g from 1, 2 or 4",
    ]


def test_every_engine_holds_the_whole_model() -> None:
    for shape, (p, t, p_g, t_g) in product(shapes(), ((1, 4, 1, 2), (4, 2, 2, 2), (4, 1, 2, 1))):
        tensors = numbered(shape)
        generation = GenerationGrid(Grid(TrainSizes(p, t, 2)), GenSizes(p_g, t_g))
        layout = vllm_layout(shape, generation)
        for engine in generation.groups("tp", "pp"):
            local = {rank: cut_shard(layout.shard(rank), tensors) for rank in engine}
            split = holders(local, shape.num_parameters, keep=lambda name: not is_replicated(name))
            norms = holders(local, shape.num_parameters, keep=is_replicated)
            for tensor in shape.tensors:
                twice = tensor == "model.embed_tokens.weight" and shape.tied_embeddings and p_g > 1
                count, expected = (norms, t_g) if is_replicated(tensor) else (split, 1 + twice)
                assert (count[range_of(shape, tensor)] == expected).all(), (shape, tensor)


@pytest.mark.parametrize(("vocab", "t_g"), [(128, 3), (64, 3), (131, 3), (320, 5), (320, 6), (448, 7)])
def test_vocabularies_that_vllm_cannot_share_out_are_refused(vocab: int, t_g: int) -> None:
    """vLLM pads to a multiple of 64 and requires that t_g divides the result; no row may be lost on the way."""
    shape = small_shape(vocab=vocab, kv_heads=t_g)
    generation = GenerationGrid(Grid(TrainSizes(1, t_g, 1)), GenSizes(1, t_g))
    if -(-vocab // 64) * 64 % t_g == 0:
        tensors, layout = numbered(shape), vllm_layout(shape, generation)
        local = {rank: cut_shard(layout.shard(rank), tensors) for rank in range(t_g)}
        assert holders(local, shape.num_parameters).min() == 1
    else:
        with pytest.raises(PlanError, match=f"vocab_size={vocab}"):
            vllm_layout(shape, generation)


def test_generation_stages_join_training_stages() -> None:
    shape = small_shape(layers=7)
    assert shape.gen_stage_layers(4, 1) == (range(7),)
    assert shape.gen_stage_layers(4, 2) == (range(4), range(4, 7))
    assert shape.gen_stage_layers(4, 4) == (range(2), range(2, 4), range(4, 6), range(6, 7))
    assert small_shape(layers=5).gen_stage_layers(4, 2) == (range(3), range(3, 5))


def test_generation_stages_that_cannot_nest_are_as_even_as_those_of_training() -> None:
    shape = small_shape(layers=7)
    assert shape.gen_stage_layers(3, 2) == (range(4), range(4, 7))
    assert shape.gen_stage_layers(1, 3) == (range(3), range(3, 5), range(5, 7))


def test_hugging_face_layout_holds_every_tensor_whole() -> None:
    shape = small_shape("qwen3", tied=True)
    layout = hf_layout(shape, ranks=(0, 3))
    for rank in (0, 3):
        assert_same(cut_shard(layout.shard(rank), numbered(shape)), numbered(shape), f"rank {rank}")
    with pytest.raises(
        PlanError, match=r"^rank 1 is not part of the layout hugging face; its ranks are \[0, 3\]$"
    ):
        layout.shard(1)


def test_shards_count_their_elements_with_padding() -> None:
    shape = small_shape(vocab=131)
    shard = megatron_layout(shape, Grid(TrainSizes(1, 2, 1))).shard(1)
    expected = megatron_reference(shape, numbered(shape), 0, 1, 1, 2)
    assert shard.num_elements == sum(values.size for values in expected.values())


def test_a_tensor_size_that_does_not_shard_the_model_is_refused() -> None:
    shape = ModelShape.from_folder("configs/models/smollm2-135m-instruct.json")
    with pytest.raises(PlanError, match="t=4 does not divide num_heads=9; choose 1 or 3"):
        megatron_layout(shape, Grid(TrainSizes(1, 4, 1)))

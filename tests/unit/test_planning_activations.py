"""Activations, passes in flight and copies in FP8, compared with sums of tensors written out."""

from __future__ import annotations

from dataclasses import replace

from hybridengine.backends.predictions import BLOCK_ENTRIES
from hybridengine.config.role_sections import MegatronSettings
from hybridengine.models.shapes import ModelShape
from hybridengine.planning.costs.activations import activation_bytes
from hybridengine.planning.costs.lengths import MicroBatches
from hybridengine.planning.costs.memory import model_memory
from hybridengine.topology.sizes import TrainSizes

SHAPE = ModelShape("llama", 6, 256, 512, 8, 4, 32, 1000, 4096)


def test_activations_of_a_layer_are_those_of_its_tensors() -> None:
    """Sums over tensors, written out: what is kept, and the fullest moment of the last layer's backward pass."""
    micro, t, tokens = MicroBatches(8, 100.0, 40.0, 50.0), 2, 100
    sizes = TrainSizes(3, t, 1)
    hidden, ffn = 2 * 256 / t, 2 * 512 / t
    # In float32: of a norm, and of each query's heads. The norm's output belongs to the MLP, its input is a layer's own.
    attention = 3 * hidden + 2 * (2 * 256 + 2 * 128) / t + (4 + 8 * 4) / t
    mlp = hidden + 4 / t + 3 * ffn
    layer, backward = attention + mlp, hidden + max(ffn + 512, 2 * ffn, 2 * 512 - ffn)
    norm, outputs, width = hidden * tokens, 40 * 256 * 2, 1000 / t
    logits = (4 + 4 + 2) * 40 * width
    head = norm + 2 * outputs + logits + (4 + 2) * 256 * width
    for recompute, kept, again in (
        ("none", layer, 0.0),
        ("selective", attention, mlp + hidden),
        ("full", hidden, layer),
    ):
        used = MegatronSettings.model_validate({"recompute": recompute})
        found = activation_bytes(SHAPE, sizes, "bfloat16", micro, used, trains=True)
        working = (again + backward) * tokens
        first, last = 3 * (2 * kept + hidden) * tokens + working, 2 * kept * tokens + max(head, working)
        assert found == int(max(first, last)), recompute
    forward = (2 * hidden + max(3 * ffn, 512 + 2 * ffn, ffn + 512)) * tokens
    inferred = activation_bytes(SHAPE, sizes, "bfloat16", micro, trains=False)
    assert inferred == int(max(forward, norm + outputs + logits))
    many = MicroBatches(1, 100.0, 1e6, 50.0)
    inferred = activation_bytes(SHAPE, sizes, "bfloat16", many, trains=False)
    assert inferred == int(norm + 1e6 * 256 * 2 + 10 * BLOCK_ENTRIES)


def test_activations_with_context_ranks_and_virtual_stages() -> None:
    """The first of 3 stages with 2 layers keeps the activations of 6, or of 9 with blocks of a layer (4 + 5 passes)."""
    micro = MicroBatches(8, 100.0, 0.0, 50.0)
    hidden, ffn = 2 * 256, 2 * 512
    one = 4 * hidden + 2 * 4 + 2 * (2 * 256 + 2 * 128) + 8 * 4 + 3 * ffn
    for sizes, num_layers, num_hidden, tokens in (
        (TrainSizes(3, 1, 1), 6, 3, 100),
        (TrainSizes(3, 1, 1, 2), 6, 3, 50),
        (TrainSizes(3, 1, 1, 1, 2), 9, 9 + 2, 100),
    ):
        found = activation_bytes(SHAPE.with_score_head(), sizes, "bfloat16", micro, trains=True)
        kept = one * num_layers + hidden * num_hidden  # with outputs, and messages on their way
        assert found == (kept + hidden + 2 * ffn) * tokens, sizes
    spread = model_memory(SHAPE, TrainSizes(3, 1, 2, 4), "bfloat16")
    assert spread.optimizer_bytes == model_memory(SHAPE, TrainSizes(3, 1, 8), "bfloat16").optimizer_bytes


def test_norms_of_queries_and_keys_keep_their_inputs() -> None:
    micro, sizes = MicroBatches(1, 100.0, 0.0, 50.0), TrainSizes(1, 1, 1)
    plain, normed = (
        activation_bytes(
            replace(SHAPE, family=family).with_score_head(), sizes, "float32", micro, trains=True
        )
        for family in ("llama", "qwen3")
    )
    assert normed - plain == 6 * 100 * (4 * (256 + 128) + 4 * (8 + 4))


def test_passes_in_flight() -> None:
    """As many as Megatron-core's schedules begin before the first backward pass ends."""
    plain, virtual = TrainSizes(4, 1, 1), TrainSizes(4, 1, 1, 1, 2)
    assert [plain.passes_in_flight(8, stage) for stage in range(4)] == [4, 3, 2, 1]
    assert plain.passes_in_flight(2, 0) == 2
    assert [virtual.passes_in_flight(8, stage) for stage in range(4)] == [11, 9, 7, 5]
    assert virtual.passes_in_flight(10, 0) == 7 + 5, "groups of 5 leave no rest below p"
    assert virtual.passes_in_flight(2, 0) == 8, "filled up to p micro-batches of two blocks each"


def test_copies_of_weights_in_fp8() -> None:
    """A copy by rows and one by columns of a stage's matrices, beside the state until generation begins."""
    sizes = TrainSizes(3, 2, 1)
    matrices = 2 * (256 * (256 + 2 * 128) + 256 * 256 + 3 * 256 * 512) // 2
    plain = model_memory(SHAPE, sizes, "bfloat16").states(is_actor=True, offload="optimizer")
    for recipe, num_bytes in (("tensorwise", 2), ("mxfp8", 2 * 33 / 32)):
        used = MegatronSettings.model_validate({"fp8": recipe})
        found = model_memory(SHAPE, sizes, "bfloat16", used).states(is_actor=True, offload="optimizer")
        assert found.idle - plain.idle == found.update - plain.update == int(num_bytes * matrices)
        assert found.generating == plain.generating
    assert model_memory(SHAPE, sizes, "bfloat16", used, trains=False).fp8_bytes == 0

"""Costs of passes, generation and memory, compared with sums written out for small cases and with general laws."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from hybridengine.config import load_config
from hybridengine.errors import ConfigError
from hybridengine.models.presets import resolve_model
from hybridengine.models.shapes import ModelShape
from hybridengine.planning.costs.clusters import Cluster, Compute
from hybridengine.planning.costs.dataflows import Work
from hybridengine.planning.costs.decoding import Engine, knee, running_steps
from hybridengine.planning.costs.lengths import Lengths, MicroBatches, counted
from hybridengine.planning.costs.memory import (
    generation_holding,
    layer_weights,
    model_memory,
    training_holding,
)
from hybridengine.planning.costs.passes import ModelPasses
from hybridengine.planning.costs.workload import workload_of
from hybridengine.planning.simulation.scenarios import steady_state
from hybridengine.reshard.megatron import megatron_layout
from hybridengine.reshard.vllm import vllm_layout
from hybridengine.rows.micro_batches import cut_rows
from hybridengine.topology.generation import GenerationGrid
from hybridengine.topology.grid import Grid
from hybridengine.topology.sizes import GenSizes, TrainSizes

SHAPE = ModelShape("llama", 6, 256, 512, 8, 4, 32, 1000, 4096)
SHAPES = [SHAPE, ModelShape("qwen2", 7, 256, 512, 8, 8, 32, 96, 4096, tied_embeddings=True)]


def plain_cluster(**compute: object) -> Cluster:
    """Return a cluster with one operation and one byte per nanosecond; everything else takes no time by default."""
    zeros = dict.fromkeys(
        [
            "half_tokens",
            "activation_passes",
            "layer_s",
            "micro_batch_s",
            "decode_step_s",
            "decode_row_s",
            "decode_layer_s",
            "parameter_s",
            "optimizer_step_s",
            "call_s",
        ],
        0.0,
    )
    rates = {"flops_per_s": {"bfloat16": 1e9, "float32": 1e9}, "efficiency": 1.0, "attention_efficiency": 1.0}
    link = {"bytes_per_s": 1e9, "latency_s": 0.0}
    return Cluster.model_validate(
        {
            "name": "plain",
            "source": "made up",
            "nodes": 4,
            "devices_per_node": 4,
            "device_memory_bytes": 2**40,
            "links": {"same_device": link, "same_node": link, "between_nodes": link},
            "compute": zeros | rates | compute,
        }
    )


@pytest.mark.parametrize("shape", SHAPES, ids=["llama", "qwen2"])
@pytest.mark.parametrize(("p", "t"), itertools.product([1, 2, 3, 4], [1, 2, 4]))
def test_holdings_are_those_of_the_layouts(shape: ModelShape, p: int, t: int) -> None:
    grid = Grid(TrainSizes(p, t, 2))
    shards = megatron_layout(shape, grid).shards.values()
    held = training_holding(shape, TrainSizes(p, t, 1))
    assert held.num_elements == max(shard.num_elements for shard in shards)
    assert held.num_parameters == max(len(shard.parameters) for shard in shards)
    memory = model_memory(shape, grid.sizes, "bfloat16")
    assert (memory.weights_bytes, memory.gradients_bytes) == (2 * held.num_elements, 4 * held.num_elements)
    assert memory.optimizer_bytes == 12 * held.num_elements / 2
    for p_g, t_g in itertools.product(range(1, p + 1), range(1, t + 1)):
        if p % p_g or t % t_g:
            continue
        shards = vllm_layout(shape, GenerationGrid(grid, GenSizes(p_g, t_g))).shards.values()
        expected = max(shard.num_elements for shard in shards)
        assert generation_holding(shape, p, GenSizes(p_g, t_g)).num_elements == expected


def test_a_forward_pass_is_two_operations_for_each_weight_and_token() -> None:
    """Four more for each pair of positions and column of the queries; the head counts only if logits are wanted."""
    passes = ModelPasses(SHAPE, TrainSizes(1, 1, 1), "bfloat16", plain_cluster())
    micro = MicroBatches(3, 200.0, 80.0, 50.0)
    weights = 6 * (256 * (8 + 4 + 4 + 8) * 32 + 3 * 256 * 512)
    assert 6 * layer_weights(SHAPE).of_token == weights
    operations = 2 * 200 * weights + 2 * 80 * 256 * 1000 + 4 * 200 * 50 * 256 * 6
    found = passes.forward(micro)
    assert found.path_s == pytest.approx(3 * operations / 1e9)
    assert found.work_s == pytest.approx(found.path_s)


@pytest.mark.parametrize("p", [1, 2, 3, 6])
@pytest.mark.parametrize("count", [1, 4, 9])
def test_a_pipeline_has_bubbles_and_its_slowest_stage_sets_the_pace(p: int, count: int) -> None:
    cluster = plain_cluster(flops_per_s={"bfloat16": 1e18}, layer_s=0.5)
    passes = ModelPasses(SHAPE, TrainSizes(p, 1, 1), "bfloat16", cluster)
    micro = MicroBatches(count, 1.0, 1.0, 1.0)
    slot, messages = 6 / p * 0.5, 256 * 2 / 1e9 * (p > 1)
    assert passes.forward(micro).path_s == pytest.approx((count + p - 1) * (slot + messages))
    assert passes.forward(micro).work_s == pytest.approx(count * (slot + messages))
    both = passes.update(micro, num_steps=5, num_passes=2)
    assert both.path_s == pytest.approx(10 * (count + p - 1) * 3 * slot, rel=0.05)
    recomputed = passes.update(micro, num_steps=1, recompute="full")
    assert recomputed.path_s == pytest.approx((count + p - 1) * 4 * slot, rel=0.05)


def test_uneven_stages_wait_for_the_slowest_and_pass_the_first_micro_batch_on() -> None:
    """7 layers on 3 stages: 3, 2 and 2 (or as the shape says); 5 micro-batches, without the time of messages."""
    shape = ModelShape("llama", 7, 256, 512, 8, 4, 32, 1000, 4096, num_labels=1)
    cluster = plain_cluster(flops_per_s={"bfloat16": 1e18}, layer_s=0.5)
    stages = [0.5 * len(layers) for layers in shape.split_layers(3)]
    assert sorted(stages) == [1.0, 1.0, 1.5]
    ends = [[0.0] * 3 for _ in range(6)]  # of each micro-batch on each stage, counted from 1
    for micro in range(1, 6):
        for stage, seconds in enumerate(stages):
            ready = ends[micro][stage - 1] if stage else 0.0
            ends[micro][stage] = max(ready, ends[micro - 1][stage]) + seconds
    found = ModelPasses(shape, TrainSizes(3, 1, 1), "bfloat16", cluster).forward(
        MicroBatches(5, 1.0, 1.0, 1.0)
    )
    assert found.path_s == pytest.approx(ends[5][2], rel=1e-4)


@pytest.mark.parametrize(("p", "v"), [(2, 2), (2, 6), (3, 2), (3, 4), (4, 3)])
@pytest.mark.parametrize("count", [1, 2, 4, 6, 7, 9])
def test_blocks_of_layers_fill_the_pipeline_sooner(p: int, v: int, count: int) -> None:
    """Played block by block in Megatron's order: groups of micro-batches pass one block of a rank after the other.

    The bubble of m micro-batches is (p - 1) / (v·m) of the rest, and fewer than p are filled up.
    """
    sizes = TrainSizes(p, 1, 1, 1, v)
    shape = ModelShape("llama", 12 * p, 256, 512, 8, 4, 32, 1000, 4096, num_labels=1)
    cluster = plain_cluster(flops_per_s={"bfloat16": 1e18}, layer_s=0.5)
    played, block_s = max(count, p), 0.5 * 12 / v
    group, firsts = sizes.passes_per_block(played), range(0, played, sizes.passes_per_block(played))
    order = [
        (micro, block)
        for first in firsts
        for block in range(v)
        for micro in range(first, min(first + group, played))
    ]
    ends: dict[tuple[int, int], float] = {}  # of each micro-batch in each of the p·v blocks
    free, done = [0.0] * p, [0] * p
    while any(number < len(order) for number in done):
        for rank in range(p):
            while done[rank] < len(order):
                micro, block = order[done[rank]]
                place = block * p + rank
                if place and (micro, place - 1) not in ends:
                    break
                free[rank] = max(free[rank], ends.get((micro, place - 1), 0.0)) + block_s
                ends[micro, place] = free[rank]
                done[rank] += 1
    passes = ModelPasses(shape, sizes, "bfloat16", cluster)
    found = passes.forward(MicroBatches(count, 1.0, 0.0, 1.0))
    assert found.path_s == pytest.approx(max(free), rel=1e-4)
    assert found.path_s == pytest.approx(played * 6.0 * (1 + (p - 1) / (v * played)), rel=1e-4)


def test_blocks_of_layers_are_launched_and_send_one_by_one() -> None:
    micro, shape = MicroBatches(8, 100.0, 0.0, 10.0), SHAPE.with_score_head()
    costly = plain_cluster(flops_per_s={"bfloat16": 1e18}, micro_batch_s=1.0)
    message_s = 100 * 256 * 2 / 1e9
    for v in (1, 3):
        passes = ModelPasses(shape, TrainSizes(2, 1, 1, 1, v), "bfloat16", costly)
        slot = v * (1.0 + message_s)
        assert passes.forward(micro).path_s == pytest.approx(slot * (8 + 1 / v), rel=1e-6)
        # Forth and back, but to no stage after the last block and before the first.
        slot = 3 * v * 1.0 + (2 * v - 1) * message_s
        free = ModelPasses(shape, passes.sizes, "bfloat16", costly).update(micro, 1).path_s
        step_s = ModelPasses(shape, TrainSizes(2, 1, 1), "bfloat16", costly)._optimizer_step_s()
        assert free - step_s == pytest.approx(slot * (8 + 1 / v), rel=1e-6)


def test_context_ranks_share_the_tokens_and_gather_keys_and_values() -> None:
    """Each rank computes as much attention; its memory traffic, head and matrix products are those of its tokens."""
    micro = MicroBatches(3, 200.0, 80.0, 50.0)
    alone = ModelPasses(SHAPE, TrainSizes(1, 1, 1), "bfloat16", plain_cluster())
    shared = ModelPasses(SHAPE, TrainSizes(1, 1, 1, 4), "bfloat16", plain_cluster())
    gathered_s = 6 * 3 / 4 * 200 * 2 * (4 * 32) * 2 / 1e9  # 6 layers, 3 of 4 parts, keys and values, 2 bytes
    assert shared.forward(micro).path_s == pytest.approx(alone.forward(micro).path_s / 4 + 3 * gathered_s)
    more_s = shared.update(micro, 1).path_s - shared._optimizer_step_s() - 3 * shared.forward(micro).path_s
    assert more_s == pytest.approx(0.0, abs=1e-9)  # keys, values and their gradients in the backward pass


def test_context_ranks_reduce_gradients_with_the_replicas() -> None:
    """c ranks beside each other on a node of 4, with p = 1: they are as cheap as replicas; further apart they are not."""
    slow = plain_cluster().model_dump()
    slow["links"]["between_nodes"] = {"bytes_per_s": 1e8, "latency_s": 0.0}
    cluster = Cluster.model_validate(slow)

    def step_s(*sizes: int) -> float:
        return ModelPasses(SHAPE, TrainSizes(*sizes), "bfloat16", cluster)._optimizer_step_s()

    assert step_s(1, 1, 1, 4) == pytest.approx(step_s(1, 1, 4))
    assert step_s(1, 1, 2, 4) == pytest.approx(step_s(1, 1, 8))
    assert (
        step_s(2, 1, 1, 4) < step_s(2, 1, 4) / 2
    )  # replicas are 2 ranks apart, on 2 nodes; the others on one


def test_tensor_shards_divide_the_arithmetic_and_pay_for_all_reduces() -> None:
    micro = MicroBatches(1, 100.0, 10.0, 10.0)
    one, four = (
        ModelPasses(SHAPE, TrainSizes(1, t, 1), "bfloat16", plain_cluster()).forward(micro) for t in (1, 4)
    )
    hidden_bytes = 100 * 256 * 2
    exchanged = 6 * 2 * 2 * hidden_bytes * 3 / 4 / 1e9
    assert four.path_s == four.work_s == pytest.approx(one.work_s / 4 + exchanged)
    late = plain_cluster(collective_s=0.125)
    waiting = ModelPasses(SHAPE, TrainSizes(1, 4, 1), "bfloat16", late).forward(micro)
    assert waiting.path_s == pytest.approx(four.path_s + 6 * 2 * 0.125)


def test_replicas_exchange_gradients_in_float32_and_weights_in_their_own_type() -> None:
    micro = MicroBatches(1, 1.0, 1.0, 1.0)
    cluster = plain_cluster(flops_per_s={"bfloat16": 1e18}, overlap=0.25)
    held = training_holding(SHAPE, TrainSizes(1, 1, 1)).num_elements
    for d in (1, 4):
        found = ModelPasses(SHAPE, TrainSizes(1, 1, d), "bfloat16", cluster).update(micro, 1)
        own = held * (30 / d + 8) / 1e9
        exchanged = 0.75 * held * (4 + 2) * (d - 1) / d / 1e9
        assert found.path_s == found.work_s == pytest.approx(own + exchanged, rel=1e-4)
    costly = plain_cluster(flops_per_s={"bfloat16": 1e18}, overlap=0.25, exchange_s=0.5)
    beside = ModelPasses(SHAPE, TrainSizes(1, 1, 4), "bfloat16", costly).update(micro, 1)
    assert beside.path_s - found.path_s == pytest.approx(
        0.5 * training_holding(SHAPE, TrainSizes(1, 1, 1)).num_parameters
    )


def test_devices_that_are_cores_share_their_work() -> None:
    """Four ranks on two cores: at least half of their work, however short the longest chain is."""
    micro = MicroBatches(2, 100.0, 10.0, 10.0)
    for p, d in ((4, 1), (1, 4)):
        sizes = TrainSizes(p, 1, d)
        found = ModelPasses(SHAPE, sizes, "bfloat16", plain_cluster()).forward(micro)
        shared = found.on(plain_cluster(devices_at_once=2), 4)
        assert shared == pytest.approx(max(found.path_s, found.work_s * 4 / 2))
        assert found.on(plain_cluster(), 4) == found.path_s


@given(
    rows=st.integers(1, 300),
    prompt=st.integers(1, 300),
    response=st.integers(1, 300),
    room=st.integers(0, 5000),
    unit=st.sampled_from([1, 2]),
)
def test_micro_batches_of_equal_rows_are_as_few_as_fit(
    rows: int, prompt: int, response: int, room: int, unit: int
) -> None:
    length = prompt + response
    max_tokens = length * unit + room
    lengths = Lengths.of(f"constant:{response}", 300)
    micro = MicroBatches.of(rows * unit, prompt, lengths, max_tokens, unit)
    together = max_tokens // (length * unit) * unit
    assert micro.count == math.ceil(rows * unit / together)
    assert micro.tokens <= max_tokens
    assert micro.count * micro.tokens == pytest.approx(rows * unit * length)
    assert micro.count * micro.response_tokens == pytest.approx(rows * unit * response)
    assert micro.length == pytest.approx(length)


@pytest.mark.parametrize("max_tokens", [120, 333, 1000, 10**6])
def test_micro_batches_are_those_of_a_run(max_tokens: int) -> None:
    """Compared with the division of a real batch with the same lengths."""
    lengths = Lengths.of("uniform:1-100", 100)
    responses = torch.tensor(lengths.spread(200))[torch.randperm(200)]
    batch = TensorDict(
        {
            "tokens": torch.zeros(200, 120, dtype=torch.long),
            "prompt_lengths": torch.full((200,), 20),
            "response_lengths": responses,
        },
        batch_size=[200],
    )
    cut = [part.columns for part in cut_rows(batch, max_tokens)]
    micro = MicroBatches.of(200, 20.0, lengths, max_tokens)
    lengths_of = [part["lengths"] for part in cut]
    tokens = sum(int(part.sum()) for part in lengths_of)
    assert (micro.count, micro.tokens) == (len(cut), pytest.approx(tokens / len(cut)))
    assert micro.response_tokens * len(cut) == pytest.approx(sum(int(part["mask"].sum()) for part in cut))
    assert micro.length == pytest.approx(sum(int((part**2).sum()) for part in lengths_of) / tokens)


@given(st.floats(1e-6, 1e3), st.floats(1e-6, 1e3), st.sampled_from([1.0, 3.0, 8.0]))
def test_the_knee_is_a_roofline_with_a_round_corner(one: float, other: float, sharpness: float) -> None:
    found = knee(one, other, sharpness)
    assert max(one, other) <= found <= 2 ** (1 / sharpness) * max(one, other) * (1 + 1e-9)
    assert found == pytest.approx((one**sharpness + other**sharpness) ** (1 / sharpness))


def test_the_slope_of_a_step_over_responses_is_a_sigmoid() -> None:
    """d ln T / d ln x = x^k / (1 + x^k): 0 where memory is the limit, 1 where arithmetic is, 1/2 where they meet."""
    for x, slope in ((1e-3, 0.0), (1.0, 0.5), (1e3, 1.0)):
        step = 1e-6
        measured = (math.log(knee(1.0, x * (1 + step), 4.0)) - math.log(knee(1.0, x, 4.0))) / math.log1p(step)
        assert measured == pytest.approx(slope, abs=1e-3)


@settings(deadline=None, max_examples=80)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=12), st.integers(1, 40), st.integers(1, 12))
def test_spans_of_an_engine_are_its_steps(lengths: list[int], num_rows: int, num_running: int) -> None:
    """Compared with an engine that advances token by token: which responses run, and how many tokens they have."""
    some = Lengths("some", counted(lengths, 30))
    found = running_steps(some, num_rows, num_running)
    waiting = some.spread(num_rows)
    order = np.argsort(np.arange(num_rows) * 0.6180339887498949 % 1.0)
    queue, running, steps, tokens = waiting[order].tolist(), [], [], 0
    while queue or running:
        while queue and len(running) < num_running:
            running.append([0, queue.pop(0)])
        steps.append((len(running), sum(made for made, _ in running)))
        tokens += len(running)
        running = [[made + 1, length] for made, length in running if made + 1 < length]
    assert found[:, 2].sum() == len(steps)
    assert (found[:, 0] * found[:, 2]).sum() == tokens == waiting.sum()
    first = 0
    for count, context, span in found.tolist():
        inside = steps[first : first + int(span)]
        assert {one for one, _ in inside} == {count}
        # The middle of a span of steps that add one token each to every running response.
        assert np.mean([made for _, made in inside]) + count / 2 == pytest.approx(context)
        first += int(span)


def test_generation_reads_weights_and_keys_and_values_every_step() -> None:
    """One response at a time, without arithmetic: the cost is a sum over its tokens."""
    engine = Engine(SHAPE, GenSizes(1, 1), 1, "bfloat16", plain_cluster(flops_per_s={"bfloat16": 1e18}), 1)
    weights = generation_holding(SHAPE, 1, GenSizes(1, 1)).num_elements - 1000 * 256
    assert engine.kv_token_bytes == 2 * 6 * 4 * 32 * 2
    expected = sum(2 * weights + (7 + made + 0.5) * engine.kv_token_bytes for made in range(20)) / 1e9
    found = engine.generate_s(3, 7.0, Lengths.of("constant:20", 64), num_running=1)
    assert found == pytest.approx(3 * expected, rel=1e-3)


def test_tensor_shards_of_an_engine_share_weights_and_cache_and_pay_for_all_reduces() -> None:
    """Prompts take two operations per weight and token; each layer has two all-reduces of a step's hidden states."""
    lengths = Lengths.of("constant:20", 64)

    def engine(t: int, flops: float) -> Engine:
        cluster = plain_cluster(flops_per_s={"bfloat16": flops})
        return Engine(SHAPE, GenSizes(1, t), 1, "bfloat16", cluster, t)

    one, two = engine(1, 1e18), engine(2, 1e18)
    assert two.kv_token_bytes == one.kv_token_bytes / 2
    read = 2 * (generation_holding(SHAPE, 1, GenSizes(1, 2)).num_elements - 500 * 256)
    exchanged = 6 * 2 * 2 * (256 * 2 / 2) / 1e9  # a ring in each direction, with half of the data each
    steps = sum((read + (7 + made + 0.5) * two.kv_token_bytes) / 1e9 + exchanged for made in range(20))
    prompts = 6 * 2 * 2 * (7 * 256 * 2 / 2) / 1e9
    assert two.generate_s(1, 7.0, lengths, num_running=1) == pytest.approx(steps + prompts, rel=1e-3)
    assert engine(1, 1e9).prefill_s(7.0) == pytest.approx(2 * 7 * 6 * layer_weights(SHAPE).of_token / 1e9)


def test_the_cache_limits_how_many_run() -> None:
    engine = Engine(SHAPE, GenSizes(1, 1), 1, "bfloat16", plain_cluster(), 1)
    lengths = Lengths.of("constant:100", 128)
    # Half of the last block of 16 is empty; the first block of a cache contains nothing.
    held, first = engine.kv_token_bytes * (10 + 50 + 7.5), engine.kv_token_bytes * 16
    assert engine.num_running(lengths, 10.0, 64, first + 5.5 * held) == 5
    assert engine.num_running(lengths, 10.0, 3, first + 5.5 * held) == 3
    assert engine.num_running(lengths, 10.0, 64, 1) == 1


def test_rows_are_padded_to_whole_parts_of_context_ranks() -> None:
    """Rows of 101 to 104 tokens; the padding counts as tokens, but neither as responses nor towards the limit."""
    lengths = Lengths.of("uniform:1-4", 4)
    plain = MicroBatches.of(4, 100.0, lengths, 205)
    padded = MicroBatches.of(4, 100.0, lengths, 205, row_unit=8)
    assert (plain.count, plain.tokens, plain.response_tokens) == (2, 205.0, 5.0)
    assert (padded.count, padded.tokens, padded.response_tokens) == (2, 208.0, 5.0)
    assert padded.length == 104.0
    assert [TrainSizes(1, 1, 1, c).row_unit for c in (1, 2, 4)] == [1, 4, 8]


def test_engines_keep_pace_or_say_how_far_they_are_behind() -> None:
    lengths = Lengths.of("constant:100", 100)
    rates = np.array([running / (0.01 + 1e-4 * running) for running in range(1, 65)])
    for engines, wanted in ((3, 400.0), (2, 800.0), (1, 12000.0)):
        found = steady_state(engines, rates, wanted, lengths, 16)
        made = engines * found.running / (0.01 + 1e-4 * found.running)
        assert found.tokens_per_s == pytest.approx(min(made, wanted))
        assert found.running == 64 if made < wanted else made >= wanted
        if made >= wanted and found.running > 1:
            fewer = found.running - 1
            assert engines * fewer / (0.01 + 1e-4 * fewer) < wanted
        step_duration = 16 * 100 / found.tokens_per_s
        assert found.staleness == pytest.approx(100 * (0.01 + 1e-4 * found.running) / step_duration)


def test_the_workload_of_a_configuration() -> None:
    config = load_config("configs/llama3-70b-16nodes.yaml", [], dry_run=True)
    found = workload_of(config, Lengths.of("constant:512", config.rollout.max_response_tokens))
    assert tuple(model.name for model in found.models) == ("actor", "critic", "reference")
    actor = found.model("actor")
    assert actor.shape == resolve_model("llama3-70b")
    assert (actor.trains, actor.offload, actor.settings.recompute, actor.mini_batches) == (
        True,
        "optimizer",
        "full",
        8,
    )
    assert (found.model("reference").trains, found.rows_per_step) == (False, 1024)
    assert found.num_tokens == 1024 * (1024 + 512)
    update = next(call for call in found.calls if call.work is Work.UPDATE and call.role == "actor")
    micro = found.micro_batches(actor, update, TrainSizes(4, 8, 4))
    assert micro.count * micro.tokens == pytest.approx(1024 / 8 / 4 * (1024 + 512))


def test_types_without_a_rate_are_named() -> None:
    compute = Compute.model_validate({"flops_per_s": {"bfloat16": 1e12}})
    assert compute.rate("bfloat16") == 1e12
    with pytest.raises(ConfigError, match=r"compute\.flops_per_s\.float32 is missing; add it"):
        compute.rate("float32")

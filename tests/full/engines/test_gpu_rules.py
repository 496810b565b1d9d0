"""The rules of tests/gpu that only a GPU's figures meet: each accepts figures as they should be, and refuses others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridengine.models.presets import PRESETS
from hybridengine.weights.ledger import SwitchReport
from tests.gpu import (
    test_decoding,
    test_divided,
    test_fp8,
    test_large_rank,
    test_log_probs,
    test_memory,
    test_start,
    test_streams,
    test_switch,
    test_training,
    test_two_ranks,
)
from tests.gpu.one_device import GIB, MIB, DeviceBytes

Case = tuple[Callable[..., None], tuple[Any, ...], list[Any], dict[str, list[Any]]]
"""A test, its parameters, one good answer to each of its calls of the device, and bad ones by what is wrong with them."""


def answering(answers: list[Any]) -> Callable[..., list[Any]]:
    """Return an `on_device` whose ranks return these figures, call after call."""
    given = iter(answers)
    return lambda num_ranks, *_, **__: [next(given)] * num_ranks


def cycle(generating: int, training: int) -> test_memory.Cycle:
    """Return a cycle in which the device has given away so many bytes more than are counted."""
    counted = 40 * GIB
    moments = [test_memory.Moment(counted + more, counted) for more in (generating, training)]
    return test_memory.Cycle(moments[0], moments[1], redundant_bytes=0, grad_norm=1.0)


WELL = cycle(2 * GIB, 3 * GIB)
CYCLES: Case = (
    test_memory.test_the_device_has_given_away_what_the_ledger_counts,
    ("none", False, ""),
    [[cycle(9 * GIB, 9 * GIB), *[WELL] * 5]],
    {
        "optimizer pins the KV cache": [[WELL, *[cycle(16 * GIB, 3 * GIB)] * 5]],
        "training keeps the KV cache": [[WELL, *[cycle(2 * GIB, 30 * GIB)] * 5]],
        "grows": [[cycle(number * 300 * MIB, GIB) for number in range(6)]],
        "held twice": [[WELL] * 5 + [replace(WELL, redundant_bytes=1)]],
    },
)

STARTED = test_start.Started(0.8, [8, 8])
START: Case = (
    test_start.test_the_engine_starts_beside_a_trainer,
    (),
    [STARTED],
    {"nothing shown": [replace(STARTED, free_share=0.95)], "silent": [replace(STARTED, num_tokens=[8, 0])]},
)

TOKENS = [[row + place for place in range(256)] for row in range(256)]
OTHER_DRAWS = [[row[0], *(token + 1 for token in row[1:])] for row in TOKENS]
EAGER, GRAPHS = test_decoding.Decoded(TOKENS, 8.0), test_decoding.Decoded(TOKENS, 4.0)
DECODING: Case = (
    test_decoding.test_graphs_are_on_by_default_and_faster,
    (),
    [EAGER, GRAPHS, replace(GRAPHS, seconds=3.0)],
    {
        "no graphs": [EAGER, replace(EAGER, seconds=7.5), GRAPHS],
        "seed of another position": [EAGER, GRAPHS, replace(GRAPHS, tokens=OTHER_DRAWS)],
        "cut": [EAGER, replace(GRAPHS, tokens=[row[:9] for row in TOKENS]), GRAPHS],
    },
)

STREAMS = test_streams.Streams(True, [], [2.0, 2.001])
STREAM: Case = (
    test_streams.test_a_step_stays_on_one_stream,
    (),
    [STREAMS],
    {
        "warned": [replace(STREAMS, warned=["The AccumulateGrad node's stream does not match"])],
        "moved": [replace(STREAMS, stays=False)],
        "other gradient": [replace(STREAMS, grad_norms=[2.0, 2.1])],
    },
)

MEASURED = test_log_probs.Measured(1e-6, 1e-3, GIB // 2, 5 * GIB, 0.4, 0.15)
LOG_PROBS: Case = (
    test_log_probs.test_logits_never_exist_together,
    (),
    [MEASURED],
    {
        "all logits": [replace(MEASURED, forward_bytes=10 * GIB)],
        "all gradients": [replace(MEASURED, backward_bytes=12 * GIB)],
        "other log-probs": [replace(MEASURED, log_prob_difference=0.1)],
        "other gradients": [replace(MEASURED, gradient_difference=0.1)],
        "small blocks": [replace(MEASURED, seconds=2.0)],
    },
)

LARGE_SHAPE = replace(PRESETS["llama3-70b"].shape(), num_layers=test_large_rank.NUM_LAYERS)
SAVED = test_large_rank.activation_bytes(LARGE_SHAPE, 8, test_large_rank.NUM_TOKENS)
NUM_PARAMETERS = 800_000_000
RANK = test_large_rank.LargeRank(
    NUM_PARAMETERS,
    1.0,
    9 * NUM_PARAMETERS,
    int(1.2 * SAVED),
    20 * GIB,
    seconds=0.07,
    product_flops_per_s=7e14,
)
WHOLE = replace(RANK, activation_bytes=int(2.7 * SAVED))
LARGE_RANK: Case = (
    test_large_rank.test_a_rank_of_70b_has_its_memory_and_speed,
    (),
    [RANK, WHOLE],
    {
        "optimizer not sharded": [replace(RANK, state_bytes=18 * NUM_PARAMETERS), WHOLE],
        "no sequence parallelism": [WHOLE, WHOLE],
        "always sequence parallelism": [RANK, RANK],
        "slow": [replace(RANK, seconds=0.3), WHOLE],
        "no gradient": [replace(RANK, grad_norm=0.0), WHOLE],
    },
)

NEVER = test_switch.Trips([(0.1, 0.05)] * 5, [40, 12, 12, 12, 12], weights_equal=True)
FIRST = replace(NEVER, seconds=[(0.2, 0.1), *[(0.1, 0.05)] * 4])
TRIPS: Case = (
    test_switch.test_digests_and_allocations_of_a_switch,
    (),
    [NEVER, FIRST],
    {
        "slow digests": [NEVER, replace(FIRST, seconds=[(0.5, 0.1), *[(0.1, 0.05)] * 4])],
        "digests each time": [NEVER, replace(FIRST, seconds=[(0.2, 0.1)] * 5)],
        "more allocations": [replace(NEVER, mallocs=[40, 12, 20, 30, 40]), FIRST],
        "other weights": [NEVER, replace(FIRST, weights_equal=False)],
    },
)

SPEEDS = test_switch.Speeds(offload=20e9, pinned=25e9, pageable=6e9, num_bytes=17 * GIB)
OFFLOAD: Case = (
    test_switch.test_offloading_is_as_fast_as_pinned_memory,
    (),
    [SPEEDS],
    {"pageable": [replace(SPEEDS, offload=6e9)], "no state": [replace(SPEEDS, num_bytes=GIB)]},
)

REPORT = SwitchReport("to_generate", 0, 110 * MIB, 0, 100 * MIB, 0, 0.1)
HELD = DeviceBytes(allocated=900 * MIB)
LEDGER = test_switch.Ledgers(
    REPORT,
    REPORT,
    training=HELD,
    generating=DeviceBytes(allocated=164 * MIB),
    afterwards=DeviceBytes(allocated=901 * MIB),
    kv_cache_bytes=64 * MIB,
    num_weights=50 * MIB,
    shard_bytes=(100 * MIB, 100 * MIB),
    bucket_bytes=11 * MIB,
    num_parameters=70,
    released_sides=(0, 0),
)
LEDGERS: Case = (
    test_switch.test_a_switch_gives_and_takes_memory_as_the_ledger_says,
    (),
    [LEDGER],
    {
        "gradients stay": [replace(LEDGER, generating=DeviceBytes(allocated=364 * MIB))],
        "KV cache stays": [replace(LEDGER, afterwards=DeviceBytes(allocated=964 * MIB))],
        "two copies": [replace(LEDGER, there=replace(REPORT, peak_weight_bytes=200 * MIB))],
        "engine stays": [replace(LEDGER, released_sides=(0, 64))],
    },
)

STATE_BYTES = int(0.6 * GIB)
OFFLOADED = test_training.Offloaded(
    is_unchanged=True,
    released_bytes=STATE_BYTES + STATE_BYTES // 3,
    state_bytes=STATE_BYTES,
    gradient_bytes=STATE_BYTES // 3,
    grad_norm=1.0,
    host_bytes=STATE_BYTES,
    is_pinned=True,
    host_growth_bytes=2 * STATE_BYTES // 3,
    allocator_bytes=0,
)
STATE: Case = (
    test_training.test_offloaded_state_comes_back_bitwise,
    (),
    [OFFLOADED],
    {
        "other bits": [replace(OFFLOADED, is_unchanged=False)],
        "state stays": [replace(OFFLOADED, released_bytes=STATE_BYTES // 3)],
        "pageable": [replace(OFFLOADED, is_pinned=False)],
        "rounded up": [replace(OFFLOADED, host_bytes=GIB)],
        "the first block stays": [replace(OFFLOADED, host_growth_bytes=STATE_BYTES)],
        "cached": [replace(OFFLOADED, allocator_bytes=STATE_BYTES)],
    },
)
SAVES: Case = (
    test_training.test_a_checkpoint_written_during_a_step_restores_everything,
    (),
    [(True, True, True)],
    {
        "not restored": [(True, True, False)],
        "nothing changed": [(True, False, True)],
        "failed": [("why", True, True)],
    },
)

PLAIN = test_fp8.Steps([8.3, 7.4, 6.4, 5.5], [2.0, 1.9, 1.8, 1.7], held_bytes=400 * MIB)
ROUNDED = replace(PLAIN, losses=[8.31, 7.42, 6.45, 5.56], grad_norms=[2.06, 1.95, 1.86, 1.75])
COMPARED = test_fp8.Compared(
    PLAIN,
    ROUNDED,
    engine_types={"torch.bfloat16"},
    log_probs=torch.full((2, 3), -1.0),
    megatron_log_probs=torch.full((2, 3), -1.01),
    weights_equal=True,
)
FP8: Case = (
    test_fp8.test_training_in_fp8_is_near_training_in_bfloat16,
    ("blockwise",),
    [COMPARED],
    {
        "other losses": [replace(COMPARED, found=replace(ROUNDED, losses=[8.3, 7.4, 6.4, 6.0]))],
        "other gradients": [replace(COMPARED, found=replace(ROUNDED, grad_norms=[2.2, 2.1, 2.0, 1.9]))],
        "no FP8": [replace(COMPARED, found=PLAIN)],
        "copies stay": [replace(COMPARED, found=replace(ROUNDED, held_bytes=480 * MIB))],
        "nothing learnt": [replace(COMPARED, plain=replace(PLAIN, losses=[8.3] * 4))],
        "an engine in FP8": [replace(COMPARED, engine_types={"torch.bfloat16", "torch.float8_e4m3fn"})],
        "stale weights": [replace(COMPARED, log_probs=torch.full((2, 3), -1.3))],
    },
)

TRAINED = test_divided.Trained("TRANSFORMER_ENGINE", [9.9, 9.6, 8.8], [8.8, 8.7, 8.5])
BOTH = [TRAINED, TRAINED]
DIVIDED: Case = (
    test_divided.test_ranks_that_share_a_model_take_the_steps_of_one,
    (),
    [[TRAINED], [replace(TRAINED, losses=[9.91, 9.6, 8.8]), TRAINED]],
    {
        "local layers": [[replace(TRAINED, names="LOCAL")], BOTH],
        "parts of a row in another order": [[TRAINED], [replace(TRAINED, losses=[10.0, 9.7, 9.0]), TRAINED]],
        "gradients exchanged": [[TRAINED], [TRAINED, replace(TRAINED, grad_norms=[8.8, 8.9, 8.5])]],
    },
)

CASES = [
    FP8,
    DIVIDED,
    CYCLES,
    START,
    DECODING,
    STREAM,
    LOG_PROBS,
    LARGE_RANK,
    TRIPS,
    OFFLOAD,
    LEDGERS,
    STATE,
    SAVES,
]


def check(case: Case, answers: list[Any], folder: Path) -> list[str]:
    """Run a test with these figures of a device; return what it notes."""
    test, parameters, _, _ = case
    notes: list[str] = []
    given = {
        "on_device": answering(answers),
        "folder": folder,
        "tmp_path": folder,
        "note": notes.append,
        "capability": (9, 0),
    }
    names = test.__code__.co_varnames[: test.__code__.co_argcount]
    rest = iter(parameters)
    test(*[given[name] if name in given else next(rest) for name in names])
    return notes


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0].__name__)
def test_figures_as_they_should_be_pass(case: Case, tmp_path: Path):
    check(case, case[2], tmp_path)


@pytest.mark.parametrize(
    ("case", "wrong"),
    [(case, wrong) for case in CASES for wrong in case[3]],
    ids=lambda value: value if isinstance(value, str) else value[0].__name__,
)
def test_other_figures_fail(case: Case, wrong: str, tmp_path: Path):
    with pytest.raises(AssertionError):
        check(case, case[3][wrong], tmp_path)


def test_two_ranks_must_be_on_the_gpu(tmp_path: Path):
    ranks = test_two_ranks.Switched(False, {}, 0, 0, True, 0)
    with pytest.raises(AssertionError):
        test_two_ranks.test_a_switch_moves_the_bits_that_it_moves_on_a_cpu(
            answering([ranks]), tmp_path, "1-2-1"
        )


def test_scaling_that_a_device_lacks_is_skipped_with_the_reason(tmp_path: Path):
    case = FP8[0], ("mxfp8",), *FP8[2:]
    with pytest.raises(pytest.skip.Exception, match=r"needs compute capability 10\.0, and this is 9\.0"):
        check(case, FP8[2], tmp_path)

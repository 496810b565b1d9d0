"""The checks of tests/gpu, run on a CPU with small models: what they do works, and so do the rules that they assert."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.tensor_parallel import layers
from torch import Tensor

from hybridengine.backends.megatron.trainer import MegatronTrainer
from hybridengine.config.role_sections import MegatronSettings
from hybridengine.models.shapes import ModelShape
from hybridengine.topology.sizes import TrainSizes
from hybridengine.weights.process_groups import ProcessGroups
from tests.gloo.ranks import RankLauncher
from tests.gloo.tiny_models import write_model
from tests.gpu import (
    one_device,
    test_decoding,
    test_divided,
    test_fp8,
    test_graphs,
    test_large_rank,
    test_log_probs,
    test_memory,
    test_start,
    test_streams,
    test_switch,
    test_training,
    test_two_ranks,
)

KV_CACHE_BYTES = 2**24
TINY = one_device.SMALL | {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return one_device.write_config(tmp_path, **TINY)


def test_an_engine_beside_other_tensors(folder: Path, run_ranks: RankLauncher):
    [started] = run_ranks(1, test_start.start_beside, folder, 1000, KV_CACHE_BYTES)
    assert started.num_tokens == [8, 8]


def test_cycles(folder: Path, run_ranks: RankLauncher):
    [cycles] = run_ranks(1, test_memory.run_cycles, folder, "optimizer", False, 0.5, 3)
    shape = ModelShape.from_folder(folder)
    for cycle in cycles:
        assert cycle.redundant_bytes == 0
        assert cycle.grad_norm > 0
        # Weights in bfloat16, gradients, master weights and two moments: 18 bytes, of which 14 remain.
        assert cycle.training.counted == 18 * shape.num_parameters
        assert cycle.generating.counted - 14 * shape.num_parameters == 64 * 2**20


def test_rounds(folder: Path, run_ranks: RankLauncher):
    [outcome] = run_ranks(1, test_graphs.live_through_rounds, folder, False, KV_CACHE_BYTES)
    first, second, trained = outcome.rounds
    test_graphs.check_rounds(outcome)
    test_graphs.check_peak(outcome)
    test_graphs.check_same_up_to_ties(first, second)
    with pytest.raises(AssertionError):
        test_graphs.check_same_up_to_ties(first, trained)
    stale = replace(trained, log_probs=first.log_probs, tokens=first.tokens)
    with pytest.raises(AssertionError):
        test_graphs.check_rounds(replace(outcome, rounds=[first, second, stale]))


def test_decoding_with_both_schedules(folder: Path, run_ranks: RankLauncher):
    settings = test_decoding.settings_of_a_run(folder, KV_CACHE_BYTES)
    settings = replace(settings, cuda_graphs=False, max_sequences=8)
    found = [
        run_ranks(1, test_decoding.decode, folder, settings, is_async, 8, 16)[0] for is_async in (False, True)
    ]
    assert found[0].tokens == found[1].tokens
    assert all(len(tokens) == 16 for tokens in found[0].tokens)


def test_streams_of_a_cpu(folder: Path, run_ranks: RankLauncher):
    [streams] = run_ranks(1, test_streams.step_after_vllm_takes_a_stream, folder)
    assert streams.stays
    assert not streams.warned
    assert streams.grad_norms[0] == streams.grad_norms[1] > 0


def test_log_probs_of_transformers(tmp_path: Path, run_ranks: RankLauncher):
    write_model(tmp_path, "qwen2", dtype="bfloat16", **test_training.MODEL)
    [compared] = run_ranks(1, test_training.compare_with_transformers, tmp_path)
    compared.check()
    assert compared.errors[1].mean() > 0
    with pytest.raises(AssertionError):
        replace(compared, found=compared.found.roll(1, dims=1)).check()


def test_steps_of_adamw(folder: Path, run_ranks: RankLauncher):
    [steps] = run_ranks(1, test_training.take_steps, folder)
    test_training.check_steps(steps)
    before, after = steps.states[:2]
    other = {name: value * 1.001 if name.startswith("master") else value for name, value in after.items()}
    with pytest.raises(AssertionError):
        test_training.check_adam(before, other)


def test_state_that_leaves_and_comes_back(folder: Path, run_ranks: RankLauncher):
    [found] = run_ranks(1, test_training.leave_and_enter, folder)
    shape = ModelShape.from_folder(folder)
    test_training.check_offloaded(found)
    assert (found.state_bytes, found.gradient_bytes) == (12 * shape.num_parameters, 4 * shape.num_parameters)
    (folder / "saved").mkdir()
    assert run_ranks(1, test_training.save_and_load, folder, folder / "saved") == [(True, True, True)]


def test_log_probs_and_gradients(tmp_path: Path, run_ranks: RankLauncher):
    sizes = {"vocab_size": 1000, "hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 4}
    one_device.write_config(tmp_path, **(test_log_probs.HEAD | sizes))
    [measured] = run_ranks(1, test_log_probs.measure, tmp_path, 2, 64, 16)
    test_log_probs.check(measured)
    assert measured.seconds > 0 < measured.product_seconds


def test_trips_and_ledgers(folder: Path, run_ranks: RankLauncher):
    [trips] = run_ranks(1, test_switch.make_trips, folder, "first", KV_CACHE_BYTES)
    assert trips.weights_equal
    assert len(trips.seconds) == test_switch.NUM_TRIPS
    [speeds] = run_ranks(1, test_switch.measure_offload, folder, 2**20)
    assert speeds.num_bytes == 12 * ModelShape.from_folder(folder).num_parameters
    [ledgers] = run_ranks(1, test_switch.compare_ledgers, folder, KV_CACHE_BYTES)
    test_switch.check_ledger(ledgers)
    assert ledgers.kv_cache_bytes == KV_CACHE_BYTES


def test_a_rank_of_a_fake_world(run_ranks: RankLauncher):
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 8, "architectures": ["LlamaForCausalLM"]}
    shape = ModelShape.from_hf_config({**TINY, **sizes})
    [found] = run_ranks(
        1, test_large_rank.run_rank, shape, test_large_rank.SIZES, 128, 64, MegatronSettings()
    )
    test_large_rank.check(found)
    # Each rank has an eighth of the matrices, and the norms.
    norms = (2 * shape.num_layers + 1) * shape.hidden_size
    assert found.num_parameters == (shape.num_parameters - norms) / 8 + norms


def test_flops_and_activations_of_a_rank():
    """By hand: 12 h² weights a layer with as many KV heads as heads and an MLP of 8/3 h, and no vocabulary to speak
    of."""
    shape = ModelShape.from_hf_config(
        {**TINY, "architectures": ["LlamaForCausalLM"], "hidden_size": 96, "intermediate_size": 256}
        | {"num_attention_heads": 3, "num_key_value_heads": 3, "vocab_size": 64}
    )
    hidden, layers, tokens = 96, 2, 1000
    weights = layers * 12 * hidden**2 + hidden * 64
    pairs = layers * hidden * tokens**2  # q·k and p·v, of which causal attention needs half
    flops = test_large_rank.pass_flops(shape, 4, tokens)
    assert flops == (6 * weights * tokens + 6 * pairs) / 4
    elements = tokens * layers * (4 * hidden + 4 * hidden + 3 * 256)
    assert test_large_rank.activation_bytes(shape, 4, tokens) == 2 * elements / 4


@pytest.mark.parametrize("sizes", ["1-2-1", "1-1-2"])
def test_two_ranks_switch(tmp_path: Path, run_ranks: RankLauncher, sizes: str):
    test_two_ranks.write_small(tmp_path)
    ranks = run_ranks(2, test_two_ranks.switch, tmp_path, sizes)
    test_two_ranks.check_switched(tmp_path, TrainSizes.parse(sizes), ranks)
    name = next(iter(ranks[0].generating))
    other = ranks[0].generating | {name: torch.zeros_like(ranks[0].generating[name])}
    with pytest.raises(AssertionError):
        test_two_ranks.check_switched(
            tmp_path, TrainSizes.parse(sizes), [replace(ranks[0], generating=other), ranks[1]]
        )


def test_one_of_two_ranks_dies(tmp_path: Path, run_ranks: RankLauncher):
    test_two_ranks.write_small(tmp_path)
    ranks = run_ranks(2, test_two_ranks.switch_until_one_dies, tmp_path, may_die=[test_two_ranks.BROKEN_RANK])
    test_two_ranks.check_survivor(ranks)


def test_two_ranks_train(tmp_path: Path, run_ranks: RankLauncher):
    """Equal within the rounding of float32. Without Transformer Engine, context ranks gather keys and values."""
    test_divided.write_layers(tmp_path, "float32")
    [[alone]] = run_ranks(1, test_divided.train, tmp_path, ["1-1-1"], "float32")
    by_rank = run_ranks(2, test_divided.train, tmp_path, test_divided.SIZES, "float32")
    for ranks in zip(*by_rank, strict=True):
        test_divided.check_equal(alone, ranks, 1e-6, 1e-5)


def test_fp8_that_is_emulated(folder: Path, run_ranks: RankLauncher):
    """There is no FP8 on a CPU: its roundings are emulated. What Transformer Engine does, only a GPU can show."""
    [compared] = run_ranks(1, with_emulated_fp8, folder)
    test_fp8.check_close(compared.plain, compared.found)
    assert compared.found.grad_norms[0] != compared.plain.grad_norms[0]
    test_fp8.check_engine(compared)
    with pytest.raises(AssertionError):
        test_fp8.check_engine(replace(compared, log_probs=compared.log_probs.roll(1, dims=1)))


def with_emulated_fp8(rank: int, folder: Path) -> test_fp8.Compared:
    """Train the second trainer with matrix products of tensors that are rounded to FP8, each with a scale of its own."""
    take_steps = test_fp8.take_steps

    def rounded(folder: Path, registry: ProcessGroups, fp8: str) -> tuple[MegatronTrainer, test_fp8.Steps]:
        with contextlib.ExitStack() as stack:
            if fp8 != "none":
                name = "linear_with_grad_accumulation_and_async_allreduce"
                stack.enter_context(mock.patch.object(layers, name, _emulated_linear))
            return take_steps(folder, registry, "none")

    with mock.patch.object(test_fp8, "take_steps", rounded):
        return test_fp8.train_and_switch(rank, folder, "tensorwise", KV_CACHE_BYTES)


def _emulated_linear(input: Tensor, weight: Tensor, bias: Tensor | None, **_: Any) -> Tensor:
    product = _Fp8Product.apply(input, weight)
    return product if bias is None else product + bias


class _Fp8Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor) -> Tensor:
        factors = _rounded(input, torch.float8_e4m3fn), _rounded(weight, torch.float8_e4m3fn)
        ctx.save_for_backward(*factors)
        return factors[0] @ factors[1].t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        input, weight = ctx.saved_tensors
        gradient = _rounded(gradient, torch.float8_e5m2)
        return gradient @ weight, gradient.flatten(0, -2).t() @ input.flatten(0, -2)


def _rounded(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    scale = torch.finfo(dtype).max / tensor.abs().max().float()
    return ((tensor * scale).to(dtype).float() / scale).to(tensor.dtype)

"""One rank of a 70B model on its own, in torch's fake world: shapes are real, the data of other ranks is not.

Collectives of the `fake` backend return at once, so that times are those of computing, an upper bound of a cluster's.
"""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from hybridengine.backends.megatron.groups import initialize_globals
from hybridengine.backends.megatron.model import available_names
from hybridengine.backends.megatron.shim import device
from hybridengine.backends.megatron.trainer import MegatronTrainer
from hybridengine.backends.predictions import Predictions
from hybridengine.config.role_sections import MegatronSettings
from hybridengine.models.presets import PRESETS
from hybridengine.models.shapes import ModelShape
from hybridengine.rows.micro_batches import cut_rows
from hybridengine.topology.grid import Grid
from hybridengine.topology.sizes import TrainSizes
from hybridengine.weights.process_groups import ProcessGroups
from tests.gpu import one_device
from tests.gpu.one_device import GIB

pytestmark = pytest.mark.gpu

SIZES = TrainSizes.parse("1-8-4")
"""A stage of 4-8-4 with head and embedding, so that one rank runs all that a pass has."""
NUM_LAYERS, NUM_TOKENS = 5, 8192
ACTIVATION_SLACK = 1.75
"""Largest ratio of saved activations to those of a layer with sequence parallelism and fused attention."""
STATE_SLACK_BYTES = GIB // 2
UTILISATION = 0.5
"""Least speed relative to that of one large matrix product on the same device."""


@dataclass(frozen=True)
class LargeRank:
    num_parameters: int
    """Parameters of this rank."""
    grad_norm: float
    state_bytes: int
    """Bytes of weights, gradients and optimizer state, as the device counts them."""
    activation_bytes: int
    """Bytes that the forward pass of the layers keeps for the backward pass."""
    peak_bytes: int
    """Largest allocation of a step."""
    seconds: float
    """Time of a forward and backward pass."""
    product_flops_per_s: float
    """Speed of a product of large square matrices in the model's type."""


def run_rank(
    rank: int,
    shape: ModelShape,
    sizes: TrainSizes,
    num_tokens: int,
    product_size: int,
    settings: MegatronSettings,
) -> LargeRank:
    """Take two optimizer steps on a row of `num_tokens` as rank 0 of a fake world."""
    if torch.cuda.is_available():
        torch.cuda.set_device(0)
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=sizes.num_ranks)
    without_gloo = functools.partial(
        parallel_state.initialize_model_parallel, create_gloo_process_groups=False
    )
    with mock.patch.object(parallel_state, "initialize_model_parallel", without_gloo):
        initialize_globals(1)
    trainer = MegatronTrainer(
        shape,
        Grid(sizes),
        0,
        ProcessGroups(),
        dtype="bfloat16",
        names=available_names(),
        settings=settings,
    )
    one_device.fill(trainer.weights)
    trainer.start_optimizer(one_device.OPTIMIZER)
    rows = one_device.drawn_rows(1, 1, num_tokens - 1, shape.vocab_size)
    batches = [part.columns for part in cut_rows(rows, num_tokens)]
    kept: list[int] = []

    def loss(predictions: Predictions, columns: dict[str, Tensor]) -> tuple[Tensor, Tensor, Any]:
        kept.append(one_device.device_bytes().allocated)
        return one_device.negative_log_likelihood(predictions, columns)

    trainer.train_step(batches, loss)  # creates the moments, and compiles what there is to compile
    state = one_device.device_bytes().allocated
    one_device.forget_peak()
    norm = trainer.train_step(batches, loss).grad_norm
    peak = one_device.device_bytes().peak
    one_device.synchronize()
    started = time.perf_counter()
    trainer.forward_backward(batches, loss)
    one_device.synchronize()
    seconds = time.perf_counter() - started
    return LargeRank(
        sum(trainer.weights[name].numel() for name in trainer.weights.names),
        norm,
        state,
        kept[1] - state,
        peak,
        seconds,
        _product_flops_per_s(product_size),
    )


def _product_flops_per_s(size: int) -> float:
    matrix, repeats = torch.ones(size, size, dtype=torch.bfloat16, device=device()), 10
    torch.mm(matrix, matrix)
    one_device.synchronize()
    started = time.perf_counter()
    for _ in range(repeats):
        torch.mm(matrix, matrix)
    one_device.synchronize()
    return repeats * 2 * size**3 / (time.perf_counter() - started)


def pass_flops(shape: ModelShape, tp_size: int, num_tokens: int) -> float:
    """Return the FLOPs of one forward and backward pass on a tensor-parallel rank: six for each weight and token
    that are multiplied, and six for each pair of causal attention's two products."""
    attention = shape.hidden_size * (shape.num_heads + shape.num_kv_heads) * 2 * shape.head_dim
    weights = shape.num_layers * (attention + 3 * shape.hidden_size * shape.ffn_hidden_size)
    weights += shape.hidden_size * shape.vocab_size
    pairs = shape.num_layers * shape.num_heads * shape.head_dim * num_tokens**2
    return (6 * weights * num_tokens + 6 * pairs) / tp_size


def activation_bytes(shape: ModelShape, tp_size: int, num_tokens: int) -> float:
    """Return the bytes of bfloat16 activations that layers keep with sequence parallelism, tensor by tensor.

    Inputs and outputs of both norms and of the attention's output projection, queries, keys and values, both halves
    of the gated MLP and their product: each is divided by t. Source: arXiv 2205.05198, section 4.2, with fused
    attention.
    """
    hidden, head = shape.hidden_size, shape.head_dim
    elements = 4 * hidden + 2 * (shape.num_heads + shape.num_kv_heads) * head + 3 * shape.ffn_hidden_size
    return 2 * shape.num_layers * elements * num_tokens / tp_size


def test_a_rank_of_70b_has_its_memory_and_speed(on_device, note):
    """Passes if a rank at t=8 and d=4, with 5 layers of Llama 3 70B, its embedding and head, and a row of 8,192 tokens

    * holds 2 bytes a parameter of weights, 4 of gradients and 12 / d of optimizer state;
    * keeps the activations of sequence parallelism, which divides all of them by t, and three quarters more at most,
      where it keeps half as many again or more without it;
    * computes at half the speed of one large matrix product or more.
    """
    shape = replace(PRESETS["llama3-70b"].shape(), num_layers=NUM_LAYERS)
    t, d = SIZES.tp_size, SIZES.dp_size
    expected, flops = activation_bytes(shape, t, NUM_TOKENS), pass_flops(shape, t, NUM_TOKENS)
    by_name: dict[str, LargeRank] = {}
    for name, settings in (
        ("default", MegatronSettings()),
        ("without sequence parallelism", MegatronSettings(sequence_parallel=False)),
    ):
        [found] = on_device(1, run_rank, shape, SIZES, NUM_TOKENS, 8192, settings)
        by_name[name] = found
        note(
            f"{name}: state {found.state_bytes / GIB:.1f} GiB, activations {found.activation_bytes / GIB:.2f} GiB"
            f" ({found.activation_bytes / expected:.2f} of those counted), peak {found.peak_bytes / GIB:.1f} GiB;"
            f" {flops / found.seconds / 1e12:.0f} TFLOP/s, one product {found.product_flops_per_s / 1e12:.0f}"
        )
        check(found)
        assert abs(found.state_bytes - found.num_parameters * (2 + 4 + 12 / d)) < STATE_SLACK_BYTES
    usual, whole = by_name["default"], by_name["without sequence parallelism"]
    assert usual.activation_bytes < ACTIVATION_SLACK * expected
    assert whole.activation_bytes > 1.5 * usual.activation_bytes
    assert flops / usual.seconds > UTILISATION * usual.product_flops_per_s


def check(found: LargeRank) -> None:
    """Assert what holds on any device."""
    assert found.grad_norm > 0

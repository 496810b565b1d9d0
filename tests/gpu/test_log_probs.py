"""Log-probs of many tokens over a large vocabulary, whose logits in float32 would not fit beside a trainer."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridengine.backends.megatron.outputs import response_log_probs
from hybridengine.backends.megatron.shim import device
from hybridengine.backends.predictions import Predictions
from hybridengine.rows.micro_batches import cut_rows
from tests.gpu import one_device
from tests.gpu.one_device import GIB

pytestmark = pytest.mark.gpu

HEAD = {
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 3584,
    "num_hidden_layers": 1,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "max_position_embeddings": 16384,
    "tie_word_embeddings": False,
}
"""Embedding and head of Qwen2.5-7B, with one small layer between them."""
NUM_ROWS, ROW_TOKENS = 8, 2048
NUM_REFERENCE = 64
"""Response tokens of each row for which all logits are made, as the reference."""
WITHIN = 1e-2
"""Largest relative difference of a gradient in bfloat16."""
SHARE_OF_PRODUCTS = 0.25
"""Least speed, relative to that of the same matrix products alone."""


@dataclass(frozen=True)
class Measured:
    log_prob_difference: float
    """Largest |found - reference|."""
    gradient_difference: float
    """Norm of the difference of the head's gradients, relative to the reference's."""
    forward_bytes: int
    """Peak of the forward pass of the log-probs, beyond the model's."""
    backward_bytes: int
    """Peak of the backward pass, that of the layer included."""
    seconds: float
    """Time of log-probs and their gradients alone."""
    product_seconds: float
    """Time of the products of matrices that they need: logits, twice, and the two gradients."""


def measure(rank: int, folder: Path, num_rows: int, row_tokens: int, num_reference: int) -> Measured:
    _, registry = one_device.begin(rank)
    trainer = one_device.make_trainer(folder, registry)
    rows = one_device.drawn_rows(num_rows, 1, row_tokens - 1, trainer.shape.vocab_size)
    batches = [part.columns for part in cut_rows(rows, num_rows * row_tokens)]
    assert len(batches) == 1
    seen: dict[str, Any] = {}

    def loss(predictions: Predictions, columns: dict[str, Tensor]) -> tuple[Tensor, Tensor, Any]:
        if not seen:
            seen["compared"] = _compare(predictions, columns, num_reference)
            seen["seconds"] = _seconds(lambda: _gradient(predictions, columns))
        one_device.forget_peak()
        before = one_device.device_bytes()
        log_probs, _ = response_log_probs(predictions, columns, 1.0)
        seen["forward"] = one_device.device_bytes().peak - before.allocated
        one_device.forget_peak()
        seen["before"] = one_device.device_bytes().allocated
        return -(log_probs * columns["mask"]).sum(), columns["mask"].sum().int(), None

    trainer.forward_backward(batches, loss)  # the first pass compares, and makes what stays
    trainer.forward_backward(batches, loss)
    backward = one_device.device_bytes().peak - seen["before"]
    products = _seconds(
        lambda: _products(num_rows * row_tokens, trainer.shape.hidden_size, trainer.shape.vocab_size)
    )
    log_prob_difference, gradient_difference = seen["compared"]
    return Measured(
        log_prob_difference, gradient_difference, seen["forward"], backward, seen["seconds"], products
    )


def _gradient(predictions: Predictions, columns: dict[str, Tensor]) -> Tensor:
    log_probs, _ = response_log_probs(predictions, columns, 1.0)
    total = (log_probs * columns["mask"]).sum()
    return torch.autograd.grad(total, predictions.weight_WH, retain_graph=True)[0]


def _compare(predictions: Predictions, columns: dict[str, Tensor], num_reference: int) -> tuple[float, float]:
    """Return the differences of log-probs and of the head's gradient from those by all logits in float32."""
    some, weight = predictions[:, :num_reference], predictions.weight_WH
    targets = columns["tokens"].gather(1, columns["positions"] + 1)[:, :num_reference]
    found, _ = some.log_probs(targets)
    logits = some.logits()[..., : predictions.vocab_size]
    expected = logits.log_softmax(-1).gather(-1, targets.unsqueeze(-1))[..., 0]
    factors = torch.linspace(-1, 1, targets.numel(), device=targets.device).view_as(expected)
    gradients = [
        torch.autograd.grad((values * factors).sum(), weight, retain_graph=True)[0].float()
        for values in (found, expected)
    ]
    difference = (gradients[0] - gradients[1]).norm() / gradients[1].norm()
    return float((found - expected).abs().max()), float(difference)


def _products(num_tokens: int, hidden_size: int, vocab_size: int) -> None:
    """Multiply as log-probs with gradients must: logits in both passes, and the gradients of both factors."""
    hidden = torch.ones(num_tokens // 8, hidden_size, dtype=torch.bfloat16, device=device())
    weight = torch.ones(vocab_size, hidden_size, dtype=torch.bfloat16, device=device())
    for _ in range(8):  # an eighth of the tokens at a time: all logits in bfloat16 take 5 GB
        logits = hidden @ weight.T
        logits = hidden @ weight.T
        _ = logits @ weight, logits.T @ hidden


def _seconds(run: Any) -> float:
    """Return the time of the second of two calls."""
    run()
    one_device.synchronize()
    started = time.perf_counter()
    run()
    one_device.synchronize()
    return time.perf_counter() - started


def test_logits_never_exist_together(on_device, folder, note):
    """Passes if log-probs and entropies of 16k tokens over 152k entries, with their gradients, need less memory
    than the logits would in float32 (9.3 GiB), the forward pass a quarter of it; if log-probs and the head's
    gradient are those by all logits; and if they take at most four times as long as the matrix products that they
    consist of.
    """
    one_device.write_config(folder, **HEAD)
    [found] = on_device(1, measure, folder, NUM_ROWS, ROW_TOKENS, NUM_REFERENCE)
    note(
        f"peak {found.forward_bytes / GIB:.2f} GiB forward, {found.backward_bytes / GIB:.2f} GiB backward;"
        f" {found.seconds:.3f} s, products alone {found.product_seconds:.3f} s"
    )
    check(found)
    logit_bytes = 4 * NUM_ROWS * ROW_TOKENS * HEAD["vocab_size"]
    assert found.forward_bytes < logit_bytes / 4
    assert found.backward_bytes < logit_bytes
    assert found.seconds < found.product_seconds / SHARE_OF_PRODUCTS


def check(found: Measured) -> None:
    """Assert what holds on any device."""
    assert found.log_prob_difference < 1e-3
    assert found.gradient_difference < WITHIN

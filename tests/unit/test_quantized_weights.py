"""Matrices in FP8 blocks against loops, and the memory of an engine that has them."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hybridengine.backends.vllm.quantized import QuantizedWeights, dequantize, quantize
from hybridengine.weights.storage import WeightStorage

LARGEST = 448.0
"""Largest number of E4M3."""


def nearest(value: float) -> float:
    """Return the number of E4M3 (3 bits of mantissa, exponents down to -6) next to a value, ties to even."""
    if value == 0:
        return 0.0
    step = 2.0 ** (max(math.floor(math.log2(abs(value))), -6) - 3)
    return math.copysign(min(round(abs(value) / step) * step, LARGEST), value)


@pytest.mark.parametrize(("rows", "columns"), [(128, 128), (256, 384), (130, 200), (5, 3)])
def test_blocks_are_scaled_to_the_largest_number(rows: int, columns: int) -> None:
    """Elements within 1 / 16 of the exact ones, as three bits of mantissa and a sign allow; a loop rounds the same."""
    generator = torch.Generator().manual_seed(rows)
    matrix = torch.randn(rows, columns, generator=generator) * torch.logspace(-3, 2, rows)[:, None]
    found, scales = quantize(matrix)
    assert found.dtype is torch.float8_e4m3fn and scales.shape == (-(-rows // 128), -(-columns // 128))
    restored = dequantize(found, scales)
    for row in range(0, rows, 17):
        for column in range(0, columns, 13):
            i, j = row // 128, column // 128
            block = matrix[128 * i : 128 * (i + 1), 128 * j : 128 * (j + 1)]
            scale = torch.tensor(block.abs().max().item()) / LARGEST
            assert scales[i, j].item() == scale.item()
            assert restored[row, column].item() == pytest.approx(
                nearest((matrix[row, column] / scale).item()) * scale.item(), rel=1e-6
            )


def test_a_block_of_zeros_stays_zero() -> None:
    found, scales = quantize(torch.zeros(128, 256))
    assert scales.tolist() == [[1.0, 1.0]]
    assert not dequantize(found, scales).any()


def make(dtype: torch.dtype = torch.bfloat16) -> tuple[QuantizedWeights, WeightStorage]:
    held = WeightStorage(
        {
            "layers.0.qkv_proj.weight": torch.zeros(1200, 256, dtype=torch.float8_e4m3fn),
            "layers.0.qkv_proj.weight_scale_inv": torch.zeros(10, 2),
            "norm.weight": torch.zeros(256, dtype=dtype),
        }
    )
    return QuantizedWeights(held, dtype), held


def test_names_and_types_are_those_of_the_layout() -> None:
    weights, held = make()
    assert weights.names == ("layers.0.qkv_proj.weight", "norm.weight")
    assert {weights[name].dtype for name in weights.names} == {torch.bfloat16}
    assert weights["norm.weight"].data_ptr() == held["norm.weight"].data_ptr()
    assert weights.total_bytes == held.total_bytes == 1200 * 256 + 4 * 20 + 2 * 256


def test_a_matrix_is_there_twice_until_it_is_converted() -> None:
    weights, held = make()
    weights.release()
    assert weights.live_bytes == 0
    matrix, quantized = weights["layers.0.qkv_proj.weight"], 1200 * 256 + 4 * 20
    part = weights.part(["layers.0.qkv_proj.weight"])
    part.materialise()
    assert part.total_bytes == weights.live_bytes == 3 * 1200 * 256 + 4 * 20
    values = torch.randn(1200, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    matrix.copy_(values)
    weights.settle(["layers.0.qkv_proj.weight", "norm.weight"])
    assert weights.live_bytes == quantized and weights.is_live("layers.0.qkv_proj.weight")
    expected, scales = quantize(values)
    assert torch.equal(held["layers.0.qkv_proj.weight"].view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(held["layers.0.qkv_proj.weight_scale_inv"], scales)
    weights.materialise(["norm.weight"])
    assert weights.live_bytes == weights.total_bytes
    weights.release()
    assert weights.live_bytes == 0


@pytest.mark.parametrize(
    "change",
    [
        lambda held: held["norm.weight"].set_(torch.zeros(256, dtype=torch.bfloat16)),
        lambda held: held["layers.0.qkv_proj.weight_scale_inv"].set_(torch.zeros(10, 2)),
    ],
)
def test_tensors_that_have_moved_are_named(change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = {
        "layers.0.qkv_proj.weight": torch.zeros(1200, 256, dtype=torch.float8_e4m3fn),
        "layers.0.qkv_proj.weight_scale_inv": torch.zeros(10, 2),
        "norm.weight": torch.zeros(256, dtype=torch.bfloat16),
    }
    weights = QuantizedWeights(WeightStorage(tensors), torch.bfloat16)
    assert weights.moved() == []
    change(tensors)
    assert len(weights.moved()) == 1

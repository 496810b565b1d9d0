"""Weights that vLLM leaves as they are loaded, so that a switch can fill them.

On a CPU its layers repack their weights: linear layers into handles of another library, experts into another order of the
same shape, which a switch would fill with wrong values.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridengine.backends.vllm.quantized import BLOCK, dequantize


def keep_plain_weights() -> None:
    """Prevent vLLM's layers on a CPU from repacking their weights."""
    from vllm.model_executor.layers import utils
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    def plain_linear(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = F.linear

    utils.dispatch_cpu_unquantized_gemm = plain_linear
    _use_plain_fp8()
    for name, method in {
        "process_weights_after_loading": lambda experts, layer: None,
        "_supports_grouped_gemm": staticmethod(lambda config: (True, None)),
        "apply": _apply,
    }.items():
        setattr(CPUUnquantizedExperts, name, method)


def _use_plain_fp8() -> None:
    """Let vLLM compute with matrices in FP8 as its kernels for GPUs do; its own for CPUs repack them, and need AMX."""
    from vllm.model_executor.kernels import linear
    from vllm.platforms.interface import PlatformEnum

    base: Any = linear.Fp8BlockScaledMMLinearKernel

    class PlainFp8(base):
        @classmethod
        def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
            return True, None

        def process_weights_after_loading(self, layer: Any) -> None:
            """Leave the weights as they are."""

        def apply_block_scaled_mm(self, A: Tensor, B: Tensor, As: Tensor, Bs: Tensor) -> Tensor:
            """Multiply tokens in FP8 [tokens, K], with a scale for each 128 elements, by a matrix in FP8 blocks."""
            tokens = A.float() * As.repeat_interleave(BLOCK, -1)[:, : A.size(1)]
            return F.linear(tokens, dequantize(B, Bs))

    linear._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU] = [PlainFp8]


def _apply(
    experts: Any,
    output: Tensor,
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: Any,
    global_num_experts: int,
    expert_map: Tensor | None,
    **_: Any,
) -> None:
    """Compute gated experts one by one; those of other ranks add nothing, as `expert_map` gives them no place.

    Args:
        output, hidden_states: [tokens, hidden].
        w1, w2: [experts, 2·ffn, hidden] with gate above up, and [experts, hidden, ffn].
        topk_weights, topk_ids: [tokens, active experts].
    """
    assert activation.value == "silu", "the families with experts have no other activation"
    total = torch.zeros_like(hidden_states, dtype=torch.float32)
    places = topk_ids.long() if expert_map is None else expert_map.long()[topk_ids.long()]
    for place in range(w1.size(0)):
        tokens, choices = (places == place).nonzero(as_tuple=True)
        if len(tokens):
            gate, up = F.linear(hidden_states[tokens], w1[place]).chunk(2, -1)
            result = F.linear(F.silu(gate) * up, w2[place])
            total.index_add_(0, tokens, result * topk_weights[tokens, choices].unsqueeze(-1).float())
    output.copy_(total)  # at the end: it may be the memory of `hidden_states`

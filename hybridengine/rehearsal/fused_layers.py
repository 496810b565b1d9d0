"""Layers with the memory of a GPU's, in place of those for a CPU, which keep intermediate results for the backward pass.

    norm         Transformer Engine keeps the input, contiguous, and one float32 number for each row; the second one of a
                 layer belongs to the MLP, with which it is computed again
    rotation     its kernel keeps angles alone, and needs no input in the backward pass
    attention    it keeps contiguous queries, keys and values, the output, and one float32 number for each query and head
    gated MLP    Megatron-core's own function keeps its input alone; its compiled kernels have no intermediate results
    gathering    hidden states of all tensor-parallel ranks exist for a matrix product; Megatron-core's buffer stays

Source: Transformer Engine 2.20, `attention/rope.py`, `attention/dot_product_attention/` and `module/layernorm_linear.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.fusions import fused_bias_swiglu
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import GlobalMemoryBuffer
from torch import Tensor

from hybridengine.backends.megatron import model
from hybridengine.backends.megatron.attention import PackedAttention, RmsNorm
from hybridengine.rehearsal.replacing import all_replaced


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor) -> Tensor:  # type: ignore[override]
        rows = rows.contiguous()
        ctx.save_for_backward(rows, weight, rows.new_empty(rows.shape[:-1], dtype=torch.float32))
        return torch.empty_like(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors[:2])


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, angles: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(angles)
        return torch.empty_like(rows, memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return torch.empty_like(grad), None


class _Attention(torch.autograd.Function):
    """Causal attention over packed rows. torch's kernel is called for each of them, so that operations can be counted;
    keys and values are gathered over context ranks, and their gradients scattered, as many bytes as a ring sends."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, query_SND: Tensor, key_SGD: Tensor, value_SGD: Tensor, lengths: list[int], group: Any
    ) -> Tensor:
        query_SND, key_SGD, value_SGD = (part.contiguous() for part in (query_SND, key_SGD, value_SGD))
        output_SND = query_SND.new_empty(*query_SND.shape[:2], value_SGD.size(2))
        softmax_SN = query_SND.new_empty(query_SND.shape[:2], dtype=torch.float32)
        ctx.save_for_backward(query_SND, key_SGD, value_SGD, output_SND, softmax_SN)
        ctx.lengths, ctx.group = lengths, group
        if group.size() > 1:
            both = torch.cat([key_SGD.flatten(1), value_SGD.flatten(1)], 1)
            dist.all_gather_into_tensor(
                both.new_empty(group.size() * len(both), *both.shape[1:]), both, group=group
            )
        for query, key in _rows(query_SND, key_SGD, lengths, group.size()):
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, key, 0.0, True)
        return output_SND

    @staticmethod
    def backward(ctx: Any, grad_SND: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        query_SND, key_SGD, value_SGD, *_ = ctx.saved_tensors
        for query, key in _rows(query_SND, key_SGD, ctx.lengths, ctx.group.size()):
            softmax = query.new_empty(query.shape[:3], dtype=torch.float32)
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                query, query, key, key, query, softmax, 0.0, True
            )
        if ctx.group.size() > 1:
            both = torch.cat([key_SGD.flatten(1), value_SGD.flatten(1)], 1)
            dist.reduce_scatter_tensor(
                both, both.new_empty(ctx.group.size() * len(both), *both.shape[1:]), group=ctx.group
            )
        return *(torch.empty_like(part) for part in (query_SND, key_SGD, value_SGD)), None, None


def _rows(
    query_SND: Tensor, key_SGD: Tensor, lengths: list[int], num_parts: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield shapes of each row's own queries and of all its keys, [1, heads, tokens, D], on a device without memory."""
    (_, num_heads, dim), num_groups = query_SND.shape, key_SGD.size(1)
    for length in lengths:
        yield (
            query_SND.new_empty(1, num_heads, length // num_parts, dim, device="meta"),
            query_SND.new_empty(1, num_groups, length, dim, device="meta"),
        )


@contextmanager
def fused_layers() -> Iterator[None]:
    """Let layers without Transformer Engine need the memory of those with it while the context is open."""
    transformer_config, build_layer = model.transformer_config, TransformerLayer.__init__

    def build(layer: Any, *arguments: Any, **named: Any) -> None:
        build_layer(layer, *arguments, **named)
        if isinstance(layer.mlp, MLP):
            norm = layer.pre_mlp_layernorm
            norm.forward = lambda rows: rows
            layer.mlp.register_forward_pre_hook(lambda _, inputs: (normalize(norm, inputs[0]), *inputs[1:]))

    def fused_config(*arguments: Any) -> Any:
        config = transformer_config(*arguments)
        config.apply_rope_fusion = not (config.rotary_interleaved or config.multi_latent_attention)
        config.bias_activation_fusion = config.activation_func is F.silu
        return config

    def normalize(layer: Any, rows: Tensor) -> Tensor:
        return _Norm.apply(rows, layer.weight)  # type: ignore[no-any-return]

    def rotate(rows: Tensor, bounds: Tensor, angles: Tensor, **_: Any) -> Tensor:
        return _Rotation.apply(rows, angles)  # type: ignore[no-any-return]

    def attend(
        layer: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, packed_seq_params: Any, **__: Any
    ) -> Tensor:
        lengths = packed_seq_params.cu_seqlens_q.diff().tolist()
        output: Tensor = _Attention.apply(query, key, value, lengths, layer._context)  # type: ignore[assignment]
        return output.flatten(1)

    def gate(both: Tensor) -> Tensor:
        return both.new_empty(*both.shape[:-1], both.size(-1) // 2)

    with all_replaced(
        (model, "transformer_config", fused_config),
        (TransformerLayer, "__init__", build),
        (RmsNorm, "forward", normalize),
        (rope_utils, "fused_apply_rotary_pos_emb_thd", rotate),
        (PackedAttention, "forward", attend),
        (GlobalMemoryBuffer, "get_tensor", lambda buffer, size, dtype, *_: torch.empty(size, dtype=dtype)),
        (fused_bias_swiglu, "swiglu", gate),
        (fused_bias_swiglu, "swiglu_back", lambda grad, both: torch.empty_like(both)),
        (fused_bias_swiglu, "weighted_swiglu", lambda both, weights: gate(both)),
        (
            fused_bias_swiglu,
            "weighted_swiglu_back",
            lambda grad, both, weights: (torch.empty_like(both), torch.empty_like(weights)),
        ),
    ):
        yield

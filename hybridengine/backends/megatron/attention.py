"""Megatron-core's modules without Transformer Engine: causal attention over packed rows, and a norm for all parallelisms.
Also the parts of layers that Megatron-core has in neither form: norms of outputs, and two kinds of rotary embeddings.

Shapes: S tokens of a pack, c context-parallel ranks, N heads, G key-value heads, D dimensions of a head's query and key,
E of its value.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor, nn

from hybridengine.backends.megatron.packing import held_tokens


class PackedAttention(nn.Module):
    """Causal attention over packed rows by torch's kernels; each rank has queries of its own, and all keys and values.

    Megatron-core's own needs padded rows and has no context parallelism. A token attends to the last `window` positions,
    its own included, or to all of them if it is 0.
    """

    def __init__(
        self, *, pg_collection: ProcessGroupCollection, softmax_scale: float | None, window: int = 0, **_: Any
    ) -> None:
        super().__init__()
        self._context, self._scale, self._window = pg_collection.cp, softmax_scale, window

    def forward(
        self,
        query_SND: Tensor,
        key_SGD: Tensor,
        value_SGE: Tensor,
        attention_mask: None,
        *,
        packed_seq_params: PackedSeqParams,
        **_: Any,
    ) -> Tensor:
        """Return the attention's output, [S / c, N·E]; inputs are those of this rank's S / c tokens."""
        bounds, size = packed_seq_params.cu_seqlens_q, self._context.size()
        held_S = None
        if size > 1:
            held = held_tokens(bounds, size)
            held_S, order_S = held[self._context.rank()], torch.cat(held).argsort()
            both, dims = torch.cat([key_SGD, value_SGE], -1), [key_SGD.size(-1), value_SGE.size(-1)]
            # Its backward pass sums the gradients of all ranks and returns those of this rank's tokens.
            both = gather_from_sequence_parallel_region(both, group=self._context)[order_S]
            key_SGD, value_SGE = both.split(dims, -1)
        outputs, begin = [], 0
        for start, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            own = slice(begin, begin := begin + (stop - start) // size)
            query, key, value = (
                rearrange(part, "s n d -> 1 n s d")
                for part in (query_SND[own], key_SGD[start:stop], value_SGE[start:stop])
            )
            mask = None
            if held_S is not None or 0 < self._window < stop - start:
                keys_S = torch.arange(start, stop, device=query.device)
                distance_SS = (keys_S if held_S is None else held_S[own]).unsqueeze(1) - keys_S
                mask = (distance_SS >= 0) & (distance_SS < (self._window or stop))
            output = F.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, is_causal=mask is None, scale=self._scale, enable_gqa=True
            )
            outputs.append(rearrange(output, "1 n s d -> s (n d)"))
        return torch.cat(outputs)


class WholeLinear(nn.Module):
    """Linear layer that is whole on every tensor-parallel rank, each of which may have a part of the sequence."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **_: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, inputs: Tensor) -> tuple[Tensor, None]:
        """Return the outputs, and no bias."""
        return F.linear(inputs, self.weight), None


class RmsNorm(nn.RMSNorm):
    """RMS norm whose weight's gradient is summed over tensor-parallel ranks that each have a part of the sequence."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        self._is_centred = config.layernorm_zero_centered_gamma
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, rows: Tensor) -> Tensor:
        if not self._is_centred:
            return super().forward(rows)
        weight = 1.0 + self.weight.float()
        return F.rms_norm(rows.float(), self.normalized_shape, weight, self.eps).type_as(rows)


class LayerAttention(SelfAttention):
    """Attention that takes its own of the model's two rotary embeddings: number `rotary`."""

    def __init__(self, *arguments: Any, rotary: int, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._rotary = rotary

    def forward(self, *arguments: Any, rotary_pos_emb: Tensor, **named: Any) -> Any:
        return super().forward(*arguments, rotary_pos_emb=rotary_pos_emb[self._rotary], **named)


@functools.cache
def normed(linear: type[nn.Module], norm: type[Any]) -> type[nn.Module]:
    """Return a class of linear layers, of the class `linear`, whose outputs go through a norm.

    The norm is a forward hook: adapters add to what it normalizes, in a hook before it.
    """

    class NormedLinear(linear):  # type: ignore[misc, valid-type]
        def __init__(
            self, input_size: int, output_size: int, *, config: TransformerConfig, **named: Any
        ) -> None:
            super().__init__(input_size, output_size, config=config, **named)
            self.post_layernorm = norm(config, output_size, config.layernorm_epsilon)
            self.register_forward_hook(_normalized)

    return NormedLinear


def _normalized(
    layer: Any, inputs: object, outputs: tuple[Tensor, Tensor | None]
) -> tuple[Tensor, Tensor | None]:
    output, bias = outputs
    return layer.post_layernorm(output), bias

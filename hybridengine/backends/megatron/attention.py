"""Causal attention by torch's fused kernel, for Megatron-core's layers where Transformer Engine's are not to be had.

Megatron-core's own keeps the scores of all heads in memory and repeats keys and values for grouped queries.

Shapes: T positions, B rows, N query heads and G groups of this rank, D width of a head.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from einops import rearrange
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class FusedAttention(MegatronModule):
    """Stands where a layer has its `core_attention`; has no weights."""

    def __init__(self, config: TransformerConfig, *_: Any, **__: Any) -> None:
        super().__init__(config=config)

    def forward(
        self,
        query_TBND: Tensor,
        key_TBGD: Tensor,
        value_TBGD: Tensor,
        attention_mask: None,
        *_: Any,
        **__: Any,
    ) -> Tensor:
        """Context [T, B, N·D]: position t sees those up to t."""
        assert attention_mask is None, "rows are padded on the right, where the causal mask hides the padding"
        query, key, value = (
            rearrange(values, "t b n d -> b n t d") for values in (query_TBND, key_TBGD, value_TBGD)
        )
        context = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=query.size(1) != key.size(1)
        )
        return rearrange(context, "b n t d -> t b (n d)")

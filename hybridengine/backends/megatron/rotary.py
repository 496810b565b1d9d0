"""Rotary frequencies of all supported kinds, in place of those that Megatron-core computes.

Megatron-core's Llama 3 scaling has fixed constants. Of YaRN it leaves the attention factor to the application of the
angles, where Transformer Engine's kernel for packed rows ignores it without an error. Here the factor, by which queries
and keys are both multiplied, is part of the scale of attention scores.

Shapes: D rotary dimensions of a head, of which half are frequencies.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from torch import Tensor, nn

from hybridengine.backends.megatron.shim import device
from hybridengine.families.family import DecoderSizes


def inverse_frequencies(sizes: DecoderSizes) -> Tensor:
    """Return the angles between neighbouring positions, [D / 2] float32, of layers without a window."""
    plain, scaling = _plain(sizes.rotary_dim or sizes.head_dim, sizes.rope_theta), _numbers(sizes)
    if sizes.rope_type == "linear":
        return plain / scaling["factor"]
    if sizes.rope_type == "llama3":
        return _llama3(plain, scaling)
    if sizes.rope_type == "yarn":
        return _yarn(plain, sizes, scaling)
    return plain


def softmax_scale(sizes: DecoderSizes) -> float:
    """Return the factor of the attention scores, which includes YaRN's of queries and of keys."""
    return attention_factor(sizes) ** 2 / math.sqrt(sizes.query_scalar or sizes.head_dim)


def attention_factor(sizes: DecoderSizes) -> float:
    """Return YaRN's factor of queries and keys; 1 for other rotary embeddings. Source: arXiv 2309.00071, section 3.4."""
    scaling = _numbers(sizes)
    if sizes.rope_type != "yarn":
        return 1.0
    if "attention_factor" in scaling:
        return scaling["attention_factor"]

    def factor(mscale: float) -> float:
        return 1.0 if scaling["factor"] <= 1 else 0.1 * mscale * math.log(scaling["factor"]) + 1.0

    if "mscale" in scaling and "mscale_all_dim" in scaling:
        return factor(scaling["mscale"]) / factor(scaling["mscale_all_dim"])
    return factor(1.0)


def set_frequencies(model: Any, sizes: DecoderSizes) -> None:
    """Replace the frequencies of a GPTModel, in which no layer has seen them yet."""
    rotary: RotaryEmbedding = model.rotary_pos_emb
    rotary.inv_freq = inverse_frequencies(sizes).to(device())
    if sizes.window_rope_theta is not None:
        windowed = copy.copy(rotary)
        windowed.inv_freq = _plain(sizes.head_dim, sizes.window_rope_theta).to(device())
        model.rotary_pos_emb = TwoRotaries(rotary, windowed)


class TwoRotaries(nn.Module):
    """Angles of layers without a window and of those with one, stacked: [2, positions, 1, 1, D]."""

    def __init__(self, full: RotaryEmbedding, windowed: RotaryEmbedding) -> None:
        super().__init__()
        self._full, self._windowed = full, windowed
        self.get_rotary_seq_len = full.get_rotary_seq_len

    def forward(self, *arguments: Any, **named: Any) -> Tensor:
        return torch.stack([self._full(*arguments, **named), self._windowed(*arguments, **named)])


def _numbers(sizes: DecoderSizes) -> dict[str, float]:
    return {key: float(value) for key, value in sizes.rope_scaling}


def _plain(dim: int, theta: float) -> Tensor:
    return 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))


def _llama3(plain: Tensor, scaling: dict[str, float]) -> Tensor:
    """Divide slow rotations by the factor, leave fast ones as they are, and interpolate between the two."""
    factor, low, high = (scaling[key] for key in ("factor", "low_freq_factor", "high_freq_factor"))
    turns = scaling["original_max_position_embeddings"] * plain / (2 * math.pi)
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * plain / factor + smooth * plain


def _yarn(plain: Tensor, sizes: DecoderSizes, scaling: dict[str, float]) -> Tensor:
    """Divide slow rotations by the factor, leave fast ones as they are, and blend those between, by their index."""
    dim, original = sizes.head_dim, scaling["original_max_position_embeddings"]

    def index(turns: float) -> float:
        """Index of the frequency that makes so many turns over the original positions."""
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(sizes.rope_theta))

    first = max(math.floor(index(scaling.get("beta_fast", 32.0))), 0)
    last = min(math.ceil(index(scaling.get("beta_slow", 1.0))), dim - 1)
    places = torch.arange(dim // 2, dtype=torch.float32)
    slow = ((places - first) / (max(last - first, 0.001))).clamp(0, 1)
    return plain / scaling["factor"] * slow + plain * (1 - slow)

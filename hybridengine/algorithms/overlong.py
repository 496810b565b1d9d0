"""Punishment of responses near the maximum length, and the responses that were cut there. Shape suffix: B sequences."""

from __future__ import annotations

from torch import Tensor


def length_penalties(
    lengths_B: Tensor, max_response_tokens: int, cache_tokens: int, penalty: float
) -> Tensor:
    """Return the amounts by which scores fall: 0 up to `max_response_tokens - cache_tokens`, then rising linearly to
    `penalty` at `max_response_tokens`. Without `cache_tokens` all are 0.

    Shapes: [B] -> [B], float64.
    Source: soft overlong punishment of DAPO, arXiv 2503.14476, section 3.4, equation 13, with a penalty of 1.
    """
    beyond_B = (lengths_B - (max_response_tokens - cache_tokens)).double()
    return penalty * (beyond_B / max(cache_tokens, 1)).clamp(0.0, 1.0)


def cut_responses(lengths_B: Tensor, max_response_tokens: int) -> Tensor:
    """Return bool [B], True for responses of the maximum length, including any that ends exactly there by itself."""
    return lengths_B >= max_response_tokens

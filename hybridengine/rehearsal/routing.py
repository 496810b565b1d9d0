"""Routes of tokens to experts, which have values in a rehearsal: every expert gets equally many."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.transformer.moe import router
from torch import Tensor

from hybridengine.rehearsal.replacing import replaced


@contextmanager
def even_routes() -> Iterator[None]:
    """Let consecutive tokens go to consecutive experts while the context is open."""
    choose = router.topk_routing_with_score_function

    def chosen(logits: Tensor, topk: int, *arguments: Any, **named: Any) -> tuple[Tensor, Tensor]:
        probs_TE, map_TE = choose(logits, topk, *arguments, **named)
        num_tokens, num_experts = map_TE.shape
        choices = (torch.arange(num_tokens)[:, None] * topk + torch.arange(topk)) % num_experts
        return probs_TE, torch.zeros(num_tokens, num_experts, dtype=torch.bool).scatter_(1, choices, True)

    with replaced(router, "topk_routing_with_score_function", chosen):
        yield

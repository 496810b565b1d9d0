"""Metrics of one iteration, from its batch and from the reports of its switches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tensordict import TensorDictBase
from torch import Tensor

from hybridengine.algorithms.masking import masked_max, masked_mean
from hybridengine.metrics import keys


def rollout_metrics(batch: TensorDictBase, kl_BR: Tensor, mask_BR: Tensor) -> dict[str, float]:
    """Reward, KL, lengths, and how far the engine's log-probs are from the training model's."""
    difference = (batch["log_probs"] - batch["rollout_log_probs"]).abs()
    lengths = batch["response_lengths"].float()
    return {
        keys.REWARD_MEAN: float(batch["scores"].mean()),
        keys.KL_MEAN: float(masked_mean(kl_BR, mask_BR)),
        keys.LOG_PROB_ABS_DIFF_MAX: float(masked_max(difference, mask_BR)),
        "rollout/response_tokens_mean": float(lengths.mean()),
        "rollout/entropy_mean": float(masked_mean(batch["entropies"], mask_BR)),
        "rollout/tokens": float(batch["prompt_lengths"].sum() + batch["response_lengths"].sum()),
    }


def switch_metrics(
    to_generate: Sequence[Mapping[str, Any]], to_train: Sequence[Mapping[str, Any]]
) -> dict[str, float]:
    """Bytes of the switches there and back: of each, the rank with the most."""
    reports = [*to_generate, *to_train]
    return {
        keys.RECEIVED_BYTES: max(report["received_bytes"] for report in to_generate),
        "switch/received_bytes_back": max(report["received_bytes"] for report in to_train),
        keys.PEAK_WEIGHT_BYTES: max(report["peak_weight_bytes"] for report in reports),
        keys.REDUNDANT_BYTES: max(report["redundant_bytes"] for report in reports),
    }

"""Metrics of a batch, on the ranks where its rows are."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import TensorDictBase

from hybridengine.algorithms.across import Across
from hybridengine.algorithms.correction import correction_metrics
from hybridengine.algorithms.kl import KL_ESTIMATORS
from hybridengine.algorithms.masking import masked_max, masked_sum, response_mask
from hybridengine.config.algorithm import Algorithm
from hybridengine.drivers.advantages import correction_weights
from hybridengine.errors import DataError
from hybridengine.metrics import keys
from hybridengine.runtime.batch import columns_of


def rollout_metrics(
    rows: TensorDictBase, across: Across, algorithm: Algorithm, term_columns: Sequence[str] = ()
) -> dict[str, float]:
    """Reward, the own score of each term that is there, KL and lengths; where the training model has been asked, its
    entropy, how far its log-probs are from the engine's, and what corrects that.

    Raises:
        DataError: no response has a score.
    """
    keep = ~rows["dropped"]
    mask = response_mask(rows["response_lengths"], rows["log_probs"].size(1))
    kl = KL_ESTIMATORS[algorithm.kl_estimator](rows["log_probs"], rows["ref_log_probs"])
    sums = torch.stack(
        [
            torch.tensor(float(len(rows))),
            mask.sum(),
            rows["scores"][keep].sum(),
            keep.sum(),
            masked_sum(kl, mask),
            rows["prompt_lengths"].sum(),
        ]
    ).double()
    num_rows, num_tokens, scores, num_scored, kl_sum, prompts = across.sum(sums).tolist()
    if not num_scored:
        raise DataError(
            f"none of the {int(num_rows)} responses of this step has a score; look at the reward function's failures"
        )
    metrics = {
        keys.REWARD_MEAN: scores / num_scored,
        "rollout/dropped_rows": num_rows - num_scored,
        keys.KL_MEAN: kl_sum / max(1.0, num_tokens),
        keys.RESPONSE_TOKENS_MEAN: num_tokens / num_rows,
        **_length_quantiles(rows, across),
        keys.TOKENS: prompts + num_tokens,
    }
    for name in (name for name in term_columns if name in columns_of(rows)):
        scored = ~rows[name].isnan()
        total, count = across.sum(torch.stack([rows[name][scored].sum(), scored.sum()]).double()).tolist()
        metrics[keys.mean_key(name)] = total / max(1.0, count)
    if "entropies" in columns_of(rows):
        difference = (rows["log_probs"] - rows["rollout_log_probs"]).abs()
        metrics[keys.LOG_PROB_ABS_DIFF_MAX] = float(across.max(masked_max(difference, mask)))
        entropies = float(across.sum(masked_sum(rows["entropies"], mask).double()))
        metrics["rollout/entropy_mean"] = entropies / max(1.0, num_tokens)
    if (weights := correction_weights(rows, mask & keep[:, None], algorithm)) is not None:
        metrics |= correction_metrics(weights, across)
    return metrics


def _length_quantiles(rows: TensorDictBase, across: Across) -> dict[str, float]:
    """Shortest and longest response, and quantiles between, of all ranks' rows: what a planner needs of lengths."""
    counts = torch.bincount(rows["response_lengths"], minlength=rows["log_probs"].size(1) + 1)
    running = across.sum(counts.double()).cumsum(0)
    total = running[-1].item()
    wanted = torch.tensor([max(1.0, percent / 100 * total) for percent in keys.LENGTH_SHARES]).double()
    lengths = torch.searchsorted(running, wanted.ceil())
    return {
        keys.response_tokens_key(percent): float(length)
        for percent, length in zip(keys.LENGTH_SHARES, lengths.tolist(), strict=True)
    }

"""Metrics of one iteration, from its batch and from the reports of its switches."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase

from hybridengine.algorithms.across import Across
from hybridengine.algorithms.correction import correction_metrics
from hybridengine.algorithms.kl import kl_estimator
from hybridengine.algorithms.masking import masked_max, masked_sum, response_mask
from hybridengine.config.algorithm_sections import AlgorithmSection
from hybridengine.controller.exchange import CallRecord
from hybridengine.controller.rows import Rows
from hybridengine.drivers.counted import correction_weights
from hybridengine.drivers.roles import Roles, function_path
from hybridengine.errors import DataError
from hybridengine.metrics import keys
from hybridengine.planning.dataflows import phase_of_call
from hybridengine.runtime.batch import columns_of

STATISTICS = (
    "prompt_lengths",
    "response_lengths",
    "rollout_log_probs",
    "log_probs",
    "ref_log_probs",
    "scores",
    "dropped",
)
"""Columns that `rollout_metrics` reads, besides `entropies`."""


def measure_rollout(
    roles: Roles, batch: Rows, settings: AlgorithmSection, *, from_engine: bool = False
) -> Any:
    """The future of `rollout_metrics` of a batch, the same on every rank.

    Args:
        from_engine: the batch's log-probs are the engine's, and it has no entropies.
    """
    columns = [*STATISTICS, *roles.term_columns, *([] if from_engine else ["entropies"])]
    asked = function_path(rollout_metrics), settings, roles.term_columns
    return roles.compute.measure(batch.select(*columns), *asked)


def rollout_metrics(
    rows: TensorDictBase, across: Across, settings: AlgorithmSection, term_columns: Sequence[str] = ()
) -> dict[str, float]:
    """Reward, the own score of each term that is there, KL and lengths; where the training model has been asked, its
    entropy, how far its log-probs are from the engine's, and what corrects that.

    Raises:
        DataError: no response has a score.
    """
    keep = ~rows["dropped"]
    mask = response_mask(rows["response_lengths"], rows["log_probs"].size(1))
    kl = kl_estimator(settings.kl_estimator)(rows["log_probs"], rows["ref_log_probs"])
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
    if (weights := correction_weights(rows, mask & keep[:, None], settings)) is not None:
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


def call_metrics(
    records: Sequence[CallRecord], payload_bytes: int, begin: float, end: float
) -> dict[str, float]:
    """Seconds by phase, bytes that went from rank to rank and through the controller, what the controller took, and the
    most that a rank's process held after any call.

    Args:
        begin, end: of the iteration, in seconds since the epoch.
    """
    seconds, edges = defaultdict[str, float](float), Counter[str]()
    for record in records:
        seconds[keys.time_key(phase_of_call(record.role, record.method))] += record.seconds
        for producer, num_bytes in record.transferred.items():
            edges[f"transfer/{producer}->{record}_bytes"] += num_bytes
    held = defaultdict[str, int](int)
    for by_name in (by_name for record in records for by_name in record.held_bytes.values()):
        for name, num_bytes in by_name.items():
            held[keys.memory_key(name)] = max(held[keys.memory_key(name)], num_bytes)
    spans = sorted(span for record in records for span in record.spans.values())
    busy, last = 0.0, begin
    for start, stop in spans:
        busy += max(0.0, min(stop, end) - max(start, last))
        last = max(last, stop)
    return {
        **seconds,
        **edges,
        **held,
        keys.TRANSFER_BYTES: sum(edges.values()),
        keys.PAYLOAD_BYTES: payload_bytes,
        keys.OVERHEAD_S: end - begin - busy,
    }

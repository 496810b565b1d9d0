"""Names of the metrics that console, summary, scripts and tests rely on. Others are free."""

from __future__ import annotations

STEP = "step"
REWARD_MEAN = "reward/mean"
"""Mean score of the step's responses."""
KL_MEAN = "kl/mean"
"""Mean over response tokens of the KL estimate between actor and reference."""
EXACT_MATCH = "eval/exact_match"
"""Share of held-out problems answered correctly, 0 to 1, where a function alone judges; only in rows of steps that were
evaluated."""
SCORE_MEAN = "eval/score_mean"
"""Mean score of the held-out responses; only in rows of steps that were evaluated."""

STEP_S = "time/step_s"
"""The whole step, from prompts to updated models."""

RECEIVED_BYTES = "switch/received_bytes"
PEAK_WEIGHT_BYTES = "switch/peak_weight_bytes"
REDUNDANT_BYTES = "switch/redundant_bytes"
LOG_PROB_ABS_DIFF_MAX = "rollout/log_prob_abs_diff_max"
"""Largest |log-prob by the engine - log-prob by the training model| of a sampled token."""
RESPONSE_TOKENS_MEAN = "rollout/response_tokens_mean"
"""Mean length of the step's responses; `response_tokens_key` has its quantiles."""
LENGTH_SHARES = (0, 10, 25, 50, 75, 90, 95, 99, 100)
"""Percentages of the responses whose greatest length is a metric."""
TOKENS = "rollout/tokens"
"""Prompt and response tokens of the step."""
TOKENS_PER_S = "throughput/tokens_per_s"
"""Prompt and response tokens of the step over `time/step_s`."""

TRANSFER_BYTES = "transfer/bytes"
"""Bytes of rows that ranks fetched from other processes; `transfer/CALL->CALL_bytes` by producer and consumer."""
PAYLOAD_BYTES = "controller/payload_bytes"
"""Bytes of rows that passed through the controller, inside messages of Ray too."""
OVERHEAD_S = "controller/overhead_s"
"""Part of the step in which no rank was in a call."""


def mean_key(column: str) -> str:
    """Return the metric of a column's mean, such as one of a reward's terms: "reward/style" -> "reward/style_mean"."""
    return f"{column}_mean"


def response_tokens_key(percent: int) -> str:
    """Return the metric of the length that `percent` of the step's responses do not exceed, from 0 to 100."""
    return f"rollout/response_tokens_p{percent}"


def time_key(phase: str) -> str:
    """Return the metric of a phase's seconds: "generate" -> "time/generate_s"."""
    return f"time/{phase}_s"


def memory_key(name: str) -> str:
    """Return the metric of the bytes that a rank's process holds: "resident_bytes" -> "memory/resident_bytes"."""
    return f"memory/{name}"


def phase_of(key: str) -> str | None:
    """Return the phase whose seconds `key` holds, None for another metric: the inverse of `time_key`."""
    if key.startswith("time/") and key.endswith("_s"):
        return key.removeprefix("time/").removesuffix("_s")
    return None

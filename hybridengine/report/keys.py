"""Names of the metrics that the console, the summary, scripts and tests rely on."""

from __future__ import annotations

STEP = "step"
REWARD_MEAN = "reward/mean"
KL_MEAN = "kl/mean"
"""Mean over response tokens of the KL estimate between actor and reference."""
KL_COEF = "kl/coefficient"
"""Weight of the KL penalty in the rewards of the step; only with `algorithm.kl_controller`."""
SFT_LOSS = "actor/sft_loss"
DPO_LOSS = "actor/dpo_loss"
DPO_ACCURACY = "actor/dpo_accuracy"
"""Share of the pairs whose better response has the larger reward by the policy itself."""
EXACT_MATCH = "eval/exact_match"
"""Share of held-out problems answered correctly, 0 to 1; only in rows of evaluated steps if functions give the reward."""
SCORE_MEAN = "eval/score_mean"
HELD_OUT_DROPPED = "eval/dropped_share"
"""Share of held-out responses without a score, such as failed episodes, which the results leave out."""
HELD_OUT_LOSS = "eval/loss"
"""Loss of held-out rows under an algorithm that trains on responses of the data."""
PERPLEXITY = "eval/perplexity"

STEP_S = "time/step_s"
"""Seconds of the whole step, from prompts to updated models."""

RECEIVED_BYTES = "switch/received_bytes"
PEAK_WEIGHT_BYTES = "switch/peak_weight_bytes"
REDUNDANT_BYTES = "switch/redundant_bytes"
LOG_PROB_ABS_DIFF_MAX = "rollout/log_prob_abs_diff_max"
"""Largest |log-prob by the engine - log-prob by the training model| of a sampled token."""
RESPONSE_TOKENS_MEAN = "rollout/response_tokens_mean"
"""Mean length of the step's responses; see `response_tokens_key` for quantiles."""
LENGTH_SHARES = (0, 10, 25, 50, 75, 90, 95, 99, 100)
"""Percentiles of the response length that are metrics."""
TOKENS = "rollout/tokens"
"""Prompt and response tokens of the step."""
TRAINED_TOKENS = "rollout/trained_tokens"
"""Tokens of the step whose log-probabilities are in the loss; only with responses of the data."""
TOKENS_PER_S = "throughput/tokens_per_s"

EPISODE_REWARD = "episode/reward"
"""Reward that an episode's function has returned; a column, as are the following ones."""
EPISODE_FAILURE = "episode/failure"
"""Number of an episode's failure, 0 for none (`rollouts.episodes`)."""
EPISODE_TURNS = "episode/turns"
"""Turns of an episode that the model has completed."""
EPISODE_COLUMNS = (EPISODE_REWARD, EPISODE_FAILURE, EPISODE_TURNS)
"""Columns of every episode; the numbers that functions return have other names."""

QUEUE_COMPLETE = "queue/complete"
"""Responses that wait for the trainer at the end of a step; only in asynchronous runs, as are the following ones."""
QUEUE_UNFINISHED = "queue/unfinished"
"""Responses that engines draw at the end of a step."""
AGE_MEAN = "staleness/age_mean"
AGE_MAX = "staleness/age_max"
OLDER_SHARE = "staleness/older_share"
"""Share of the response tokens that are masked, because they are older than the bound."""

TRANSFER_BYTES = "transfer/bytes"
"""Bytes of rows that ranks fetched from other processes; by producer and consumer in `transfer/CALL->CALL_bytes`."""
PAYLOAD_BYTES = "controller/payload_bytes"
"""Bytes of rows that passed through the controller, including those in Ray's messages."""
OVERHEAD_S = "controller/overhead_s"
"""Seconds of the step during which no rank was in a call."""
RECORDS_S = "controller/records_s"
"""Seconds after the step in which the controller makes its metrics and its part of the timeline, while ranks wait."""


def mean_key(column: str) -> str:
    """Return the metric of a column's mean, such as that of a reward term: "reward/style" -> "reward/style_mean"."""
    return f"{column}_mean"


def episode_key(name: str) -> str:
    """Return the column of a number that episodes return: "solved" -> "episode/solved"."""
    return f"episode/{name}"


def response_tokens_key(percent: int) -> str:
    """Return the metric of a percentile (0 to 100) of the step's response lengths."""
    return f"rollout/response_tokens_p{percent}"


def time_key(phase: str) -> str:
    """Return the metric of a phase's seconds: "generate" -> "time/generate_s"."""
    return f"time/{phase}_s"


def idle_key(pool: str) -> str:
    """Return the metric of the share of the step in which a pool's ranks were in no call: "main" -> "idle/main_share"."""
    return f"idle/{pool}_share"


def pool_of(key: str) -> str | None:
    """Return the pool whose idle share the metric holds, None for other metrics: the inverse of `idle_key`."""
    if key.startswith("idle/") and key.endswith("_share"):
        return key.removeprefix("idle/").removesuffix("_share")
    return None


def memory_key(name: str) -> str:
    """Return the metric of the bytes that a rank's process holds: "resident_bytes" -> "memory/resident_bytes"."""
    return f"memory/{name}"


def phase_of(key: str) -> str | None:
    """Return the phase whose seconds the metric holds, None for other metrics: the inverse of `time_key`."""
    if key.startswith("time/") and key.endswith("_s"):
        return key.removeprefix("time/").removesuffix("_s")
    return None

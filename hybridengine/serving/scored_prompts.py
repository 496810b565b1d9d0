"""Prompts whose own log-probs are wanted.

Shapes: T positions of the prompt, k most likely tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hybridengine.serving.ranks import Prompt, Sample, Sampled, TopLogProbs

NO_LOG_PROB = -99999.0
"""Log-prob of a position without any, as the SDK reads it."""


def is_scored(prompt: Prompt) -> bool:
    """Return True if a prompt is sent for its log-probs, as the SDK does: with one token at temperature 1 after it."""
    return (
        prompt.log_probs_from is not None
        and (prompt.max_tokens, prompt.num_samples, prompt.temperature) == (1, 1, 1.0)
        and (prompt.top_k, prompt.top_p, prompt.stop_ids, prompt.stop_texts) == (-1, 1.0, (), ())
        and not prompt.top_log_probs
    )


def needs_logits(prompt: Prompt) -> bool:
    """Return True if a prompt asks for what an engine does not have: its log-probs, or the most likely tokens."""
    return prompt.log_probs_from is not None or bool(prompt.top_log_probs)


def completed(
    prompt: Prompt, samples: Sequence[Sample], scored: tuple[np.ndarray, TopLogProbs] | None
) -> Sampled:
    """Return the samples of a prompt with the log-probs of the prompt that are wanted."""
    if prompt.log_probs_from is None or scored is None:
        return Sampled(samples)
    log_probs, top = scored
    before = max(1, prompt.log_probs_from)
    whole = np.concatenate([np.full(before, np.nan, np.float32), log_probs[before - 1 :]])
    if not prompt.top_prompt_log_probs:
        return Sampled(samples, whole)
    padding = np.zeros((before, top.ids_Tk.shape[1]))
    return Sampled(
        samples,
        whole,
        TopLogProbs(
            np.concatenate([padding, top.ids_Tk[before - 1 :]]),
            np.concatenate([padding + NO_LOG_PROB, top.log_probs_Tk[before - 1 :]]),
        ),
    )

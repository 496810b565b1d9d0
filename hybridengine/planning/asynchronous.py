"""Formulas of synchronous and asynchronous RL: rates, the largest lag, and the split of devices between the two sides.

Legend: N devices, I of them generate; H responses run on a generating device at once; B responses of a training batch; K
of a conventional iteration; tau: device time that training on a response takes, in units of generating it at full use;
U(h): share of its best rate that a device reaches with h responses at once.

Sources: PipelineRL, arXiv 2509.19128, appendix A; AReaL, arXiv 2505.24298, section 5.1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from hybridengine.planning.lengths import Lengths

Utilisation = Callable[[float], float]


def conventional_generation_time(
    lengths: Lengths, num_responses: int, num_devices: int, use: Utilisation, token_time: float = 1.0
) -> float:
    """Time until all responses of an iteration are complete: sum over l of (h(l) / N) · f / U(h(l) / N).

    At every position l, the h(l) responses that still run are shared out over all devices.

    Args:
        token_time: f, the time of a token at full use.
    """
    total = 0.0
    for running in num_responses * lengths.survival_T:
        if running > 0:
            each = running / num_devices
            total += each * token_time / use(each)
    return total


def conventional_rate(num_responses: int, generation_time: float, num_devices: int, tau: float) -> float:
    """Responses of a conventional iteration over its time: K / (t_gen + K·tau / N)."""
    return num_responses / (generation_time + num_responses * tau / num_devices)


def pipeline_rate(
    use: Utilisation, running: float, num_generating: int, num_devices: int, tau: float
) -> float:
    """Responses over time where generation never stops: the slower side's, min(U(H)·I, (N - I) / tau)."""
    return min(use(running) * num_generating, (num_devices - num_generating) / tau)


def largest_lag(running: float, num_generating: int, lengths: Lengths, batch_size: int) -> int:
    """Optimizer steps from a response's first token to the step that trains on it, at most: ceil(H·I·L / (mean_L·B))."""
    return math.ceil(running * num_generating * lengths.max_tokens / (lengths.mean * batch_size))


def admits(num_submitted: int, batch_size: int, version: int, max_staleness: float) -> bool:
    """Whether another response may be begun: floor((N_r - 1) / B) <= i + eta, where N_r counts it."""
    return num_submitted // batch_size <= version + max_staleness


@dataclass(frozen=True)
class Split:
    """A division of devices between training and generation, in its steady state."""

    num_training: int
    num_generating: int
    running: float
    """Responses that each engine advances at once."""
    tokens_per_s: float
    """Of responses, generated and trained on."""
    staleness: float
    """Optimizer steps, at most, between a response's first token and its last; waiting for the trainer is left out."""


def steady_splits(
    num_devices: int,
    engine_devices: int,
    step_s: Callable[[float], float],
    train_tokens_per_s: Mapping[int, float],
    max_running: int,
    lengths: Lengths,
    batch_size: int,
) -> list[Split]:
    """Every division of the devices, in its steady state.

    The engines run the fewest responses with which they make what the trainers take, N_train·thr = N_sample·B /
    latency(B), or as many as make the most where that is not enough.

    Args:
        engine_devices: of each engine.
        step_s: seconds of an engine's step with so many responses.
        train_tokens_per_s: number of training devices -> tokens of responses that they take in.
        max_running: responses that the KV cache holds.
    """
    counts = np.arange(1, max_running + 1)
    rates = counts / np.array([step_s(float(count)) for count in counts])
    found = []
    for num_training, wanted in train_tokens_per_s.items():
        engines = (num_devices - num_training) // engine_devices
        enough = np.flatnonzero(engines * rates >= wanted)
        running = int(counts[enough[0]] if len(enough) else counts[int(np.argmax(rates))])
        made = engines * running / step_s(float(running))
        tokens_per_s = min(wanted, made)
        step_duration = batch_size * lengths.mean / tokens_per_s
        staleness = lengths.max_tokens * step_s(float(running)) / step_duration
        found.append(Split(num_training, num_devices - num_training, float(running), tokens_per_s, staleness))
    return found

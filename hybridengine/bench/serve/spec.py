"""Work of `hybridengine bench serve`, and its figures; needs no torch."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hybridengine.errors import TopologyError, raise_all
from hybridengine.machine import machine_figures
from hybridengine.topology.sizes import GenSizes, TrainSizes

WARM_UP_ROUNDS = 2
"""Number of uncounted rounds before the counted ones."""
STEP = "step"
TOGETHER = "samples together"
KINDS = ("asample", TOGETHER, "compute_logprobs", "forward_backward", "optim_step", STEP)
"""Kinds of requests, in the order of a round. A step asks for all samples together, then sends forward_backward and
optim_step without waiting between the two."""


@dataclass(frozen=True)
class ServeSpec:
    """Work of a round."""

    num_samples: int
    """Samples that are asked for together, one request each, and rows of a forward_backward."""
    response_tokens: int
    """Tokens of every response; none ends earlier."""
    train: TrainSizes
    gen: GenSizes
    repetitions: int
    """Number of counted rounds."""
    timeout_s: float
    """Longest start of the server."""

    def __post_init__(self) -> None:
        raise_all(
            [f"--generate {self.gen}: {problem}" for problem in self.gen.problems_over(self.train)],
            TopologyError,
        )


@dataclass(frozen=True)
class Timing:
    """One measurement of one kind of request."""

    sdk_s: float
    """From the SDK's call to its result."""
    ranks_s: float
    """Part of `sdk_s` that calls on the ranks take."""
    num_switches: int
    """Switches to generation."""
    num_calls: int
    """Calls on the ranks."""

    @property
    def server_s(self) -> float:
        """Time that is not the ranks': SDK, HTTP, database, the wait for more samples, and sending calls to the ranks."""
        return self.sdk_s - self.ranks_s


def serve_figures(spec: ServeSpec, model: str, rounds: Sequence[Mapping[str, Timing]]) -> dict[str, Any]:
    """Return the figures of a measurement of `model`, the name of its configuration: seconds, medians of the rounds."""
    step_s = statistics.median(one[STEP].sdk_s for one in rounds)
    kinds = {}
    for kind in KINDS:
        timings = [one[kind] for one in rounds]
        server_s = statistics.median(timing.server_s for timing in timings)
        kinds[kind] = {
            "sdk_s": statistics.median(timing.sdk_s for timing in timings),
            "ranks_s": statistics.median(timing.ranks_s for timing in timings),
            "server_s": server_s,
            "server_ms": 1000 * server_s,
            "server_over_step_share": server_s / step_s,
            "num_switches": max(timing.num_switches for timing in timings),
            "num_calls": max(timing.num_calls for timing in timings),
            "samples": [asdict(timing) for timing in timings],
        }
    return {
        "model": model,
        "num_samples": spec.num_samples,
        "response_tokens": spec.response_tokens,
        "parallel": str(spec.train),
        "generate": str(spec.gen),
        "repetitions": spec.repetitions,
        "step_s": step_s,
        "server_share_of_step": kinds[STEP]["server_over_step_share"],
        "switches_of_samples_together": kinds[TOGETHER]["num_switches"],
        "switches_of_step": kinds[STEP]["num_switches"],
        "kinds": kinds,
        "machine": machine_figures(),
    }

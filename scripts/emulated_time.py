"""The time of GPUs that scripts/measure_async.py emulates: its prediction, and sleeping until it has passed.

Ranks that share two cores cannot show what overlaps on GPUs. In an emulated run an engine step takes a time that hardly
depends on the number of responses, as decoding on a GPU does, and a forward pass or an update a time in proportion to the
tokens of a rank. Ranks sleep for what is left of this time after their real work, which leaves the cores to the others;
work that took too long is made up for by the next. Controller, queue, switches and pushes take their real time.

The times are those that the planner predicts for `CLUSTER`, so that `hybridengine simulate` predicts the same run.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from hybridengine.config import RunConfig, model_shape
from hybridengine.planning.costs.clusters import Cluster
from hybridengine.planning.costs.decoding import Engine
from hybridengine.planning.costs.lengths import Lengths
from hybridengine.planning.costs.workload import workload_of
from hybridengine.planning.search.plan import given_plan
from hybridengine.topology.sizes import GenSizes

LENGTHS = "lognormal:mean=64,cv=0.8"
PROMPT_TOKENS = 16
NUM_LAYERS = 2
STEP_S = 0.05
"""Seconds of an engine step, without those of its responses: several times what the tiny model needs on a busy core."""
FLOPS_PER_S = 1.4e9
"""Speed of a rank in training, at which two trainers are as fast as two engines with all their slots in use."""
MOST_LATE_S = 1.0
"""Most time that later work makes up for: compilation at the first requests is not."""
INSTANT = {"bytes_per_s": 1e18, "latency_s": 0.0}
COMPUTE: dict[str, Any] = {
    "flops_per_s": {"float32": FLOPS_PER_S},
    "efficiency": 1.0,
    "half_tokens": 0.0,
    "attention_efficiency": 1.0,
    "activation_passes": 0.0,
    "layer_s": 0.0,
    "micro_batch_s": 0.0,
    "decode_efficiency": 1.0,
    "decode_step_s": 0.0,
    "decode_row_s": 0.0,
    "decode_layer_s": STEP_S / NUM_LAYERS,
    "parameter_s": 0.0,
    "optimizer_step_s": 0.0,
    "call_s": 0.0,
}
"""Section `compute` of the emulated cluster."""
CLUSTER = Cluster.model_validate(
    {
        "name": "emulated GPUs",
        "source": "Times that scripts/measure_async.py emulates.",
        "nodes": 1,
        "devices_per_node": 4,
        "device_memory_bytes": 8 * 2**30,
        "links": {"same_device": INSTANT, "same_node": INSTANT},
        "compute": COMPUTE,
    }
)
"""Emulated devices, without what takes its real time: messages, and the controller's calls."""


def emulated_cluster(machine: Cluster, call_s: float) -> Cluster:
    """Return the emulated cluster with what takes its real time: links of this machine, and the time of a call."""
    values = CLUSTER.model_dump(mode="json")
    values["links"]["same_node"] = machine.links.same_node.model_dump(mode="json")
    values["compute"]["call_s"] = call_s
    return Cluster.model_validate(values)


def lengths_of(run: RunConfig) -> Lengths:
    """Return the distribution of the response lengths of a run."""
    return Lengths.of(LENGTHS, run.rollout.max_response_tokens)


def response_tokens(lengths: Lengths, seed: int) -> int:
    """Return the length of the response with this seed, which is the same in synchronous and asynchronous runs."""
    return int(lengths.sample(np.random.default_rng(seed), 1)[0])


def token_seconds(run: RunConfig) -> dict[str, float]:
    """Return the predicted seconds of each call of the trainers per token of the batch, such as "actor.update"."""
    workload = workload_of(run, lengths_of(run), PROMPT_TOKENS).without_generation()
    return {
        str(bar.call): bar.seconds / workload.num_tokens for bar in given_plan(run, workload, CLUSTER).bars
    }


def engine_cost(run: RunConfig) -> Engine:
    """Return the predicted cost of an engine of one rank."""
    return Engine(model_shape(run), GenSizes(1, 1), 1, run.model.dtype, CLUSTER, run.num_ranks)


class Pace:
    """Lets work take a given time."""

    def __init__(self) -> None:
        self._late_s = 0.0

    @contextlib.contextmanager
    def takes(self, seconds: float) -> Iterator[None]:
        """Sleep after the work until `seconds` have passed since its begin, less what earlier work took too long."""
        begin_s = time.monotonic()
        yield
        end_s = begin_s + seconds - self._late_s
        time.sleep(max(0.0, end_s - time.monotonic()))
        self._late_s = min(MOST_LATE_S, time.monotonic() - end_s)


WORKERS = {
    "actor": "emulated_workers.PacedActor",
    "generation": "emulated_workers.PacedGeneration",
    "reference": "emulated_workers.PacedReference",
}
"""Import path of each role's worker that takes emulated time, as ranks see it."""
"""Import path of each role's worker, as ranks see it."""
PINNED_WORKERS = {
    "actor": "emulated_workers.PinnedActor",
    "generation": "emulated_workers.PinnedGeneration",
}
"""The same of workers that have a core for themselves instead."""

"""Steps of PPO on real ranks with several layouts, model sizes and batch sizes: what coefficients are fitted to.

The learning rate is so small that the model stays as it is: lengths are those of a random model in every step.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hybridengine.config import RunConfig, load_config
from hybridengine.controller.calls import call_log
from hybridengine.drivers.roles import Roles, Sampling, State
from hybridengine.metrics.measured_run import lengths_of, phase_seconds, prompt_tokens_of
from hybridengine.metrics.rows import Row
from hybridengine.metrics.timeline import Span
from hybridengine.model_shapes import DTYPE_BYTES
from hybridengine.planning.fitting import Observation
from hybridengine.planning.workload import workload_of
from hybridengine.topology.sizes import TrainSizes
from hybridengine.training.launch import RunPools

STEPS_PER_SIZE = 4
"""Of each batch size; the first one warms up."""
RESPONSE_TOKENS = 48
CACHE_BLOCK_TOKENS = 128
"""vLLM's block of KV cache on a CPU."""

LEAST_CACHE_BYTES = 2**20

Pair = tuple[int, int]
"""p and t; as many replicas as there are ranks left."""


@dataclass(frozen=True)
class Case:
    """A run with a layout and a model."""

    name: str
    actor: Pair
    generate: Pair
    critic: Pair
    reference: Pair
    layers: int
    hidden_size: int
    batch_sizes: tuple[int, ...]
    halves: bool = False
    """True to leave half of the ranks out: where they share devices, those at work are faster."""

    def fits(self, num_ranks: int) -> bool:
        """Return True if so many ranks can be arranged that way."""
        if self.halves and num_ranks % 2:
            return False
        own = self.own_ranks(num_ranks)
        return all(own % (p * t) == 0 for p, t in (self.actor, self.critic, self.reference))

    def own_ranks(self, num_ranks: int) -> int:
        """Return the ranks that its models have on a machine of so many."""
        return num_ranks // 2 if self.halves else num_ranks


CPU_CASES = (
    Case("small, one of everything", (2, 2), (1, 1), (1, 2), (2, 2), 2, 128, (64, 256)),
    Case("middle, tensor and data", (1, 2), (1, 1), (1, 2), (1, 2), 4, 256, (32, 128)),
    Case("middle, data", (1, 1), (1, 1), (2, 1), (1, 1), 4, 256, (64, 192)),
    Case("middle, tensor", (1, 4), (1, 2), (2, 2), (1, 4), 4, 256, (48, 128)),
    Case("large, pipeline", (2, 2), (1, 2), (1, 2), (2, 2), 6, 512, (16, 48)),
    Case("large, tensor and data", (1, 2), (1, 1), (4, 1), (1, 1), 6, 512, (16, 48)),
    Case("middle, fewer ranks", (1, 1), (1, 1), (1, 2), (1, 1), 4, 256, (64, 192), halves=True),
)
"""Layouts of 4 ranks; those that other numbers of ranks can have."""
SINGLE_CASES = (
    Case("small", (1, 1), (1, 1), (1, 1), (1, 1), 2, 128, (64, 256)),
    Case("middle", (1, 1), (1, 1), (1, 1), (1, 1), 4, 256, (32, 128)),
    Case("large", (1, 1), (1, 1), (1, 1), (1, 1), 6, 512, (16, 48)),
)
"""Where the layouts above leave too few."""
GPU_SCALE, GPU_BATCHES = 8, 4
"""How many times wider models and larger batches are on GPUs, which the small ones would leave idle."""


def cases_for(num_ranks: int, on_gpus: bool) -> list[Case]:
    """The runs to measure with so many ranks."""
    found = [case for case in CPU_CASES if case.fits(num_ranks)]
    if len(found) < len(SINGLE_CASES):
        found = [*found, *SINGLE_CASES]
    unit = 2 * num_ranks  # rows of a mini-batch on every rank
    scale, batches = (GPU_SCALE, GPU_BATCHES) if on_gpus else (1, 1)
    return [
        replace(
            case,
            layers=case.layers * (2 if on_gpus else 1),
            hidden_size=case.hidden_size * scale,
            batch_sizes=tuple(-(-batches * size // unit) * unit for size in case.batch_sizes),
        )
        for case in found
    ]


def case_config(case: Case, num_ranks: int, dtype: str, folder: Path, number: int) -> RunConfig:
    """The configuration of a case, whose files go beneath `folder`."""

    own_ranks = case.own_ranks(num_ranks)

    def sizes(pair: Pair) -> str:
        return str(TrainSizes(*pair, own_ranks // (pair[0] * pair[1])))

    heads = case.hidden_size // 32
    layers = -(-case.layers // case.generate[0])
    engines = own_ranks // (case.generate[0] * case.generate[1])
    token_bytes = 2 * layers * max(1, heads // 2 // case.generate[1]) * 32 * DTYPE_BYTES[dtype]
    rows = max(case.batch_sizes) // engines + 2
    trained = {"micro_batch_tokens": 2048, "mini_batches": 2, "optimizer": {"lr": 1e-9}}
    sections: dict[str, Any] = {
        "run": {"name": f"case{number}", "folder": str(folder), "live": False},
        "cluster": {"ranks_per_node": [own_ranks]},
        "model": {
            "dtype": dtype,
            "build": {
                "family": "qwen2",
                "num_layers": case.layers,
                "hidden_size": case.hidden_size,
                "ffn_hidden_size": case.hidden_size * 11 // 4,
                "num_heads": heads,
                "num_kv_heads": heads // 2,
                "head_dim": 32,
                "max_positions": 128,
                "tied_embeddings": False,
            },
        },
        "data": {"batch_size": max(case.batch_sizes), "task": {"train_rows": 1024, "eval_rows": 8}},
        "actor": {
            "parallel": sizes(case.actor),
            "generate": f"{case.generate[0]}-{case.generate[1]}",
            "bucket_bytes": max(2**20, case.hidden_size**2 * 16),
            **trained,
        },
        "critic": {"parallel": sizes(case.critic), **trained},
        "reference": {"parallel": sizes(case.reference), "micro_batch_tokens": 2048},
        "rollout": {
            "max_prompt_tokens": 16,
            "max_response_tokens": RESPONSE_TOKENS,
            "kv_cache_bytes": max(rows * CACHE_BLOCK_TOKENS * token_bytes, LEAST_CACHE_BYTES),
        },
    }
    file = folder / f"case{number}.yaml"
    file.write_text(json.dumps(sections))  # JSON is YAML
    return load_config(file)


def observe(
    config: RunConfig,
    batch_sizes: tuple[int, ...],
    stop_token_ids: tuple[int, ...],
    say: Callable[[str], None],
) -> Iterator[Observation]:
    """Start the ranks of a case, and carry out steps of each batch size.

    Raises:
        HybridEngineError: a rank failed or did not answer in time.
    """
    with RunPools(config) as pools:
        pools.start()
        actor = pools.start_actor(folder=config.model_folder, stop_token_ids=stop_token_ids)
        actor.start_training()
        roles = pools.start_roles(actor)
        pools.wait()
        number = 0
        for size in batch_sizes:
            data = config.data.model_copy(update={"batch_size": size})
            sized = config.model_copy(update={"data": data})
            steps = []
            for _ in range(STEPS_PER_SIZE):
                number += 1
                steps.append(_step(sized, pools, roles, number))
            one = _observation(sized, steps[1:])
            say(f"  {size} rows: {one.step_s:.2f} s a step")
            yield one


@dataclass(frozen=True)
class _Step:
    metrics: Row
    spans: list[Span]
    seconds: float
    resident_bytes: int


def _step(config: RunConfig, pools: RunPools, roles: Roles, number: int) -> _Step:
    log = call_log()
    sampling = Sampling(number, config.data.batch_size, 1, number * 65_537)
    log.take_records()
    begin = time.time()
    metrics = config.algorithm.step(roles, sampling, State())
    pools.wait()
    seconds, records = time.time() - begin, log.take_records()
    spans = [
        Span(str(record), "", rank, "", record.role, *span, record.pool)
        for record in records
        for rank, span in record.spans.items()
    ]
    held = [by_name.get("resident_bytes", 0) for one in records for by_name in one.held_bytes.values()]
    return _Step(dict(metrics), spans, seconds, max(held, default=0))


def _observation(config: RunConfig, steps: list[_Step]) -> Observation:
    rows = [step.metrics for step in steps]
    name = f"{config.run.name}, {config.data.batch_size} rows"
    workload = workload_of(config, lengths_of(name, RESPONSE_TOKENS, rows), prompt_tokens_of(config, rows))
    return Observation(
        name,
        config,
        workload,
        phase_seconds(workload.calls, [step.spans for step in steps]),
        statistics.median(step.seconds for step in steps),
        max(step.resident_bytes for step in steps),
    )

"""CPU time of a step of vLLM's first sampler for 256 responses, with one generator for all and with one each.

    python scripts/sampler_cost.py

`native` is the path of a GPU with seeds per request, `cpu` that of a CPU. With a vocabulary of 64, hardly any time is
left but the Python loop over requests; `reseeding` is what this project adds to it. Medians of the calling thread's CPU
time, the ways in turn.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from hybridengine.backends.vllm.requests import position_seed
from hybridengine.formatting import aligned

NUM_ROWS = 256
REPETITIONS = {64: 51, 1024: 51, 152_064: 3}
"""By size of the vocabulary."""


def main() -> None:
    from vllm.platforms import current_platform
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

    current_platform.import_kernels()
    torch.set_num_threads(1)
    sampler = TopKTopPSampler("processed_logprobs")
    table = [["path", "vocabulary", "unseeded ms", "seeded ms", "reseeding ms"]]
    for path in ("native", "cpu"):
        for vocab_size in REPETITIONS:
            found = measured(getattr(sampler, f"forward_{path}"), vocab_size)
            table.append([path, f"{vocab_size:,}", *(f"{1e3 * seconds:.2f}" for seconds in found)])
    print(*aligned(table), sep="\n")


def measured(sample: Callable[..., Any], vocab_size: int) -> list[float]:
    """Return the median seconds without generators, with them, and of seeding them."""
    logits = torch.randn(NUM_ROWS, vocab_size)
    generators = {row: torch.Generator() for row in range(NUM_ROWS)}

    def reseed() -> None:
        for row, generator in generators.items():
            generator.manual_seed(position_seed(row, 7))

    def seconds(action: Callable[[], Any]) -> float:
        begun = time.thread_time()
        action()
        return time.thread_time() - begun

    rounds = [
        (
            seconds(lambda: sample(logits, {}, None, None)),
            seconds(lambda: sample(logits, generators, None, None)),
            seconds(reseed),
        )
        for _ in range(REPETITIONS[vocab_size])
    ]
    return [median(times) for times in zip(*rounds, strict=True)]


if __name__ == "__main__":
    main()

"""What a benchmark asks of the machine, so that one that cannot fit is refused before it starts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from hybridengine.bench.spec import BenchSpec, LayoutPair, MethodName
from hybridengine.errors import raise_all
from hybridengine.metrics.formatting import format_bytes

PROCESS_BYTES = 120 * 2**20
"""What a rank's process adds to what all share with the forkserver, roughly."""


def needed_bytes(spec: BenchSpec, pair: LayoutPair) -> int:
    """Bytes that all ranks of a pair take together at the worst moment, roughly.

    Resident all along: the training shard, the raw all-gather's buffers, megatron-core's target. Above that, one method
    at a time: its destination and a few buckets.
    """
    whole = spec.weight_bytes
    train, gen = whole / pair.train.model_parallel_size, whole / pair.gen.num_ranks
    domain = max(1, pair.train.model_parallel_size // pair.gen.num_ranks)
    resident = train * (2 + domain) + (gen if MethodName.MEGATRON_CORE in spec.methods else 0)
    # gloo's all-gather keeps a copy of what it gathers.
    moving = gen + max(train * domain, 4 * min(spec.bucket_bytes, whole))
    return int(pair.train.num_ranks * (resident + moving + PROCESS_BYTES))


def available_bytes(meminfo: Path = Path("/proc/meminfo")) -> int | None:
    """Memory that new processes can have without swapping; None where the system does not say."""
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def num_gpus(devices: Path = Path("/dev"), environment: Mapping[str, str] = os.environ) -> int:
    """NVIDIA GPUs of this machine, 0 where they are hidden; asks no driver."""
    if environment.get("CUDA_VISIBLE_DEVICES") == "":
        return 0
    return sum(1 for path in devices.glob("nvidia*") if path.name.removeprefix("nvidia").isdigit())


def check_machine(spec: BenchSpec, gpus: int, available: int | None) -> None:
    """Check that this machine can hold the ranks of every pair.

    Args:
        gpus: GPUs that the ranks can take, one each; 0 where they run on the CPU.
        available: bytes of host memory for ranks on the CPU; None is enough for anything.

    Raises:
        ConfigError: names the pairs that do not fit.
    """
    if gpus:
        raise_all(
            f"{pair} needs {pair.train.num_ranks} GPUs, this machine has {gpus}; choose smaller training sizes, start"
            " more machines with torchrun, or set CUDA_VISIBLE_DEVICES= to measure on the CPU"
            for pair in spec.pairs
            if pair.train.num_ranks > gpus
        )
        return
    raise_all(
        f"{pair}: {pair.train.num_ranks} ranks with {format_bytes(spec.weight_bytes)} of weights take about"
        f" {format_bytes(needed)}, this machine has {format_bytes(available)} available; choose a smaller model,"
        " --dtype bfloat16 or fewer methods"
        for pair in spec.pairs
        if available is not None and (needed := needed_bytes(spec, pair)) > available
    )

"""A switch on a GPU: what it costs in time, calls of the device's allocator and host copies, and what it releases."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from hybridengine.backends.megatron.shim import device
from hybridengine.backends.vllm.construction import EngineSettings
from hybridengine.weights.executor import Verify
from hybridengine.weights.ledger import SwitchReport
from tests.gpu import one_device
from tests.gpu.one_device import BILLIONS, GIB, MIB, SMALL, DeviceBytes

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

ALLOCATOR_ROUNDING = 512
"""CUDA's caching allocator rounds each block up to a multiple of this many bytes."""
DIGEST_SECONDS = 0.25
"""Longest time that the digests of a switch of 1.5B may take."""
MORE_MALLOCS = 4
PINNED_SHARE = 0.5
"""Least speed of offloading, relative to a copy between the device and pinned memory."""
NUM_TRIPS = 5


@dataclass(frozen=True)
class Trips:
    """Round trips without requests."""

    seconds: list[tuple[float, float]]
    """(to generation, to training)."""
    mallocs: list[int]
    """Allocations that each trip has asked of the device."""
    weights_equal: bool


def make_trips(rank: int, folder: Path, verify: str, kv_cache_bytes: int) -> Trips:
    identity, registry = one_device.begin(rank)
    trainer = one_device.make_trainer(folder, registry)
    settings = EngineSettings(max_model_tokens=256, kv_cache_bytes=kv_cache_bytes, dtype="bfloat16")
    hybrid, _ = one_device.make_hybrid(
        folder, trainer, registry, settings, identity, Verify(verify), bucket_elements=128 * MIB
    )
    before, seconds, mallocs = one_device.optimizer_state(trainer), [], []
    for _ in range(NUM_TRIPS):
        count = one_device.device_bytes().mallocs
        pair = []
        for switch in (hybrid.to_generate, hybrid.to_train):
            started = time.perf_counter()
            switch()
            one_device.synchronize()
            pair.append(time.perf_counter() - started)
        seconds.append((pair[0], pair[1]))
        mallocs.append(one_device.device_bytes().mallocs - count)
    return Trips(seconds, mallocs, one_device.same(before, one_device.optimizer_state(trainer)))


def test_digests_and_allocations_of_a_switch(on_device, folder, note):
    """Passes if digests add at most 0.25 s to the first switch of 1.5B and nothing to later ones, and if the last
    round trip asks the device for no more allocations than the second one, and four: a trip that each time asks
    anew for every bucket waits for the device as often.
    """
    one_device.write_config(folder, **BILLIONS)
    [never] = on_device(1, make_trips, folder, "never", 4 * GIB)
    [first] = on_device(1, make_trips, folder, "first", 4 * GIB)
    for name, trips in (("never", never), ("first", first)):
        steps = ", ".join(f"{there:.3f}+{back:.3f}" for there, back in trips.seconds)
        note(f"digests {name}: {steps} s; allocations {trips.mallocs}")
        assert trips.weights_equal
        assert trips.mallocs[-1] <= trips.mallocs[1] + MORE_MALLOCS
    assert first.seconds[0][0] - never.seconds[0][0] < DIGEST_SECONDS
    assert first.seconds[-1][0] < 1.5 * never.seconds[-1][0] + 0.01


@dataclass(frozen=True)
class Speeds:
    """Bytes per second between the device and host memory, both ways together."""

    offload: float
    pinned: float
    pageable: float
    num_bytes: int
    """Bytes of optimizer state that were offloaded."""


def measure_offload(rank: int, folder: Path, copy_bytes: int) -> Speeds:
    _, registry = one_device.begin(rank)
    trainer = one_device.make_trainer(folder, registry, offload="optimizer")
    one_device.step(trainer, one_device.drawn_rows(2, 8, 24, trainer.shape.vocab_size))
    num_bytes = one_device.optimizer_bytes_on_device(trainer)
    seconds = 0.0
    for _ in range(2):  # the first makes what stays
        one_device.synchronize()
        started = time.perf_counter()
        trainer.leave_training()
        trainer.enter_training()
        one_device.synchronize()
        seconds = time.perf_counter() - started
    pinned = _copy_rate(copy_bytes, torch.cuda.is_available())
    return Speeds(2 * num_bytes / seconds, pinned, _copy_rate(copy_bytes, False), num_bytes)


def _copy_rate(num_bytes: int, is_pinned: bool) -> float:
    """Return the bytes per second of a copy to the host and one back."""
    there = torch.ones(num_bytes, dtype=torch.uint8, device=device())
    here = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_pinned)
    for _ in range(2):
        one_device.synchronize()
        started = time.perf_counter()
        here.copy_(there)
        there.copy_(here)
        one_device.synchronize()
        seconds = time.perf_counter() - started
    return 2 * num_bytes / seconds


def test_offloading_is_as_fast_as_pinned_memory(on_device, folder, note):
    """Passes if the optimizer state of 1.5B leaves the device and comes back at half the speed of pinned memory or
    more; pageable memory is several times slower than that."""
    one_device.write_config(folder, **BILLIONS)
    [speeds] = on_device(1, measure_offload, folder, 2 * GIB)
    note(
        f"offload of {speeds.num_bytes / GIB:.1f} GiB {speeds.offload / 1e9:.1f} GB/s, pinned"
        f" {speeds.pinned / 1e9:.1f}, pageable {speeds.pageable / 1e9:.1f}"
    )
    assert speeds.num_bytes > 12 * GIB
    assert speeds.offload > PINNED_SHARE * speeds.pinned


@dataclass(frozen=True)
class Ledgers:
    """A switch there and back, a response between them, and the allocator's figures."""

    there: SwitchReport
    back: SwitchReport
    training: DeviceBytes
    generating: DeviceBytes
    afterwards: DeviceBytes
    kv_cache_bytes: int
    num_weights: int
    shard_bytes: tuple[int, int]
    bucket_bytes: int
    num_parameters: int
    """Parameters in both layouts, each of which has a storage."""
    released_sides: tuple[int, int]
    """Bytes of training weights and gradients while generating, and of the engine's weights and KV cache afterwards."""


def compare_ledgers(rank: int, folder: Path, kv_cache_bytes: int) -> Ledgers:
    identity, registry = one_device.begin(rank)
    trainer = one_device.make_trainer(folder, registry, offload="optimizer")
    settings = EngineSettings(
        max_model_tokens=256, kv_cache_bytes=kv_cache_bytes, dtype="bfloat16", cuda_graphs=False
    )
    hybrid, engine = one_device.make_hybrid(folder, trainer, registry, settings, identity)
    one_device.step(trainer, one_device.drawn_rows(2, 8, 24, trainer.shape.vocab_size))
    training = one_device.device_bytes()
    there = hybrid.to_generate()
    generating, kv_bytes = one_device.device_bytes(), engine.kv_cache_bytes
    in_training = trainer.weights.live_bytes + trainer.gradient_bytes
    one_device.draw(engine, [[3, 14, 15]], 8)
    back = hybrid.to_train()
    trainer.enter_training()
    return Ledgers(
        there,
        back,
        training,
        generating,
        one_device.device_bytes(),
        kv_bytes,
        sum(trainer.weights[name].numel() for name in trainer.weights.names),
        (trainer.weights.total_bytes, engine.weights.total_bytes),
        one_device.largest_bucket_bytes(hybrid, engine),
        len(trainer.weights.names) + len(engine.weights.names),
        (in_training, engine.weights.live_bytes + engine.kv_cache_bytes),
    )


def check_ledger(found: Ledgers) -> None:
    """Assert what the ledger and the storages say, on any device."""
    assert found.there.redundant_bytes == found.back.redundant_bytes == 0
    assert found.there.received_bytes == found.back.received_bytes == 0
    assert found.released_sides == (0, 0)
    assert found.there.peak_weight_bytes <= max(found.shard_bytes) + 2 * found.bucket_bytes


def test_a_switch_gives_and_takes_memory_as_the_ledger_says(on_device, folder):
    """Passes if torch's allocator has what the ledger counts: a switch releases float32 gradients and optimizer
    state, 16 bytes a parameter, and allocates the KV cache; the way back restores all but what decoding keeps."""
    one_device.write_config(folder, **SMALL)
    [found] = on_device(1, compare_ledgers, folder, 64 * MIB)
    check_ledger(found)
    rounding = ALLOCATOR_ROUNDING * found.num_parameters
    released = found.training.allocated - (found.generating.allocated - found.kv_cache_bytes)
    assert released >= 16 * found.num_weights - rounding
    assert abs(found.afterwards.allocated - found.training.allocated) <= rounding + 16 * MIB

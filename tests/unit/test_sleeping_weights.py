"""Weights at fixed addresses. Mapping physical memory needs a GPU: a stand-in for the allocator keeps account of it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hybridengine.backends.vllm.sleeping import GPU_PAGE_BYTES, CuMemSegments, SleepingWeights

KIB, MIB = 1024, 2**20
MEMORY = torch.zeros(8 * KIB, dtype=torch.uint8)
PLACES = {"a": (0, KIB), "b": (KIB, 256), "c": (KIB + 256, 128), "d": (2 * KIB, 512), "e": (4 * KIB, 64)}
"""Parameter -> place in the memory and number of bytes: b and c share a segment, and d shares one with a buffer."""
BUFFER = 2 * KIB + 512
SEGMENTS: tuple[int, ...] = (0, KIB, 2 * KIB)
"""Places of the segments of 1 KiB; e is elsewhere."""


def at(place: int, num_bytes: int) -> Tensor:
    return torch.frombuffer(MEMORY.numpy(), dtype=torch.float32, count=num_bytes // 4, offset=place)


class Account:
    """Stand-in for the allocator: it refuses to map or unmap a segment twice."""

    def __init__(self) -> None:
        self._first = MEMORY.data_ptr()
        self.mapped: set[int] = set(SEGMENTS)

    @property
    def bounds(self) -> Mapping[int, int]:
        return {self._first + place: KIB for place in SEGMENTS}

    def map(self, start: int) -> None:
        assert start - self._first not in self.mapped
        self.mapped.add(start - self._first)

    def unmap(self, start: int) -> None:
        self.mapped.remove(start - self._first)


def new_weights() -> tuple[SleepingWeights, Account]:
    account = Account()
    tensors = {name: at(*place) for name, place in PLACES.items()}
    return SleepingWeights(tensors, [at(BUFFER, 64)], account), account


@given(st.lists(st.tuples(st.booleans(), st.sets(st.sampled_from(sorted(PLACES)))), max_size=12))
@settings(max_examples=200, deadline=None)
def test_a_segment_is_mapped_while_one_of_its_parameters_is_live(steps: list[tuple[bool, set[str]]]) -> None:
    weights, account = new_weights()
    live = set(PLACES)
    for releases, names in steps:
        if releases:
            weights.release(names)
        else:
            weights.materialise(names)
        live = live - names if releases else live | names
        expected = {2 * KIB} | ({0} if "a" in live else set()) | ({KIB} if live & {"b", "c"} else set())
        assert account.mapped == expected
        assert weights.mapped_bytes == KIB * len(expected)
        assert weights.live_bytes == sum(PLACES[name][1] for name in live)
        assert {name for name in PLACES if weights.is_live(name)} == live


def test_parameters_are_zero_where_a_plan_writes_only_a_part_of_them() -> None:
    weights, _ = new_weights()
    MEMORY.fill_(1)
    weights.release(["a", "d"])
    weights.part(["a", "d"], zero=["b", "d"]).materialise()
    assert not weights["d"].any()
    assert weights["a"].all() and weights["b"].all()


class Driver:
    """Stand-in for vLLM's allocator module: it refuses to map twice, to unmap what is not mapped, or parts of pages."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.mapped: dict[int, int] = {}
        self.total_bytes, self.cached = sum(tensor.nbytes for tensor in tensors) + 4 * MIB, 0
        self.pointer_to_data = {}
        for tensor in tensors:
            handle = 0, -(-tensor.nbytes // GPU_PAGE_BYTES) * GPU_PAGE_BYTES, tensor.data_ptr(), 1
            self.pointer_to_data[tensor.data_ptr()] = SimpleNamespace(
                tag="weights", handle=handle, is_asleep=False
            )
            self.create_and_map(handle)

    @property
    def CuMemAllocator(self) -> Any:
        return SimpleNamespace(get_instance=lambda: self)

    @property
    def free_bytes(self) -> int:
        return self.total_bytes - self.cached - sum(self.mapped.values())

    def empty_cache(self) -> None:
        self.cached = 0

    def create_and_map(self, handle: tuple[int, int, int, int]) -> None:
        _, size, start, number = handle
        assert size <= self.free_bytes
        assert size > 0 and size % GPU_PAGE_BYTES == 0 and number
        assert all(start + size <= other or other + held <= start for other, held in self.mapped.items())
        self.mapped[start] = size

    def unmap_and_release(self, handle: tuple[int, int, int, int]) -> None:
        _, size, start, _ = handle
        assert self.mapped.pop(start) == size


@pytest.fixture
def new_driver(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Driver]:
    """Return a function that puts a driver in the place of vLLM's, on a device of which torch's cache can fill a part."""

    def install(*tensors: Tensor) -> Driver:
        driver = Driver(tensors)
        package = ModuleType("vllm.device_allocator")
        package.cumem = driver  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "vllm.device_allocator", package)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(
            torch.cuda, "mem_get_info", lambda device: (driver.free_bytes, driver.total_bytes)
        )
        monkeypatch.setattr(torch.cuda, "empty_cache", driver.empty_cache)
        return driver

    return install


def test_a_segment_takes_what_torch_keeps_in_its_cache(new_driver: Callable[..., Driver]) -> None:
    """The device has 16 MiB. Once the weights, 12 MiB, are released, training leaves 10 MiB in torch's cache."""
    memory = torch.empty(16 * MIB, dtype=torch.uint8)
    tensors = {"a": memory[: 6 * MIB], "b": memory[6 * MIB : 12 * MIB]}
    driver = new_driver(*tensors.values())
    weights = SleepingWeights(tensors, [], CuMemSegments(tensors.values()))
    weights.release()
    driver.cached = 10 * MIB
    weights.materialise(["a"])
    assert driver.cached == 10 * MIB, "there was room"
    weights.materialise(["b"])
    assert (driver.cached, driver.free_bytes) == (0, 4 * MIB)


def test_experts_have_physical_memory_of_their_own(new_driver: Callable[..., Driver]) -> None:
    """Two of 4 experts, of 3 MiB each, fill three pages of 2 MiB; the dense weight, of 5 MiB, has a segment of 6 MiB."""
    memory = torch.empty(20 * MIB, dtype=torch.uint8)
    experts, dense = memory[: 12 * MIB].view(4, 3 * MIB, 1), memory[14 * MIB : 19 * MIB]
    driver = new_driver(experts, dense)
    segments = CuMemSegments([experts, dense])
    first, other = experts.data_ptr(), dense.data_ptr()
    assert segments.bounds == {first: 6 * MIB, first + 6 * MIB: 6 * MIB, other: 6 * MIB} == driver.mapped
    assert driver.pointer_to_data[first].is_asleep, "vLLM would map the whole again"
    tensors = {f"e[{place}]": part for place, part in enumerate(experts)} | {"dense": dense}
    weights = SleepingWeights(tensors, [], segments)
    weights.release(["e[0]", "dense"])
    assert driver.mapped == {first: 6 * MIB, first + 6 * MIB: 6 * MIB}
    assert driver.pointer_to_data[other].is_asleep
    weights.release(["e[1]"])
    assert driver.mapped == {first + 6 * MIB: 6 * MIB}
    weights.materialise(["e[1]", "dense"])
    assert driver.mapped == {first: 6 * MIB, first + 6 * MIB: 6 * MIB, other: 6 * MIB}
    assert not driver.pointer_to_data[other].is_asleep

"""Budgets of a run against the devices of its ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hybridengine.config import holder_shape, load_config, model_holders
from hybridengine.families.family import NameSet
from hybridengine.machine import PROCESS_BYTES, Device
from hybridengine.planning.budget import Budget
from hybridengine.planning.devices import (
    Placed,
    device_problems,
    fp8_problems,
    mixed_gpu_problems,
    node_bytes,
)
from hybridengine.reshard.megatron import megatron_layout
from hybridengine.training.dry_run import budgets_of

ROOT = Path(__file__).parents[2]
GB = 10**9
REMEDY = "set actor.recompute=full, lower actor.micro_batch_tokens=8192, take more ranks"
MAIN = Budget(
    "main",
    0,
    {"load": 30 * GB, "training step": 50 * GB, "save": 20 * GB},
    HOST := GB,
    0,
    {"training step": REMEDY}.__getitem__,
)
SMALL = Budget(
    "critic",
    0,
    {"load": 10 * GB, "training step": 15 * GB},
    HOST,
    0,
    {"training step": "take more ranks"}.__getitem__,
)


def gpus(*sizes: int) -> list[Placed]:
    return [
        Placed(f"10.0.0.{place}", Device(size * GB, is_gpu=True, node_bytes=8 * GB))
        for place, size in enumerate(sizes)
    ]


def hosts(size: int, *nodes: str) -> list[Placed]:
    return [Placed(node, Device(size * GB, is_gpu=False, node_bytes=size * GB)) for node in nodes]


@pytest.mark.parametrize(
    ("kind", "capability", "has"),
    [
        ("blockwise", (9, 0), None),
        ("tensorwise", (8, 9), None),
        ("blockwise", (), None),  # not known
        ("tensorwise", (8, 0), "has a GPU of 8.0"),
        ("mxfp8", (9, 0), "has a GPU of 9.0"),
        ("mxfp8", None, "has no GPU"),
    ],
)
def test_products_in_8_bits_need_kernels(
    kind: str, capability: tuple[int, ...] | None, has: str | None
) -> None:
    device = Device(80 * GB, capability is not None, 8 * GB, capability or ())
    budgets = {"main": [MAIN, replace(MAIN, rank=1, fp8={"actor.fp8": kind})]}
    found = list(fp8_problems(budgets, {"main": [Placed("a", replace(device)), Placed("b", device)]}))
    assert len(found) == (has is not None)
    for text, remedy in found:
        assert text.startswith(f"actor.fp8={kind} needs GPUs of compute capability ")
        assert text.endswith(f", and rank 1 of pool main on node b {has}")
        assert remedy == "set actor.fp8=none, or take other devices"


def test_budgets_name_the_models_with_products_in_8_bits() -> None:
    overrides = ["actor.fp8=blockwise", "rollout.quantization=fp8"]
    config = load_config(ROOT / "configs/qwen2.5-7b-8gpu.yaml", overrides, dry_run=True)
    expected = {"actor.fp8": "blockwise", "rollout.quantization": "fp8"}
    assert [budget.fp8 for budget in budgets_of(config, on_gpus=True)["main"]] == [expected] * 8


@pytest.mark.parametrize(
    ("device", "num_problems"),
    [(Device(GB, False, GB), 0), (Device(GB, True, GB, (8, 9)), 0), (Device(GB, True, GB, (8, 0)), 1)],
)
def test_engines_in_8_bits_run_on_a_cpu_and_not_on_every_gpu(device: Device, num_problems: int) -> None:
    budgets = {"main": [replace(MAIN, fp8={"rollout.quantization": "fp8"})]}
    assert len(list(fp8_problems(budgets, {"main": [Placed("a", device)]}))) == num_problems


def of_rank(budget: Budget, *factors: float) -> list[Budget]:
    """Return budgets of ranks, each with this many times the bytes in every phase."""
    return [
        replace(
            budget,
            rank=rank,
            device_bytes={name: int(factor * one) for name, one in budget.device_bytes.items()},
        )
        for rank, factor in enumerate(factors)
    ]


def test_gpus_of_a_pool_have_the_same_kernels() -> None:
    def of(node: str, *capability: int) -> Placed:
        return Placed(node, Device(80 * GB, True, 8 * GB, capability))

    hopper, ampere, unknown = of("a", 9, 0), of("b", 8, 0), of("c")
    assert not list(mixed_gpu_problems({"main": [hopper, hopper, unknown], "critic": [ampere]}))
    assert not list(mixed_gpu_problems({"main": hosts(80, "a", "b")}))
    (problem,) = mixed_gpu_problems({"main": [hopper, ampere, hopper, ampere], "critic": [ampere]})
    assert "the GPUs of pool main have different compute capabilities (8.0 on b; 9.0 on a)" in problem


def test_every_rank_has_a_gpu_of_its_own() -> None:
    assert not list(device_problems({"main": [MAIN] * 3}, {"main": gpus(50, 80, 80)}))
    both = {"main": [MAIN], "critic": [SMALL]}
    assert not list(device_problems(both, {"main": gpus(50), "critic": gpus(15)}))


def test_the_rank_that_misses_most_is_named() -> None:
    """A part of a GPU (MIG) among whole ones fits a smaller stage; one of its size does not fit the fullest."""
    stages = of_rank(MAIN, 1, 0.4, 1)
    assert not list(device_problems({"main": stages}, {"main": gpus(80, 20, 80)}))
    (problem,) = device_problems({"main": stages}, {"main": gpus(20, 19, 40)})
    assert problem.missing_bytes == 30 * GB
    for part in (
        "phase 'training step' of pool main needs 46.6 GiB on rank 0",
        "its GPU on node 10.0.0.0 has 18.6 GiB",
        "30.0 GB are missing",
        "; set actor.recompute=full, lower actor.micro_batch_tokens=8192, take more ranks",
    ):
        assert part in str(problem)


def test_each_pool_that_does_not_fit_is_named() -> None:
    ranks = {"main": gpus(40, 80), "critic": gpus(14)}
    one, other = device_problems({"main": [MAIN] * 2, "critic": [SMALL]}, ranks)
    assert "pool main" in one.text and "10.0 GB are missing" in one.text
    assert "pool critic" in other.text and "1.0 GB are missing" in other.text


@pytest.mark.parametrize(("size", "missing"), [(81, None), (80, "0.9 GB"), (40, "40.9 GB")])
def test_ranks_share_the_memory_of_a_node(size: int, missing: str | None) -> None:
    """Ranks of 50 and 30 GB on one node, one on another: two share the memory, beside 0.47 GB of each one's process."""
    found = list(device_problems({"main": of_rank(MAIN, 1, 1, 0.6)}, {"main": hosts(size, "a", "b", "a")}))
    assert bool(found) == bool(missing)
    for one in found:
        assert "its 2 rank(s) on node a, and the node, beside processes" in one.text
        assert f"{missing} are missing" in one.text and one.remedy == REMEDY
        assert ("(and 1 more node(s) lack memory)" in one.text) == (size < 50)


@pytest.mark.parametrize(("size", "pool"), [(61, None), (60, "main"), (35, "main")])
def test_pools_share_the_memory_of_a_node_at_different_times(size: int, pool: str | None) -> None:
    """While one is in its largest phase, the other may be in its smallest: 50 beside 10, and 15 beside 20."""
    budgets, ranks = (
        {"main": [MAIN], "critic": [SMALL]},
        {"main": hosts(size, "a"), "critic": hosts(size, "a")},
    )
    found = [one.text for one in device_problems(budgets, ranks)]
    assert [text.split(" of pool ")[1].split()[0] for text in found] == ([pool] if pool else [])
    assert node_bytes(budgets) == 60 * GB + 2 * PROCESS_BYTES
    apart = {"main": hosts(size, "a"), "critic": hosts(size, "b")}
    assert len(list(device_problems(budgets, apart))) == (size < 50)


def test_offloaded_state_takes_memory_of_a_node_without_gpus() -> None:
    offloaded = {"main": [replace(MAIN, offloaded_bytes=20 * GB)]}
    assert not list(device_problems(offloaded, {"main": hosts(71, "a")}))
    (problem,) = device_problems(offloaded, {"main": hosts(60, "a")})
    assert "10.5 GB are missing" in problem.text


def test_host_memory_beside_gpus() -> None:
    """Two ranks of one pool and one of another on a node: 3, 3 and 1 GB."""
    one_node = [Placed("a", Device(80 * GB, is_gpu=True, node_bytes=7 * GB))]
    large = replace(MAIN, host_bytes=3 * GB)
    fitting = {"main": [large] * 2, "critic": [SMALL]}
    assert not list(device_problems(fitting, {"main": one_node * 2, "critic": one_node}))
    crowded = {"main": [large] * 2, "critic": [SMALL] * 3}
    (problem,) = device_problems(crowded, {"main": one_node * 2, "critic": one_node * 3})
    assert "ranks on node a need" in problem.text and "2.0 GB are missing" in problem.text
    assert problem.remedy.startswith("spread the ranks over more nodes, ")


def test_ranks_of_uneven_stages_hold_what_their_stages_do() -> None:
    """In float32, a parameter of the actor's and the critic's has 12 bytes of weight and moments between two updates, of
    the reference's 4."""
    sizes = [f"{name}.parallel=6-1-1" for name in ("actor", "critic", "reference")]
    config = load_config(ROOT / "configs/smollm2.yaml", sizes, dry_run=True)
    (budgets,) = budgets_of(config, on_gpus=False).values()
    each = {"actor": 12, "critic": 12, "reference": 4}
    held = [0] * 6
    for holder in model_holders(config):
        layout = megatron_layout(holder_shape(config, holder), holder.grid, NameSet.LOCAL)
        for rank in range(6):
            held[rank] += each[holder.role] * layout.shard(rank).num_elements
    assert [budget.device_bytes["save"] for budget in budgets] == held
    assert sum(held) < 6 * max(held) / 1.7, "the stages are even"

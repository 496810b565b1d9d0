"""The paper's placements in shape: HybridFlow, arXiv 2409.19256, section 8.3.

Its workload is configs/hybridflow-ppo.yaml, its cluster configs/clusters/a100-80gb-16x8.yaml, whose rates are data
sheets and whose other coefficients are assumptions; docs/planner.md shows the figures beside the paper's, also where they
differ.
"""

from __future__ import annotations

from functools import cache

import pytest

from hybridengine.config import load_config
from hybridengine.planning.clusters import load_cluster
from hybridengine.planning.lengths import Lengths
from hybridengine.planning.options import Options
from hybridengine.planning.search import Plan, Search
from hybridengine.planning.workload import Workload, workload_of

A100 = load_cluster("configs/clusters/a100-80gb-16x8.yaml")


@cache
def workload(*overrides: str) -> Workload:
    config = load_config("configs/hybridflow-ppo.yaml", overrides, dry_run=True)
    return workload_of(config, Lengths.of("constant:1024", 1024))


@cache
def options(*overrides: str) -> Options:
    return Options(workload(*overrides), A100)


def colocated_and_split(num_devices: int, *overrides: str) -> tuple[Plan, Plan]:
    """The best plan with all models on the same devices, and the best of the fourteen others."""
    found = Search(options(*overrides), num_devices).run()
    assert found.exact and found.num_placements == 15
    together = next(plan for plan in found.plans if len(plan.placement) == 1)
    apart = next(plan for plan in found.plans if len(plan.placement) > 1)
    return together, apart


@pytest.mark.parametrize("num_devices", [16, 32, 64])
def test_13b_colocates_on_few_devices(num_devices: int) -> None:
    together, apart = colocated_and_split(num_devices)
    assert together.step_s < apart.step_s


@pytest.mark.parametrize("num_devices", [96, 128])
def test_13b_splits_on_many(num_devices: int) -> None:
    together, apart = colocated_and_split(num_devices)
    assert apart.step_s < together.step_s

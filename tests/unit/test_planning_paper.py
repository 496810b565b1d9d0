"""The shape of the paper's placements: HybridFlow, arXiv 2409.19256, section 8.3.

The workload is configs/hybridflow-ppo.yaml, the cluster configs/clusters/a100-80gb-16x8.yaml. Its rates come from data
sheets, and its other coefficients are assumptions; docs/explanation/planner.md compares the figures with
the paper's, and lists those that differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest

from hybridengine.config import load_config
from hybridengine.planning.costs.clusters import load_cluster
from hybridengine.planning.costs.lengths import Lengths
from hybridengine.planning.costs.workload import PlannedModel, Workload, workload_of
from hybridengine.planning.search.options import Option, Options
from hybridengine.planning.search.placements import Placement, placements
from hybridengine.planning.search.plan import Plan
from hybridengine.planning.search.search import Search
from hybridengine.topology.sizes import GenSizes, TrainSizes

B7, B13, B34 = (f"model.hf_config={name}" for name in ("llama2-7b", "llama2-13b", "codellama-34b"))
CRITIC_70B = ("critic.hf_config=llama2-70b", "reward.hf_config=llama2-70b")
ALL_TOGETHER: Placement = (("actor", "reference", "critic", "reward"),)
OTHERS = [found for found in placements(ALL_TOGETHER[0]) if len(found) > 1]
A100 = load_cluster("configs/clusters/a100-80gb-16x8.yaml")


@cache
def workload(*overrides: str) -> Workload:
    config = load_config("configs/hybridflow-ppo.yaml", overrides, dry_run=True)
    return workload_of(config, Lengths.of("constant:1024", 1024))


class PaperOptions(Options):
    """Options of the paper, whose systems have neither context ranks nor virtual stages."""

    def _train_sizes(self, model: PlannedModel, num_ranks: int) -> Iterator[TrainSizes]:
        sizes = super()._train_sizes(model, num_ranks)
        return (one for one in sizes if one.cp_size == one.virtual_stages == 1)


class Bounded(PaperOptions):
    """Options whose switches cost their lower bounds, because planning them takes most of the time of a search.

    `test_switches_decide_nothing` shows that plans of switches change nothing here.
    """

    def planned(self, option: Option) -> Option:
        return option


@cache
def bounded(*overrides: str) -> Options:
    return Bounded(workload(*overrides), A100)


def colocated_and_split(options: Options, num_devices: int) -> tuple[Plan, Plan]:
    """Return the best plan with all models on the same devices, and the best of the fourteen other placements."""
    (together,) = Search(options, num_devices, [ALL_TOGETHER]).run().plans
    found = Search(options, num_devices, OTHERS, num_best=1).run()
    assert found.exact and found.num_placements == 14
    return together, found.plans[0]


@pytest.mark.parametrize(("overrides", "num_devices"), [((B13,), 96), ((B13, *CRITIC_70B), 32)])
def test_switches_decide_nothing(overrides: tuple[str, ...], num_devices: int) -> None:
    """With planned switches the placements are the same, and a step takes under 1 % longer."""
    plans, others = (
        colocated_and_split(options, num_devices)
        for options in (PaperOptions(workload(*overrides), A100), bounded(*overrides))
    )
    assert (plans[0].step_s < plans[1].step_s) == (num_devices != 96)
    for plan, other in zip(plans, others, strict=True):
        assert plan.placement == other.placement
        assert other.step_s <= plan.step_s < 1.01 * other.step_s


@pytest.mark.parametrize(("model", "num_devices"), [(B13, 16), (B13, 64), (B34, 32), (B34, 64)])
def test_colocating_is_best_on_few_devices(model: str, num_devices: int) -> None:
    together, apart = colocated_and_split(bounded(model), num_devices)
    assert together.step_s < apart.step_s


@pytest.mark.parametrize(("model", "num_devices"), [(B13, 96), (B13, 128), (B34, 128)])
def test_splitting_is_best_on_many(model: str, num_devices: int) -> None:
    """The split has two halves of equal size, as in the paper."""
    together, apart = colocated_and_split(bounded(model), num_devices)
    assert apart.step_s < together.step_s
    assert [pool.num_ranks for pool in apart.pools] == [num_devices // 2] * 2


def test_a_larger_critic_colocates_far_ahead_on_few_devices() -> None:
    """A 13B actor and reference with a 70B critic and reward model: the lead shrinks with more devices."""
    leads = []
    for num_devices in (32, 64):
        together, apart = colocated_and_split(bounded(B13, *CRITIC_70B), num_devices)
        leads.append(apart.step_s / together.step_s)
    assert leads[0] > 1.25 and leads[1] > 1.1
    assert leads == sorted(leads, reverse=True)


def test_beside_a_larger_critic_on_half_of_128_the_other_three_colocate() -> None:
    """The paper's placement on 128 devices. Colocating all four is faster here: docs/explanation/planner.md."""
    alone = [placement for placement in OTHERS if ("critic",) in placement]
    fixed = {"critic": TrainSizes(16, 4, 1)}
    best = Search(Bounded(workload(B13, *CRITIC_70B), A100, fixed), 128, alone, num_best=1).run().plans[0]
    assert {
        frozenset(pool): shape.num_ranks for pool, shape in zip(best.placement, best.pools, strict=True)
    } == {
        frozenset({"actor", "reference", "reward"}): 64,
        frozenset({"critic"}): 64,
    }


@pytest.mark.parametrize(("model", "best"), [(B7, 2), (B13, 4)])
def test_generation_has_fewer_tensor_shards_than_training(model: str, best: int) -> None:
    """Section 8.4: training with t = 8 on 16 devices; t_g = 8 is worst, and values below the best one are worse again."""
    seconds = {}
    for gen_tp in (1, 2, 4, 8):
        options = Bounded(workload(model), A100, {"actor": TrainSizes(1, 8, 2)}, GenSizes(1, gen_tp))
        (plan,) = Search(options, 16, [ALL_TOGETHER]).run().plans
        seconds[gen_tp] = plan.phases_s["generate"]
    assert min(seconds, key=seconds.__getitem__) == best
    assert max(seconds, key=seconds.__getitem__) == 8

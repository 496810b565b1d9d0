"""Search for the best placement, numbers of ranks and sizes of a workload on a cluster.

For each placement (models that share a pool) and each allocation (number of ranks of each pool), every model can have any
of its options. An iteration never gets shorter when one of its calls gets longer, so the least seconds of each call give
lower bounds:

1. The bounds of all allocations are computed at once, first from arithmetic that all ranks share evenly (`bounds`).
   Allocations are examined in the order of their bounds, until a bound is no better than the best plan so far. The
   options of a model on a number of ranks are computed when an allocation with it is examined; bounds are then better.
2. Within an allocation, models are assigned their options in turn, the fastest options first, without those that are no
   better than another one in any respect. A branch ends if its models do not fit into memory with the least that the
   others need, or if the iteration, with the least seconds of the models without an option yet, is no better than the
   best plan so far.
3. The switch of a complete assignment is then planned, and its KV cache limited to the memory left on a rank.

Source: the auto-mapping of HybridFlow, arXiv 2409.19256, section 6 and appendix C. Differences: pools smaller than a node
are included, d is an integer that divides the rows, and transitions are part of the time.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hybridengine.machine import without_garbage_collection
from hybridengine.planning.costs.passes import compute_of
from hybridengine.planning.search.bounds import least_seconds
from hybridengine.planning.search.options import Option, Options, undominated
from hybridengine.planning.search.placements import Placement, allocations, placements, pool_sizes
from hybridengine.planning.search.plan import Plan, Schedule

MAX_ALLOCATIONS = 400_000
"""Largest number of allocations per placement; above it, pools get only round sizes, and the search is not exact."""
CHUNK = 50_000
"""Number of allocations whose bounds are computed at a time."""


@dataclass(frozen=True)
class Found:
    plans: tuple[Plan, ...]
    """Best plan of each of the best placements, best first."""
    exact: bool
    """True if no plan in the search space is better."""
    num_placements: int
    num_allocations: int
    """Number of allocations whose bounds were computed."""
    num_solved: int
    """Number of allocations that were examined."""


class Search:
    """Search for the best plans on `num_devices` devices of a cluster.

    `only` limits the placements of roles, `num_best` the plans returned; `progress` gets (searched placements, all).
    """

    def __init__(
        self,
        options: Options,
        num_devices: int,
        only: Sequence[Placement] | None = None,
        num_best: int | None = None,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        self._num_best, self._progress = num_best, progress
        self.options, self.workload, self.cluster = options, options.workload, options.cluster
        self.num_devices, self.only = num_devices, only
        self.capacity_bytes = self.cluster.model_memory_bytes
        self.sizes = pool_sizes(self.cluster, num_devices)
        self._least: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        self._known: set[tuple[str, int]] = set()
        self._allocations: dict[int, tuple[np.ndarray, bool]] = {}
        self._useful: dict[tuple[str, int], list[Option]] = {}

    def run(self) -> Found:
        """Return the best plans, each of a different placement."""
        searches = [_PlacementSearch(self, placement) for placement in self.wanted]
        searches.sort(key=lambda search: search.least_s)  # a good plan found early prunes more
        plans = list[Plan]()
        for number, search in enumerate(searches):
            self._progress(number, len(searches))
            enough = self._num_best is not None and len(plans) >= self._num_best
            with without_garbage_collection():
                plan = search.run(plans[-1].step_s if enough else math.inf)
            if plan is not None:
                plans = sorted([*plans, plan], key=lambda plan: plan.step_s)[: self._num_best]
        every = [self.allocations(len(search.placement)) for search in searches]
        return Found(
            tuple(plans),
            all(complete for _, complete in every),
            len(searches),
            sum(len(candidates) for candidates, _ in every),
            sum(search.num_solved for search in searches),
        )

    @property
    def wanted(self) -> list[Placement]:
        """Placements to search, by model instead of role; only colocation if the devices share a CPU's cores."""
        roles = self.workload.roles
        shared = compute_of(self.cluster).devices_at_once is not None
        possible = [(tuple(roles),)] if shared else placements(tuple(roles))
        return [
            tuple(tuple(name for role in pool for name in roles[role]) for pool in placement)
            for placement in (self.only or possible)
        ]

    def allocations(self, num_pools: int) -> tuple[np.ndarray, bool]:
        """Return the ranks of each pool, [A, pools], and True if the allocations are complete."""
        if num_pools not in self._allocations:
            sizes: Sequence[int] = self.sizes
            complete = math.comb(len(sizes), num_pools - 1) <= MAX_ALLOCATIONS
            if not complete:
                coarse = {size for size in sizes if _is_round(size)}
                coarse |= {self.num_devices - size for size in coarse}
                sizes = sorted(coarse & set(sizes))
            found = allocations(sizes, num_pools, self.num_devices, self.cluster.devices_per_node)
            self._allocations[num_pools] = found, complete
        return self._allocations[num_pools]

    def least_seconds(self, model: str) -> tuple[np.ndarray, np.ndarray]:
        """Return lower bounds of the seconds of a model's calls with exactly and with at most n ranks, [calls,
        num_devices + 1]; infinite without an option. For sizes that were looked into, the first are the least seconds."""
        if model not in self._least:
            num_calls = sum(call.role == model for call in self.workload.calls)
            table = np.full((num_calls, self.num_devices + 1), np.inf)
            for size in self.sizes:
                table[:, size] = least_seconds(self.options, model, size, self.capacity_bytes)
            self._least[model] = table, np.minimum.accumulate(table, axis=1)
        return self._least[model]

    def look_into(self, model: str, size: int) -> bool:
        """Compute the least seconds of a model's calls with `size` ranks; return False if they were known."""
        if (model, size) in self._known:
            return False
        self._known.add((model, size))
        table, at_most = self.least_seconds(model)
        fitting = [option.least_seconds for option in self.fitting(model, size)]
        table[:, size] = np.min(fitting, axis=0) if fitting else np.inf
        np.minimum.accumulate(table, axis=1, out=at_most)
        return True

    def fitting(self, model: str, size: int) -> list[Option]:
        """Return the options of a model that fit on a rank without other models."""
        return self.options.fitting(model, size, self.capacity_bytes)

    def useful(self, model: str, size: int) -> list[Option]:
        """Return the fitting options of a model that may be part of the best plan."""
        if (model, size) not in self._useful:
            fitting, node = self.fitting(model, size), self.cluster.devices_per_node
            self._useful[model, size] = undominated(fitting, node)
        return self._useful[model, size]

    def fits(self, options: Sequence[Option], others_idle_bytes: int = 0) -> bool:
        """Return True if the models fit on a rank together, with one at work at a time."""
        idle = sum(option.memory.idle for option in options) + others_idle_bytes
        return idle + max(option.extra_bytes for option in options) <= self.capacity_bytes

    def beside(self, option: Option, others_idle_bytes: int) -> Option | None:
        """Return the option with as much KV cache as fits in addition to the other models; None if that is too little."""
        if (engine := option.engine) is None:
            return option
        room = self.capacity_bytes - others_idle_bytes - option.memory.generating - engine.gen_bytes
        room -= engine.switch.retained_bytes
        if room < engine.least_kv_bytes:
            return None
        return option if room >= engine.kv_bytes else self.options.with_cache(option, room)


class _PlacementSearch:
    """Search for the best plan of one placement."""

    least_s: float
    """Lower bound of the seconds of all plans; infinite if there are none."""
    num_solved: int

    def __init__(self, search: Search, placement: Placement) -> None:
        self._search, self.placement = search, placement
        self._pool_of = {name: pool for pool in placement for name in pool}
        self._schedule = Schedule(search.workload.calls, placement, compute_of(search.cluster).call_s)
        self._tried: set[tuple[int, ...]] = set()
        self._best: Plan | None = None
        self._best_s = math.inf
        self.num_solved = 0
        self.least_s = float(self._bounds().min(initial=math.inf))

    def run(self, limit_s: float) -> Plan | None:
        """Return the best plan; None if the models fit in no allocation, or no plan takes less than `limit_s`."""
        self._best_s = limit_s
        if self.least_s >= limit_s:
            return None
        while self._examine():
            pass
        return self._best

    def _examine(self) -> bool:
        """Examine allocations in the order of their bounds; return True when bounds became better on the way."""
        candidates, _ = self._search.allocations(len(self.placement))
        bounds = self._bounds()  # recomputed: few placements get here, and the bounds of all take much memory
        for row in np.argsort(bounds, kind="stable"):
            if bounds[row] >= self._best_s or not np.isfinite(bounds[row]):
                break
            for sizes in self._smaller(tuple(candidates[row].tolist())):
                size_of = self._size_of(sizes)
                improved = [self._search.look_into(name, size) for name, size in size_of.items()]
                if any(improved):
                    self._tried.discard(sizes)
                    return True
                self._solve(sizes)
        return False

    def _size_of(self, sizes: tuple[int, ...]) -> dict[str, int]:
        return {name: size for pool, size in zip(self.placement, sizes, strict=True) for name in pool}

    def _bounds(self) -> np.ndarray:
        """Return lower bounds, in seconds, of plans with at most the ranks of each allocation, [A]."""
        candidates, _ = self._search.allocations(len(self.placement))
        found = [np.empty(0)]
        for first in range(0, len(candidates), CHUNK):
            chunk = candidates[first : first + CHUNK]
            seconds = {
                name: list(self._search.least_seconds(name)[1][:, chunk[:, place]])
                for place, pool in enumerate(self.placement)
                for name in pool
            }
            found.append(np.broadcast_to(self._schedule.step_s(seconds, np.maximum), (len(chunk),)))
        return np.concatenate(found)

    def _smaller(self, sizes: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """Yield the allocation, and those with fewer ranks in some pools, if they may be better than the best so far."""
        choices = []
        for place, most in enumerate(sizes):
            useful = []
            for size in (size for size in self._search.sizes if size <= most):
                seconds = {}
                for other, names in enumerate(self.placement):
                    for name in names:
                        exactly, at_most = self._search.least_seconds(name)
                        table = exactly[:, size] if other == place else at_most[:, sizes[other]]
                        seconds[name] = table.tolist()
                if self._schedule.step_s(seconds) < self._best_s:
                    useful.append(size)
            choices.append(useful[::-1])
        for one in itertools.product(*choices):
            if one not in self._tried:
                self._tried.add(one)
                yield one

    def _solve(self, sizes: tuple[int, ...]) -> None:
        """Examine all options of the models on pools of the given sizes."""
        size_of = self._size_of(sizes)
        least = {
            name: self._search.least_seconds(name)[0][:, size].tolist() for name, size in size_of.items()
        }
        if self._schedule.step_s(least) >= self._best_s:
            return
        self.num_solved += 1
        options = {name: self._search.useful(name, size) for name, size in size_of.items()}
        least_idle = {name: min(option.memory.idle for option in options[name]) for name in options}
        for name, own in options.items():
            others = sum(least_idle[other] for other in self._pool_of[name] if other != name)
            beside = [
                self._search.beside(option, others) for option in own if self._search.fits([option], others)
            ]
            useful = (
                option
                for option in beside
                if option is not None
                and self._schedule.step_s({**least, name: option.least_seconds}) < self._best_s
            )
            options[name] = sorted(useful, key=lambda option: sum(option.least_seconds))
            if not options[name]:
                return
            least[name] = np.min([option.least_seconds for option in options[name]], axis=0).tolist()
        self._branch(sizes, options, least_idle, least, {})

    def _branch(
        self,
        sizes: tuple[int, ...],
        options: Mapping[str, Sequence[Option]],
        least_idle: Mapping[str, int],
        seconds: dict[str, Sequence[float]],
        chosen: dict[str, Option],
    ) -> None:
        """Assign each option to the next model in turn."""
        name = next((name for name in self._pool_of if name not in chosen), None)
        if name is None:
            self._settle(sizes, chosen)
            return
        pool, before = self._pool_of[name], seconds[name]
        for option in options[name]:
            there = [chosen[other] for other in pool if other in chosen]
            waiting = sum(least_idle[other] for other in pool if other not in chosen and other != name)
            seconds[name] = option.least_seconds
            if self._search.fits([*there, option], waiting) and self._schedule.step_s(seconds) < self._best_s:
                chosen[name] = option
                self._branch(sizes, options, least_idle, seconds, chosen)
                del chosen[name]
        seconds[name] = before

    def _settle(self, sizes: tuple[int, ...], chosen: Mapping[str, Option]) -> None:
        """Keep the plan with the chosen options if it is the best so far."""
        limited: dict[str, Option] = {}
        for name, pool in self._pool_of.items():  # the KV cache is cheap to check, the switch is not
            others = sum(chosen[other].memory.idle for other in pool if other != name)
            beside = self._search.beside(chosen[name], others)
            if beside is None:
                return
            limited[name] = beside
        seconds = {name: option.least_seconds for name, option in limited.items()}
        if self._schedule.step_s(seconds) >= self._best_s:
            return
        planned = {name: self._search.options.planned(option) for name, option in limited.items()}
        pools = []
        for pool in self.placement:
            idle = {name: planned[name].memory.idle for name in pool}
            fitting = [self._search.beside(planned[name], sum(idle.values()) - idle[name]) for name in pool]
            pools.append(
                [option for option in fitting if option is not None]
            )  # training weights may be retained
            if len(pools[-1]) < len(pool):
                return
        if all(self._search.fits(pool) for pool in pools):
            plan = Plan.of(self.placement, pools, sizes, self._schedule, self._search.cluster)
            if plan.step_s < self._best_s:
                self._best, self._best_s = plan, plan.step_s


def _is_round(size: int) -> bool:
    """Return True for 1, 2, 3, 4, 6, 8, 12, 16, ...: a power of two, or 1.5 times a power of two."""
    while size % 2 == 0:
        size //= 2
    return size in (1, 3)

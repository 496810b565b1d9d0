"""Explanation of a search without a result: the memory that models lack, and remedies."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from hybridengine.planning.costs.workload import Workload
from hybridengine.planning.search.options import Option, Options
from hybridengine.planning.search.placements import GENERATE
from hybridengine.planning.search.search import Search

GIB = 2**30
MOST_DEVICES = 1024
"""Largest number of devices that a remedy names; above it, a search takes minutes."""


@dataclass(frozen=True)
class _Need:
    """Options with which models that share ranks need the least memory."""

    options: tuple[Option, ...]

    @cached_property
    def num_bytes(self) -> int:
        """Bytes that the models need on a rank."""
        idle = sum(option.memory.idle for option in self.options)
        return idle + max(option.extra_bytes for option in self.options)

    def __str__(self) -> str:
        names = " + ".join(option.model for option in self.options)
        sizes = ", ".join(
            f"{option.model} {option.sizes}{f' with {option.engine.sizes}' if option.engine else ''}"
            for option in self.options
        )
        num_ranks = self.options[0].sizes.num_ranks
        ranks = "1 rank" if num_ranks == 1 else f"{num_ranks} ranks"
        return f"{names} on {ranks} needs {self.num_bytes / GIB:.1f} GiB a rank at best ({sizes})"


def shortage(search: Search) -> str:
    """Return the reason why `search` has no result, as value, rule and remedy."""
    capacity, processes = search.capacity_bytes, search.cluster.process_bytes
    names = [model.name for model in search.workload.models]
    alone = []
    for name in names:
        need = _least(search, (name,), search.sizes)
        if need is None:
            return _no_sizes(search, name)
        if need.num_bytes > capacity:
            alone.append(need)
    devices = "1 device" if search.num_devices == 1 else f"{search.num_devices} devices"
    where = f"on {devices} of {search.cluster.name}"
    pools = _nearest(search)
    if not pools:
        given = _given(search)
        return (
            f"no plan of {', '.join(names)} exists {where}: each model can have sizes by itself, and no pools can have"
            f" them together; {f'relax {given}, or ' if given else ''}give another number of devices"
        )
    needs = alone or [need for need in pools if need.num_bytes > capacity]
    missing = [f"{need} and misses by {(need.num_bytes - capacity) / GIB:.1f} GiB" for need in needs]
    remedies = list(_remedies(search, needs or pools))
    if not needs:
        missing = ["models and KV caches would, but the plans of switches need more at their peak"]
        remedies.append(f"a lower actor.bucket_bytes={search.workload.bucket_bytes}")
    return (
        f"nothing fits {where} ({max(0, capacity) / GIB:.1f} GiB of each are for models, {processes / GIB:.1f}"
        f" GiB for processes): {'; '.join(missing)}; {' or '.join(remedies)} would do"
    )


def _given(search: Search) -> str:
    """Return the constraints of `search`, sizes and placements, as text."""
    fixed = [f"--fix {name}={sizes}" for name, sizes in search.options.fixed.items()]
    if search.options.fixed_gen is not None:
        fixed.append(f"--fix {GENERATE}={search.options.fixed_gen}")
    placement = [" | ".join(",".join(pool) for pool in pools) for pools in search.only or ()]
    return " and ".join([*fixed, *(f"placement {one!r}" for one in placement)])


def _no_sizes(search: Search, name: str) -> str:
    model, workload = search.workload.model(name), search.workload
    rows = [f"the {workload.rows_per_step} rows of a step"]
    if model.trains:
        rows.append(f"those of each of {name}.mini_batches={model.mini_batches}")
    if name == "actor" and workload.warmup_rows is not None:
        rows.append(f"warmup.batch_size={workload.warmup_rows}")
    nested = ", engines nest in training shards (p_g divides p, t_g divides t)" if name == "actor" else ""
    return (
        f"{name} cannot have {_given(search) or 'any sizes'} on up to {search.num_devices} devices: tensor shards must"
        f" divide its {model.shape.num_heads} heads and lie on a node of {search.cluster.devices_per_node}, stages be at"
        f" most its {model.shape.num_layers} layers{nested}, and replicas share out {', '.join(rows)}, each rank at least"
        " one; choose other sizes, another data.batch_size or other mini-batches"
    )


def _nearest(search: Search) -> list[_Need]:
    """Return the pools of the allowed placement closest to fitting; empty if none is possible."""
    best: list[_Need] = []
    for placement in search.wanted:
        sizes, _ = search.allocations(len(placement))
        found = [{size: _least(search, pool, (size,)) for size in search.sizes} for pool in placement]
        needed = np.zeros(len(sizes))
        for place, by_size in enumerate(found):
            table = np.full(search.num_devices + 1, np.inf)
            for size, need in by_size.items():
                table[size] = need.num_bytes if need else np.inf
            needed = np.maximum(needed, table[sizes[:, place]])
        if needed.min(initial=np.inf) < _largest(best):
            row = sizes[needed.argmin()].tolist()
            best = [need for by_size, size in zip(found, row, strict=True) if (need := by_size[size])]
    return best


def _largest(needs: Sequence[_Need]) -> float:
    return max((need.num_bytes for need in needs), default=math.inf)


def _least(search: Search, names: Sequence[str], sizes: Sequence[int]) -> _Need | None:
    """Return the options with which models that share a rank need the least memory; None if a model has no options."""
    found = []
    for size in sizes:
        of = [search.options.of(name, size) for name in names]
        if all(of):
            idle = [min(own, key=lambda option: option.memory.idle) for own in of]
            for place, own in enumerate(of):  # one model is at its peak, the others are idle
                leader = min(own, key=lambda option: option.memory.idle + option.extra_bytes)
                found.append(_Need((*idle[:place], leader, *idle[place + 1 :])))
    return min(found, key=lambda need: need.num_bytes, default=None)


def _remedies(search: Search, needs: Sequence[_Need]) -> Iterator[str]:
    """Yield verified remedies: settings of the models that lack memory, more devices, larger devices."""
    names = [option.model for need in needs for option in need.options]
    for offloads, recompute in ((True, False), (False, True), (True, True)):
        settings, workload = _with_settings(search.workload, names, offloads, recompute)
        if settings and _changed_bytes(search, workload, search.num_devices) <= search.capacity_bytes:
            yield " ".join(settings)
            break
    if (devices := _enough_devices(search)) is not None:
        yield f"{devices} devices"
    if search.capacity_bytes < (largest := _largest(_nearest(search))) < math.inf:
        yield f"devices with {math.ceil((largest + search.cluster.process_bytes) / GIB * 10) / 10:.1f} GiB"


def _with_settings(
    workload: Workload, names: Sequence[str], offloads: bool, recompute: bool
) -> tuple[list[str], Workload]:
    """Return the settings to add to the trained models, and the workload with them."""
    models, settings = [], []
    for model in workload.models:
        if model.trains and model.name in names:
            if offloads and model.offload != "optimizer":
                settings.append(f"{model.name}.offload=optimizer")
            if recompute and model.settings.recompute != "full":
                settings.append(f"{model.name}.recompute=full")
            changed = model.settings.model_copy(update={"recompute": "full"} if recompute else {})
            model = replace(model, offload="optimizer" if offloads else model.offload, settings=changed)
        models.append(model)
    return settings, replace(workload, models=tuple(models))


def _changed_bytes(search: Search, workload: Workload, num_devices: int) -> float:
    """Return the bytes that a rank needs at best with another workload or number of devices; infinite if impossible."""
    nodes = max(search.cluster.nodes, -(-num_devices // search.cluster.devices_per_node))
    options = Options(workload, search.cluster.resized(nodes), search.options.fixed, search.options.fixed_gen)
    return _largest(_nearest(Search(options, num_devices, search.only)))


def _enough_devices(search: Search) -> int | None:
    """Return a number of devices, found by doubling, on which all models fit; None if there is none."""
    cluster, devices, least = search.cluster, 2 * search.num_devices, math.inf
    while devices <= MOST_DEVICES and (devices <= cluster.num_devices or cluster.links.between_nodes):
        needed = _changed_bytes(search, search.workload, devices)
        if needed <= search.capacity_bytes:
            return devices
        if least <= needed < math.inf:  # more devices do not reduce the memory per rank
            return None
        least = min(least, needed)
        devices *= 2
    return None

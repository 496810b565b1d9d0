"""Explanation of a search that has found nothing: which model misses by how much, and what would help."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from hybridengine.planning.constraints import GENERATE
from hybridengine.planning.option import Option
from hybridengine.planning.options import Options
from hybridengine.planning.search import Search

GIB = 2**30
MOST_DEVICES = 1024
"""Beyond that nobody is told to rent more: a search there takes minutes."""
NO_BETTER = 1
"""Times that the devices are doubled without a rank needing less, before giving up."""


@dataclass(frozen=True)
class _Need:
    """The least that a rank must have for some models together."""

    names: tuple[str, ...]
    options: tuple[Option, ...]
    num_bytes: int

    @property
    def num_ranks(self) -> int:
        """Ranks of their pool."""
        return self.options[0].sizes.num_ranks


def shortage(search: Search) -> str:
    """Return why `search` has found nothing, as value, rule and remedy."""
    capacity, names = search.capacity_bytes, [model.name for model in search.workload.models]
    alone = []
    for name in names:
        need = _least(search, (name,), search.sizes)
        if need is None:
            return _no_sizes(search, name)
        if need.num_bytes > capacity:
            alone.append(need)
    plural = "" if search.num_devices == 1 else "s"
    where = f"on {search.num_devices} device{plural} of {search.cluster.name}"
    pools = _nearest(search)
    if pools is None:
        given = _given(search)
        return (
            f"no plan of {', '.join(names)} exists {where}: each model can have sizes by itself, and no pools can have"
            f" them together; {f'relax {given}, or ' if given else ''}give another number of devices"
        )
    needs = alone or [need for need in pools if need.num_bytes > capacity]
    missing = [_told(need, capacity) for need in needs]
    remedy = _remedy(search, needs or list(pools))
    if not needs:
        missing = ["models and KV caches would, but the plans of switches need more at their peak"]
        remedy += f", or lower actor.bucket_bytes={search.workload.bucket_bytes}"
    return (
        f"nothing fits {where} ({max(0, capacity) / GIB:.1f} GiB of each are for models, {search.process_bytes / GIB:.1f}"
        f" GiB for processes): {'; '.join(missing)}; {remedy}"
    )


def _given(search: Search) -> str:
    """Return what constrains `search`: sizes and placements."""
    fixed = [f"{name}={sizes}" for name, sizes in search.options.fixed.items()]
    if search.options.fixed_gen is not None:
        fixed.append(f"{GENERATE}={search.options.fixed_gen}")
    placement = [" | ".join(",".join(pool) for pool in pools) for pools in search.only or ()]
    given = [*(f"--fix {one}" for one in fixed), *(f"placement {one!r}" for one in placement)]
    return " and ".join(given)


def _nearest(search: Search) -> tuple[_Need, ...] | None:
    """Return the pools of an allowed placement that come nearest to fitting; None where none can be."""
    best: tuple[_Need, ...] | None = None
    for placement in search.wanted:
        sizes, _ = search.allocations(len(placement))
        if not len(sizes):
            continue
        found = [{size: _least(search, pool, (size,)) for size in search.sizes} for pool in placement]
        needed = np.zeros(len(sizes))
        for place, by_size in enumerate(found):
            table = np.full(search.num_devices + 1, np.inf)
            for size, need in by_size.items():
                table[size] = np.inf if need is None else need.num_bytes
            needed = np.maximum(needed, table[sizes[:, place]])
        row = int(np.argmin(needed))
        if np.isfinite(needed[row]) and (best is None or needed[row] < _largest(best)):
            nearest = [by_size[size] for by_size, size in zip(found, sizes[row].tolist(), strict=True)]
            best = tuple(need for need in nearest if need is not None)
    return best


def _largest(needs: tuple[_Need, ...]) -> int:
    return max(need.num_bytes for need in needs)


def _told(need: _Need, capacity: int) -> str:
    missing = (need.num_bytes - capacity) / GIB
    sizes = ", ".join(f"{option.model} {_sizes(option)}" for option in need.options)
    ranks = "1 rank" if need.num_ranks == 1 else f"{need.num_ranks} ranks"
    return (
        f"{' + '.join(need.names)} on {ranks} needs {need.num_bytes / GIB:.1f} GiB a rank at best ({sizes}) and misses"
        f" by {missing:.1f} GiB"
    )


def _sizes(option: Option) -> str:
    return str(option.sizes) if option.engine is None else f"{option.sizes} with {option.engine.sizes}"


def _no_sizes(search: Search, name: str) -> str:
    model, workload, node = search.workload.model(name), search.workload, search.cluster.devices_per_node
    rows = f"{workload.num_prompts * workload.samples_per_prompt} rows ({workload.num_prompts} prompts of"
    rows += f" {workload.samples_per_prompt} responses) must be enough for its replicas"
    if model.trains:
        rows += f" and split evenly over them and {name}.mini_batches={model.mini_batches}"
    if name == "actor" and workload.warmup_rows is not None:
        rows += f", warmup.batch_size={workload.warmup_rows} over its replicas"
    if model.role in workload.rank_rows:
        rows += f", and {workload.rank_rows[model.role]} rows must give each rank at least one"
    nested = " engines nest in training shards (p_g divides p, t_g divides t)," if name == "actor" else ""
    return (
        f"{name} cannot have {_given(search) or 'any sizes'} on up to {search.num_devices} devices: tensor shards must"
        f" divide its {model.shape.num_heads} heads and lie on a node of {node}, stages divide its"
        f" {model.shape.num_layers} layers,{nested} and {rows}; choose other sizes, another data.batch_size or other"
        " mini-batches"
    )


def _least(search: Search, names: tuple[str, ...], sizes: tuple[int, ...]) -> _Need | None:
    """Return the options with which models that share a rank need the least; None where one has no options."""
    best: _Need | None = None
    for size in sizes:
        of = {name: search.options.of(name, size) for name in names}
        if not all(of.values()):
            continue
        for leader in names:  # whose work is the peak; the others are idle
            idle = {
                name: min(of[name], key=lambda option: option.memory.idle) for name in names if name != leader
            }
            chosen = min(of[leader], key=lambda option: option.memory.idle + option.extra_bytes())
            options = tuple(chosen if name == leader else idle[name] for name in names)
            num_bytes = sum(option.memory.idle for option in options)
            num_bytes += max(option.extra_bytes() for option in options)
            if best is None or num_bytes < best.num_bytes:
                best = _Need(names, options, num_bytes)
    return best


def _remedy(search: Search, needs: list[_Need]) -> str:
    """Return what has been tried and would do."""
    found = []
    if (settings := _settings(search, needs)) is not None:
        found.append(settings)
    if (devices := _enough_devices(search, needs)) is not None:
        found.append(f"{devices} devices")
    if (nearest := _nearest(search)) is not None and _largest(nearest) > search.capacity_bytes:
        needed = math.ceil((_largest(nearest) + search.process_bytes) / GIB * 10) / 10
        found.append(f"devices with {needed:.1f} GiB")
    if found:
        return " or ".join(found) + " would do"
    return "take a smaller model, or raise data.batch_size, which bounds the ranks, or relax --fix"


def _fits(search: Search) -> bool:
    """Return True if all models fit in an allowed placement."""
    nearest = _nearest(search)
    return nearest is not None and _largest(nearest) <= search.capacity_bytes


def _settings(search: Search, needs: list[_Need]) -> str | None:
    """Return the fewest settings of the models that miss with which everything fits."""
    names = {name for need in needs for name in need.names}
    wanted = [model.name for model in search.workload.models if model.name in names and model.trains]
    for offloads, recompute in ((True, False), (False, True), (True, True)):
        models, settings = [], []
        for model in search.workload.models:
            if model.name in wanted and offloads and not model.offloads:
                model = replace(model, offloads=True)
                settings.append(f"{model.name}.offload=optimizer")
            if model.name in wanted and recompute and not model.recompute:
                model = replace(model, recompute=True)
                settings.append(f"{model.name}.recompute=full")
            models.append(model)
        workload = replace(search.workload, models=tuple(models))
        options = Options(workload, search.cluster, search.options.fixed, search.options.fixed_gen)
        if settings and _fits(Search(options, search.num_devices, search.only)):
            return " ".join(settings)
    return None


def _enough_devices(search: Search, needs: list[_Need]) -> int | None:
    """Return a number of devices on which all models fit, from twice as many on."""
    node, devices = search.cluster.devices_per_node, search.num_devices
    fixed = any(name in search.options.fixed for need in needs for name in need.names)
    if fixed or search.capacity_bytes <= 0:
        return None
    least, unchanged = float("inf"), 0
    while devices * 2 <= MOST_DEVICES and unchanged < NO_BETTER:
        devices *= 2
        cluster = search.cluster
        if devices > cluster.num_devices:
            if cluster.links.between_nodes is None:
                return None
            cluster = cluster.resized(-(-devices // node))
        options = Options(search.workload, cluster, search.options.fixed, search.options.fixed_gen)
        nearest = _nearest(Search(options, devices, search.only))
        if nearest is None:
            continue
        if _largest(nearest) <= search.capacity_bytes:
            return devices
        unchanged = unchanged + 1 if _largest(nearest) >= least else 0
        least = min(least, _largest(nearest))
    return None

"""What thousands of ranks cost the controller, and each rank before the first step.

    python scripts/controller_scale.py                          steps of PPO: 128 to 16,384 simulated ranks; minutes
    python scripts/controller_scale.py steps 32 1024            these numbers of ranks
    python scripts/controller_scale.py steps 1024 --direct      without relays: every rank is called by the controller
    python scripts/controller_scale.py plans                    plans of a rank's own weights on 16,384 ranks
    python scripts/controller_scale.py groups                   process groups that every rank creates

Pool, groups and the step of PPO are those of a run; ranks, and relays over them, are threads of four Ray actors that
answer as they do, at once. CPU seconds are those of the controller's process with all its threads; they do not depend on
how long ranks take, but a busy machine makes them up to twice as many.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

os.environ |= {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
}  # Ray reads them when it is imported
sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import psutil
import ray
import torch
from ray import cloudpickle

from hybridengine.controller import relays
from hybridengine.controller.call_log import CallRecord, call_log
from hybridengine.controller.failures import Outcome
from hybridengine.controller.pool import ResourcePool
from hybridengine.controller.rank_process import RankIdentity
from hybridengine.controller.relays import Branch, Request, Share, branches_over
from hybridengine.controller.stored_rows import Owner, StoredColumn, StoredRows
from hybridengine.controller.worker_group import WorkerGroup
from hybridengine.drivers.ppo import Ppo
from hybridengine.drivers.roles import Roles, Sampling, Scorers
from hybridengine.formatting import aligned
from hybridengine.importing import import_object, nothing_collected
from hybridengine.models.presets import resolve_model
from hybridengine.report.timeline import Reading, Span, TimelineWriter
from hybridengine.reshard.compiler import compile_plan
from hybridengine.reshard.domains import domains
from hybridengine.reshard.megatron import megatron_layout
from hybridengine.reshard.vllm import vllm_layout
from hybridengine.temporary import temporary_folder
from hybridengine.topology.generation import GenerationGrid
from hybridengine.topology.grid import Grid, group_with
from hybridengine.topology.sizes import GenSizes, TrainSizes
from hybridengine.training.iterations import call_metrics

NUM_RANKS = (128, 1024, 4096, 16384)
NUM_HOSTS, RANKS_PER_NODE, STEPS = 4, 8, 9
PROCESS = psutil.Process()
WORKERS = {
    "actor": "workers.actor.ActorWorker",
    "critic": "workers.critic.CriticWorker",
    "reference": "workers.reference.ReferenceWorker",
    "reward": "workers.reward.RewardFunctionWorker",
    "compute": "workers.compute.ComputeWorker",
    "prompts": "workers.prompts.PromptWorker",
}
REPORT = dict.fromkeys(("received_bytes", "peak_weight_bytes", "redundant_bytes"), 1) | {
    f"train/{number}": 0.5 for number in range(20)
}
"""What a rank returns where it does not return rows: as many entries as an update's metrics."""
COLUMNS = ("tokens", "log_probs")


class Host:
    """Threads that answer as ranks and relays do."""

    def __init__(self) -> None:
        self._result = cloudpickle.dumps(REPORT)
        self._content = ray.put(np.zeros((4, 8), dtype=np.uint8))

    def rank(self, rank: int, share: Share, *_: Any) -> Outcome:
        now, held = time.time(), {"resident_bytes": 2**30 + rank, "device_bytes": 2**36}
        return Outcome(now, time.time(), held_bytes=held, result=self._result if share.is_source else None)

    @ray.method(num_returns=2)
    def rows_of_rank(self, rank: int, share: Share, *_: Any) -> tuple[Outcome, StoredRows]:
        columns = {name: StoredColumn(self._content, False, torch.float32, (2,)) for name in COLUMNS}
        lengths = np.zeros((len(share.rows), 8), dtype=np.uint8)
        columns["lengths"] = StoredColumn(lengths, True, torch.int64)
        stored = StoredRows(Owner("10.0.0.1", 1, rank), len(share.rows), columns)
        return self.rank(rank, Share(share.rows)), stored

    def relay(self, begin: int, request: Request) -> dict[int, Outcome]:
        shares = enumerate(request.read_shares(), start=begin)
        return {rank: self.rank(rank, share) for rank, share in shares}

    @ray.method(num_returns=2)
    def rows_of_relay(self, begin: int, request: Request) -> tuple[dict[int, Outcome], list[Any]]:
        shares = [Share(share.rows) for share in request.read_shares()]
        return self.relay(begin, request._replace(shares=shares)), [ray.put([])]  # nobody reads the rows


@dataclass
class Method:
    """A method of a simulated process."""

    call: Callable[..., Any]

    def remote(self, *arguments: Any) -> Any:
        return self.call(*arguments)


class Simulated:
    """A rank, or a relay over ranks from `first` on, on one of the hosts."""

    def __init__(self, host: Any, first: int, is_relay: bool = False) -> None:
        if is_relay:
            self.call = Method(lambda _, request: host.relay.remote(first, request))
            self.give_rows = Method(lambda _, request: host.rows_of_relay.remote(first, request))
        else:
            self.call = self.add_role = Method(
                lambda _, share, *inputs: host.rank.remote(first, share, *inputs)
            )
            self.give_rows = Method(lambda _, share, *inputs: host.rows_of_rank.remote(first, share, *inputs))


class SimulatedPool(ResourcePool):
    """A pool whose ranks are simulated."""

    def start(self) -> None:
        if self.started:
            return
        host_class = ray.remote(Host).options(max_concurrency=64, num_cpus=0)
        hosts = [host_class.remote() for _ in range(NUM_HOSTS)]
        processes = [Simulated(hosts[rank % NUM_HOSTS], rank) for rank in range(self.num_ranks)]
        turns = cycle(hosts)

        def new_relay(branches: Sequence[Branch]) -> Simulated:
            return Simulated(next(turns), branches[0].ranks.start, is_relay=True)

        self._branches = branches_over(processes, new_relay)
        self._identities = [
            RankIdentity(rank, self.num_ranks, rank % RANKS_PER_NODE, RANKS_PER_NODE, _node(rank), ())
            for rank in range(self.num_ranks)
        ]

    def close(self) -> None:
        self._closed = True


def _node(rank: int) -> str:
    node = rank // RANKS_PER_NODE
    return f"10.0.{node // 250}.{node % 250 + 1}"


def steps(num_ranks: int) -> list[str]:
    """Return a row of the table: costs of groups and steps of PPO."""
    with nothing_collected():  # as a group does
        for worker in WORKERS.values():
            import_object(worker)
    ray.init(address="local", num_cpus=8, include_dashboard=False, logging_level=logging.ERROR)
    pool = SimulatedPool([RANKS_PER_NODE] * (num_ranks // RANKS_PER_NODE))
    pool.start()
    sizes = f"4-8-{num_ranks // 32}"
    begin, before = time.process_time(), PROCESS.memory_info().rss
    groups = {
        role: WorkerGroup(
            pool,
            worker,
            role=role,
            parallel=sizes if role in ("actor", "critic", "reference") else f"1-1-{num_ranks}",
            generate="1-8" if role == "actor" else None,
        )
        for role, worker in WORKERS.items()
    }
    made_s = time.process_time() - begin
    scorers = Scorers([groups.pop("reward")], groups["compute"], {}, ())
    roles, algorithm, log = Roles(**groups, reward=scorers), Ppo(), call_log()  # type: ignore[arg-type]
    log.take_records()
    cpu_s, records = list[float](), list[CallRecord]()
    for step in range(1, STEPS + 1):
        begin = time.process_time()
        algorithm.step(roles, Sampling(step, num_ranks, 4, 0), {})
        pool.wait()
        cpu_s.append(time.process_time() - begin)
        records = log.take_records()
    held = PROCESS.memory_info().rss - before
    with temporary_folder("scale") as folder:
        written, drawing_s = _drawn(records, folder / "timeline.json")
    ray.shutdown()
    return [
        f"{num_ranks:,}",
        f"{len(pool._branches):,}",
        f"{made_s:.2f}",
        f"{median(cpu_s):.2f} ({min(cpu_s):.2f} to {max(cpu_s):.2f})",
        f"{held / 2**20:.0f}",
        f"{written / 2**20:.2f}",
        f"{drawing_s:.2f}",
    ]


def _drawn(records: Sequence[CallRecord], file: Path) -> tuple[int, float]:
    """Return the bytes of a step's calls in the timeline of a run, and CPU seconds to draw and to measure them."""
    spans, readings = list[Span](), list[Reading]()
    begin = time.process_time()
    call_metrics(records, 0, 0.0, time.time())
    for record in records:
        for rank, (start, end) in record.spans.items():
            spans.append(Span(str(record), "other", rank, _node(rank), record.role, start, end, "", 1))
            for name, value in record.held_bytes[rank].items():
                readings.append(Reading(name, rank, _node(rank), end, value))
    timeline = TimelineWriter(file)
    timeline.write(spans, readings)
    timeline.close()
    return file.stat().st_size, time.process_time() - begin


PLANS = (
    ("llama3-70b", "8-8-16", "1-8"),
    ("llama3-70b", "8-8-256", "1-8"),
    ("deepseek-v3", "16-8-4 e=32 etp=1", "1-32 e=32"),
    ("deepseek-v3", "16-8-128 e=32 etp=1", "1-32 e=32"),
)


def plan(model: str, train: str, gen: str) -> list[str]:
    """Return a row of the table: one rank's plan of its switch."""
    shape, grid = resolve_model(model), Grid(TrainSizes.parse(train))
    begin, before = time.process_time(), PROCESS.memory_info().rss
    source = megatron_layout(shape, grid)
    destination = vllm_layout(shape, GenerationGrid(grid, GenSizes.parse(gen)))
    own = group_with(0, domains(source, destination))
    found_s = time.process_time() - begin
    compiled = compile_plan(source, destination, own, 2**29)
    seconds, held = time.process_time() - begin, PROCESS.memory_info().rss - before
    row = [f"{grid.num_ranks:,}", str(len(own)), f"{found_s:.2f}", f"{seconds - found_s:.2f}"]
    return [f"{model} {train} -> {gen}", *row, f"{held / 2**20:.0f}", f"{len(compiled.buckets)}"]


GRIDS = ("8-8-2", "8-8-16", "8-8-64", "8-8-256")


def process_groups(train: str) -> list[str]:
    """Return a row of the table: groups that one rank creates for an actor, in a world where others need no time."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    from hybridengine.backends.megatron.groups import build_groups, initialize_globals
    from hybridengine.rehearsal.world import rehearsed_world
    from hybridengine.weights.process_groups import ProcessGroups

    grid = Grid(TrainSizes.parse(train))
    with rehearsed_world(0, grid.num_ranks, RANKS_PER_NODE, lambda *_: None):
        registry, begin = ProcessGroups(), time.process_time()
        build_groups(grid, registry)
        groups_s = time.process_time() - begin
        num_own = sum(0 in ranks for ranks in registry._groups)
        begin, world = time.process_time(), dist.distributed_c10d._world
        before = world.group_count
        initialize_globals(0)
        globals_s, num_globals = time.process_time() - begin, world.group_count - before
        parallel_state.destroy_model_parallel()
    own = [train, f"{grid.num_ranks:,}", str(num_own), f"{len(registry._groups):,}", f"{groups_s:.2f}"]
    return [*own, f"{num_globals:,}", f"{globals_s:.2f}"]


def _num_ranks(text: str) -> int:
    """Return a number of ranks that stages and tensor groups of 4-8-* divide; a `type=` for argparse."""
    if not text.isdecimal() or not int(text) or int(text) % 32:
        raise argparse.ArgumentTypeError(f"{text[:60]!r} must be a multiple of 32, such as 1024")
    return int(text)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="?", choices=("steps", "plans", "groups"), default="steps")
    parser.add_argument("num_ranks", nargs="*", type=_num_ranks, help="multiples of 32, for steps alone")
    parser.add_argument("--direct", action="store_true", help="without relays")
    options = parser.parse_args()
    if options.what != "steps" and (options.num_ranks or options.direct):
        parser.error(f"numbers of ranks and --direct are for steps; leave them out with {options.what}")
    if options.direct:
        relays.NUM_CALLED = 2**30
    if options.what == "plans":
        headings = ["plan", "ranks", "domain", "layouts, domains: CPU s", "plan: CPU s", "MiB", "buckets"]
        rows = (plan(*one) for one in PLANS)
    elif options.what == "groups":
        headings = ["training", "ranks", "of a rank", "in all", "CPU s", "Megatron's globals", "CPU s"]
        rows = (process_groups(train) for train in GRIDS)
    else:
        headings = [
            "ranks",
            "called",
            "groups: CPU s",
            "steps: CPU s",
            "MiB",
            "timeline: MiB",
            "records: CPU s",
        ]
        rows = (steps(num_ranks) for num_ranks in options.num_ranks or NUM_RANKS)
    table = [headings]
    for row in rows:
        table.append(row)
        print(" | ".join(row), flush=True)
    print("\n".join(aligned(table)))


if __name__ == "__main__":
    main()

"""Ranks on several hosts, which switch the weights of `hybridengine reshard bench` by any of its methods, one at a time.

    with joined_hosts(["first", "second"]) as network:
        ranks = SwitchRanks(network.hosts, spec, spec.pairs[0])
        there = ranks.call("there", "micro-dp", 1)     # of every rank: its seconds and the bytes that it has received
        ranks.call("back", "micro-dp")

Each host has equally many consecutive ranks: a process, and forks of it. They meet at the first host's address; gloo
connects ranks of one host inside it, and ranks of two hosts over their cables.
"""

from __future__ import annotations

import base64
import json
import multiprocessing
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from hybridengine.backends.megatron.groups import initialize_globals
from hybridengine.backends.vllm.environment import ON_CPU
from hybridengine.bench.calibration.machine_rates import MachineWorker
from hybridengine.bench.reshard.actor import Actor, differing_parameters
from hybridengine.bench.reshard.measurement import METHODS, timed
from hybridengine.bench.reshard.methods.method import Method
from hybridengine.bench.reshard.methods.micro_dp import MicroDp
from hybridengine.bench.reshard.spec import BenchSpec, LayoutPair
from hybridengine.rows.protocols import GroupTopology, RankContext
from hybridengine.weights.process_groups import ProcessGroups
from tests.machines.hosts import ROOT, Host
from tests.machines.switch import INTERFACE
from tests.warm_workers import warm_program

PORT = 29500
LIMIT_S = 120.0
ONE_STEP = "one-step"


class OneStep(MicroDp):
    """Every rank gets each box from a rank that trains it, though a neighbour gets the same box."""

    two_step = False


class SwitchWorker(MachineWorker):
    """Worker of one rank: methods of the benchmark, `one-step` beside them, and this machine's rates."""

    def __init__(self, context: RankContext, spec: BenchSpec, pair: LayoutPair) -> None:
        super().__init__(context)
        self._actor = Actor(
            spec.shape, context.topology.grid, context.rank, ProcessGroups(LIMIT_S), spec.dtype
        )
        kinds: dict[str, type[Method]] = {name.value: METHODS[name] for name in spec.methods}
        self._methods = {
            label: kind(self._actor, spec, pair, "never")
            for label, kind in {**kinds, ONE_STEP: OneStep}.items()
        }

    def there(self, label: str, version: int | None = None) -> tuple[float, int]:
        """Return seconds and received bytes of a switch to generation, checked if a `version` is written before."""
        method = self._methods[label]
        if version is not None:
            self._actor.fill(version)
        seconds, report = timed(method.there)
        if version is not None:
            wrong = differing_parameters(
                method.layout.shard(self._actor.rank), method.destination, self._actor.version
            )
            assert not wrong, f"{label} has left wrong weights on rank {self._actor.rank}: {wrong}"
        return seconds, report.received_bytes

    def back(self, label: str) -> tuple[float, int]:
        """Return seconds and received bytes of the switch back to training."""
        seconds, report = timed(self._methods[label].back)
        return seconds, report.received_bytes

    def exchange(self, num_bytes: int, num_messages: int) -> float:
        """Return the seconds in which each rank swaps messages of this size with its counterpart on the other host."""
        sent, received = torch.zeros(2, num_bytes, dtype=torch.uint8)
        counterpart = (self._rank + self._world_size // 2) % self._world_size
        seconds = 0.0
        for count in (1, num_messages):  # the first one opens the connections
            dist.barrier()
            begin = time.perf_counter()
            hops = [
                hop
                for _ in range(count)
                for hop in (dist.isend(sent, counterpart), dist.irecv(received, counterpart))
            ]
            for hop in hops:
                assert hop is not None, "every rank is in the group"
                hop.wait()
            seconds = time.perf_counter() - begin
        return seconds


class SwitchRanks:
    """All ranks of a pair of layouts on hosts, seen from outside; they end with their hosts."""

    def __init__(
        self, hosts: Sequence[Host], spec: BenchSpec, pair: LayoutPair, env: Mapping[str, str] | None = None
    ) -> None:
        """Start the ranks; with the variables of warm workers in `env`, as forks of the warm process."""
        self.num_ranks = pair.train.num_ranks
        on_each = self.num_ranks // len(hosts)
        paths = filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))
        variables = {
            **ON_CPU,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "PYTHONPATH": os.pathsep.join(paths),
            **(env or {}),
        }
        start = warm_program if "WARM_WORKERS" in variables else lambda *command: [sys.executable, *command]
        content = base64.b64encode(pickle.dumps((spec, pair))).decode()
        self._programs = [
            host.start(
                *start("-m", __name__, hosts[0].address, place * on_each, on_each, content),
                env=variables,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            for place, host in enumerate(hosts)
        ]

    def call(self, name: str, *arguments: object) -> list[Any]:
        """Return what a method of `SwitchWorker` returns on every rank."""
        first = self._programs[0]
        assert first.stdin is not None and first.stdout is not None
        first.stdin.write(json.dumps([name, *arguments]) + "\n")
        first.stdin.flush()
        line = first.stdout.readline()
        assert line, f"{name}{arguments} has ended the first rank"
        return json.loads(line)

    def __getattr__(self, name: str) -> Any:
        """Return a method that is called as one of a worker group."""
        return lambda *arguments: SimpleNamespace(get=lambda: self.call(name, *arguments))


def run_rank(address: str, rank: int, spec: BenchSpec, pair: LayoutPair) -> None:
    """Answer the calls that the first rank reads, until there are no more."""
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer
    topology = GroupTopology.parse(str(pair.train), str(pair.gen))
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{address}:{PORT}",
        rank=rank,
        world_size=topology.num_ranks,
        timeout=timedelta(seconds=LIMIT_S),
    )
    initialize_globals(seed=0)
    context = RankContext("bench", rank, topology.num_ranks, topology, topology.grid.coordinate(rank), "")
    worker = SwitchWorker(context, spec, pair)
    while True:
        call: list[Any] = [json.loads(sys.stdin.readline() or "null")] if rank == 0 else [None]
        dist.broadcast_object_list(call, 0)
        if call[0] is None:
            return
        name, *arguments = call[0]
        returned: list[Any] = [None] * topology.num_ranks
        dist.all_gather_object(returned, getattr(worker, name)(*arguments))
        if rank == 0:
            print(json.dumps(returned), file=answers)


def main() -> None:
    address, first, count, content = sys.argv[1:]
    spec, pair = pickle.loads(base64.b64decode(content))
    others = [
        multiprocessing.get_context("fork").Process(target=run_rank, args=(address, rank, spec, pair))
        for rank in range(int(first) + 1, int(first) + int(count))
    ]
    for other in others:
        other.start()
    run_rank(address, int(first), spec, pair)
    for other in others:
        other.join()


if __name__ == "__main__":
    main()

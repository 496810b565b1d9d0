"""Pushes of the actor's weights to engines on ranks of their own, over one link of them all."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from itertools import groupby

from hybridengine.config import RunConfig
from hybridengine.controller.calls import Future
from hybridengine.controller.worker_group import WorkerGroup
from hybridengine.errors import WorkerError
from hybridengine.report import keys
from hybridengine.rollouts.engine import PoolEngine
from hybridengine.topology.links import NodeMap
from hybridengine.weights.executor import Verify
from hybridengine.weights.link import Link


class Pushes:
    """Pushes weights from the actor to engines, one at a time."""

    def __init__(self, config: RunConfig, actor: WorkerGroup) -> None:
        self._config, self._actor = config, actor
        self.calls: list[Future] = []
        """Calls of the last push, the actor's first."""
        self.costs: dict[str, float] = {}
        """Metrics of the last push that has ended."""
        self._linked: Sequence[PoolEngine] = ()
        self._links = 0
        """Number of links made so far."""

    def push(self, version: int, engines: Sequence[PoolEngine]) -> None:
        """Begin to push the weights, as they are after the calls made so far, to engines, where they are `version`."""
        reports = [report for call in self.calls for report in call.get()]
        if reports:
            self.costs = {
                keys.RECEIVED_BYTES: max(report["received_bytes"] for report in reports),
                "push/seconds": max(report["seconds"] for report in reports),
            }
        if [*self._linked] != [*engines]:
            self._link(engines)
        for engine in engines:
            engine.receiving = engine.group.receive_weights(version)
        received = [engine.receiving for engine in engines if engine.receiving is not None]
        pushed = self._actor.push_weights(version)
        pushed.inputs += received  # so that waits for the actor see an engine's failure
        self.calls = [pushed, *received]

    def give_up(self) -> bool:
        """Wait for the end of a push in which an engine has died; return whether there was one."""
        broken = [call for call in self.calls if call.failures or not call.poll()]
        for call in broken:  # those that waited for the dead engine fail as well
            with contextlib.suppress(WorkerError):
                call.wait()
        self.calls = []
        return bool(broken)

    def _link(self, engines: Sequence[PoolEngine]) -> None:
        """Link the engines to the actor, in place of any earlier link."""
        config, actor = self._config, self._actor
        address, port, names = actor.link_facts().get()[0]
        # Engines on the same node follow one another, so that weights cross the network to it once.
        groups = sorted((engine.group for engine in engines), key=lambda group: group.pool.nodes)
        nodes = [*actor.pool.nodes, *(node for group in groups for node in group.pool.nodes)]
        link = Link(
            name=f"link {self._links}",
            address=address,
            port=port,
            train=actor.topology.grid,
            names=names,
            engine=config.generation.parallel,
            num_engines=len(groups),
            nodes=NodeMap(tuple(len([*run]) for _, run in groupby(nodes))),
            bucket_elements=config.bucket_elements,
            verify=Verify(config.actor.verify),
        )
        self._links += 1
        calls = [group.join_link(link, number) for number, group in enumerate(groups)]
        joined = actor.join_link(link)
        joined.inputs += calls
        for call in [joined, *calls]:
            call.get()
        self._linked = [*engines]

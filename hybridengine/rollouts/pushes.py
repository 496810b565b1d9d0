"""Pushes of the actor's weights to engines on ranks of their own, over one link of them all."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from hybridengine.config import RunConfig
from hybridengine.controller.calls import Future, wait_any
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
        self.costs: dict[str, float] = {}
        """Metrics of the last push."""
        self._linked: Sequence[PoolEngine] = ()
        self._links = 0
        """Number of links made so far."""

    def push(self, version: int, engines: Sequence[PoolEngine]) -> bool:
        """Push the weights, as they are after the calls made so far, to engines, where they are `version`.

        Returns False if an engine has died meanwhile: the weights of the others are then those of no version.
        """
        if [*self._linked] != [*engines] and not self._link(engines):
            return False
        for engine in engines:
            engine.receiving = engine.group.receive_weights(version)
        reports = self._ended(self._actor.push_weights(version), engines)
        if reports:
            self.costs = {
                keys.RECEIVED_BYTES: max(report["received_bytes"] for report in reports),
                "push/seconds": max(report["seconds"] for report in reports),
            }
        return bool(reports)

    def _ended(self, call: Future, engines: Sequence[PoolEngine]) -> list[Any]:
        """Wait for the end of a call of the actor and of the engines' parts in it; return all results.

        There are none if an engine has died meanwhile. Raises WorkerError for any other failure.
        """
        parts = [engine.receiving for engine in engines if engine.receiving is not None]
        call.inputs += parts  # so that waits for the actor see an engine's failure
        while pending := [one for one in (call, *parts) if not one.done()]:
            wait_any(pending)
        if not any(engine.has_died for engine in engines):
            return [result for one in (call, *parts) for result in one.get()]
        self._linked = ()
        for one in (call, *parts):  # those that waited for the dead engine fail as well
            with contextlib.suppress(WorkerError):
                one.wait()
        return []

    def _link(self, engines: Sequence[PoolEngine]) -> bool:
        """Link the engines to the actor, in place of any earlier link; return False if one has died meanwhile."""
        config, actor = self._config, self._actor
        address, port, names = actor.link_facts().get()[0]
        # Engines on the same node follow one another, so that weights cross the network to it once.
        by_node = sorted(engines, key=lambda engine: engine.group.pool.nodes)
        nodes = [*actor.pool.nodes, *(node for engine in by_node for node in engine.group.pool.nodes)]
        link = Link(
            name=f"link {self._links}",
            address=address,
            port=port,
            train=actor.topology.grid,
            names=names,
            engine=config.generation.parallel,
            num_engines=len(by_node),
            nodes=NodeMap(tuple(len([*run]) for _, run in groupby(nodes))),
            bucket_elements=config.bucket_elements,
            verify=Verify(config.actor.verify),
            adapted=not config.num_loaded_adapters,
        )
        self._links += 1
        for number, engine in enumerate(by_node):
            engine.receiving = engine.group.join_link(link, number)
        if not self._ended(actor.join_link(link), engines):
            return False
        self._linked = [*engines]
        return True

"""Requirements that all nodes of a run share, checked by asking its ranks once they have started."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from hybridengine.controller.pool import ResourcePool
from hybridengine.doctor.findings import Level, merged
from hybridengine.doctor.judging import RunNeeds, judge_folder, judge_reads, judge_sameness
from hybridengine.doctor.judging_links import judge_ports
from hybridengine.doctor.links import LinkFacts, unreachable
from hybridengine.doctor.node_facts import (
    NodeFacts,
    installed_packages,
    is_seen,
    locked_mark,
    made,
    sources_digest,
    unreadable,
)


@dataclass(frozen=True)
class View:
    """A rank's view of its node."""

    python: str
    packages: Mapping[str, str]
    sees_mark: bool
    unreadable: Mapping[str, str]
    """Reason for each path that cannot be read."""
    sources: str
    """As in `NodeFacts`."""
    port: int
    """Port at which the node's Ray takes objects."""


def view(mark: str, paths: list[str]) -> View:
    """Return what this process sees; `mark` is a file in the run's folder, `paths` are those that the run reads."""
    versions = platform.python_version(), installed_packages()
    # Not by the node's address, at which Ray may have been started again and still count the earlier node as alive.
    here = ray.get_runtime_context().get_node_id()
    (port,) = (node["ObjectManagerPort"] for node in ray.nodes() if node["NodeID"] == here)
    return View(*versions, is_seen(mark), unreadable(paths), sources_digest(), port)


def rank_problems(pools: Sequence[ResourcePool], folder: Path, reads: Mapping[str, Path]) -> Iterator[str]:
    """Yield what keeps the nodes of started pools from carrying out a run together, each with nodes and remedy.

    Args:
        folder: the run's folder, which all nodes must see.
        reads: files and folders that every node reads, by key of the configuration.
    """
    paths = {key: str(path) for key, path in reads.items()}
    with made(str(folder)) as error:
        if error:
            yield f"run.folder={folder} cannot be made ({error}); make it writable, or choose another"
            return
        with locked_mark(str(folder)) as mark:
            views = _ask(pools, lambda _: (view, mark, list(paths.values())))
    here = ray.util.get_node_ip_address()
    name = here if here in views else f"{here} (the controller)"
    own = NodeFacts(platform.python_version(), installed_packages(), sources=sources_digest(), node=name)
    others = [
        NodeFacts(one.python, one.packages, sources=one.sources, node=node)
        for node, one in views.items()
        if node != here
    ]
    apart = [node for node, one in views.items() if not one.sees_mark]
    findings = [
        *judge_ports(_links_between(pools, {node: one.port for node, one in views.items()})),
        *judge_sameness([own, *others]),
        *judge_folder(RunNeeds(str(folder)), {}, apart),
        *judge_reads(paths, {} if apart else {node: one.unreadable for node, one in views.items()}),
    ]
    for found in merged(findings):
        if found.level == Level.PROBLEM:
            where = f"node {', '.join(found.nodes)}: " if found.nodes else ""
            yield f"{where}{found.text}; {found.remedy}"


def _links_between(
    pools: Sequence[ResourcePool], ports: Mapping[str, int]
) -> dict[str, dict[str, LinkFacts]]:
    """Return the facts about the links that do not lead from a node to those of other pools, with which it exchanges
    rows and weights; ranks of one pool have reached each other when they joined their world. Ports are by node."""

    def question(pool: ResourcePool) -> tuple[Any, ...] | None:
        far = {node: port for node, port in ports.items() if node not in pool.nodes}
        return (unreachable, far) if far else None

    return _ask(pools, question)


def _ask(
    pools: Sequence[ResourcePool], question: Callable[[ResourcePool], tuple[Any, ...] | None]
) -> dict[str, Any]:
    """Return the answers of all nodes, of which each is asked once, in one of its pools; the pools are asked at once.

    `question` returns a function and its arguments for the nodes of a pool; None for nothing.
    """
    asked, answers = set[str](), list[Future[dict[str, Any]]]()
    with ThreadPoolExecutor(len(pools)) as threads:
        for pool in pools:
            new = {*pool.nodes} - asked
            asked |= new
            if new and (wanted := question(pool)) is not None:
                answers.append(threads.submit(pool.on_nodes, *wanted, nodes=new))
    return {node: one for found in answers for node, one in found.result().items()}

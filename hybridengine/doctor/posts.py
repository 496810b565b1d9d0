"""Actors on the nodes of a cluster, which answer for them within a time limit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hybridengine.controller.cluster import TRY_LIMIT_S, NodeOffer
from hybridengine.doctor.findings import Finding, Subject, problem
from hybridengine.doctor.links import LinkFacts, next_nodes, open_port, reach

ASK_LIMIT_S = 60.0


class NodePost:
    """Ray actor that calls functions of this project or the standard library on a node."""

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(*arguments)


class Posts:
    """Actors (`NodePost`) on every node of the cluster, which end with this object."""

    def __init__(self, offers: Sequence[NodeOffer]) -> None:
        post_class = ray.remote(NodePost)
        self._posts = dict[str, Any]()
        self.failures: list[Finding] = []
        """Findings for nodes that did not answer."""
        for offer in offers:
            where = NodeAffinitySchedulingStrategy(offer.node_id, soft=False)
            options = post_class.options(num_cpus=0, scheduling_strategy=where)
            self._posts[offer.address] = options.remote()

    @property
    def nodes(self) -> list[str]:
        """Addresses of the nodes that still answer."""
        return list(self._posts)

    def ask_all(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        of: Sequence[str] | None = None,
        each: Mapping[str, Any] | None = None,
        limit_s: float = ASK_LIMIT_S,
    ) -> dict[str, Any]:
        """Call a function on nodes (default: all); return the results. A node without an answer is not asked again.

        `each` has a last argument for each node.
        """
        nodes = [node for node in self._posts if of is None or node in of]
        if not nodes:
            return {}
        own = {node: () if each is None else (each[node],) for node in nodes}
        asked = {node: self._posts[node].call.remote(function, *arguments, *own[node]) for node in nodes}
        ready, _ = ray.wait(list(asked.values()), num_returns=len(asked), timeout=limit_s)
        answers = {}
        for node, reference in asked.items():
            try:
                if reference not in ready:
                    raise GetTimeoutError(f"no answer within {limit_s:g} s")
                answers[node] = ray.get(reference, timeout=limit_s)
            except RayError as error:
                del self._posts[node]
                self.failures.append(_unasked(node, error))
        return answers


def try_links(posts: Posts) -> dict[str, dict[str, LinkFacts]]:
    """Return the facts about the links from each node, by address: to all others, with figures to the next one."""
    limit_s = ASK_LIMIT_S + TRY_LIMIT_S * len(posts.nodes)
    ports = posts.ask_all(open_port)
    return posts.ask_all(reach, ports, each=next_nodes(list(ports)), of=list(ports), limit_s=limit_s)


def _unasked(node: str, error: Exception) -> Finding:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    for line in lines:
        if "ModuleNotFoundError" in line or "ImportError" in line:
            remedy = "install hybridengine there, in the environment that Ray was started from"
            return problem(Subject.VERSIONS, f"the node cannot be examined: {line.strip()}", remedy, node)
    remedy = (
        "check the network to it, whether its raylet still runs (`ray status`), and Ray's logs of that node"
    )
    return problem(Subject.PORTS, f"the node does not answer: {lines[0]}", remedy, node)

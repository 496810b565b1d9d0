"""Diagnosis after a failure of ranks on several nodes: a link, a folder or a node that has failed is its cause."""

from __future__ import annotations

import socket
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import ray

from hybridengine.controller import cluster
from hybridengine.doctor.findings import Finding, Level, Subject, merged, problem
from hybridengine.doctor.judging import RunNeeds, judge_folder, judge_shared_memory
from hybridengine.doctor.judging_links import judge_links, judge_ports
from hybridengine.doctor.links import LinkFacts, probe_all
from hybridengine.doctor.node_facts import shared_memory_bytes, try_folder
from hybridengine.doctor.posts import Posts, try_links


@dataclass(frozen=True)
class Diagnosis:
    """Faults of a run's nodes and of the links between them."""

    texts: list[str]
    """A text for each fault, with node, host and remedy."""
    is_lasting: bool
    """True if the nodes that are left cannot carry out the run, so that starting the ranks again is in vain."""


def diagnose(folder: str, nodes: Collection[str]) -> Diagnosis:
    """Return what is wrong now with the nodes of a run and the links between them; takes seconds if all nodes answer.

    Each question to the nodes has a time limit, ASK_LIMIT_S, and that about links TRY_LIMIT_S more for each node.

    Args:
        folder: the run's folder, which every node writes to.
        nodes: addresses of the nodes that the run used.
    """
    known = {node["NodeManagerAddress"]: node for node in sorted(ray.nodes(), key=lambda node: node["Alive"])}
    offers = [offer for offer in cluster.node_offers() if offer.address in nodes]
    alive = {offer.address for offer in offers}
    ways = probe_all({node: known[node]["NodeManagerPort"] for node in set(nodes) & set(known)})
    here = ray.util.get_node_ip_address()
    cut_off = {node: way for node, way in ways.items() if node in alive and way.packet_bytes}
    findings = list(judge_links({here: cut_off}))
    posts = Posts(
        [offer for offer in offers if not ways[offer.address].error and offer.address not in cut_off]
    )
    for node, free in posts.ask_all(shared_memory_bytes).items():
        if free is not None:
            low = judge_shared_memory(free, node)
            findings += [found for found in low if found.level == Level.PROBLEM]
    findings += judge_folder(RunNeeds(folder), posts.ask_all(try_folder, folder))
    links = try_links(posts)
    findings += [*judge_ports(links), *judge_links(links)]
    silent = sorted(set(ways) - set(posts.nodes) - set(cut_off))
    lost = [_lost(node, ways[node]) for node in silent]
    texts = [
        f"{', '.join(_named(known.get(node), node) for node in found.nodes)}: {found.text}; {found.remedy}"
        for found in merged([*lost, *findings])
        if found.level != Level.OK
    ]
    return Diagnosis(texts, any(found.level == Level.PROBLEM for found in findings))


def _named(node: Mapping[str, Any] | None, address: str) -> str:
    return f"node {address}" + (f" (host {node['NodeManagerHostname']})" if node else "")


def _lost(node: str, way: LinkFacts) -> Finding:
    """Return why a node does not answer, or no longer belongs to Ray, as far as it can be seen from here."""
    if not way.error:
        text = "the node did not answer in time, but its ports can be reached"
        remedy = "see Ray's logs of that node, and start Ray there again"
    elif "Refused" in way.error:
        text = "Ray has ended there, and the host still answers"
        remedy = "see Ray's logs of that node for the reason, and start Ray there again"
    else:
        text = f"the link to the host is down, or the host is: {socket.gethostname()} gets no answer ({way.error})"
        remedy = "mend it and start Ray there again, or start the cluster with another node"
    return problem(Subject.PORTS, text, remedy, node)

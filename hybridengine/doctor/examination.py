"""Examination of a cluster: an actor on each node, and finally a world of ranks as in a run."""

from __future__ import annotations

import logging
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import ray
import torch
import torch.distributed as dist
from ray.exceptions import RayError

from hybridengine.backends.vllm.environment import rank_environment
from hybridengine.controller import cluster
from hybridengine.controller.pool import ResourcePool
from hybridengine.controller.worker_group import WorkerGroup
from hybridengine.doctor.findings import (
    THIS_MACHINE,
    Finding,
    Level,
    Subject,
    failure,
    fine,
    problem,
    warning,
)
from hybridengine.doctor.judging import (
    RunNeeds,
    judge_clocks,
    judge_dashboard,
    judge_devices,
    judge_folder,
    judge_memory,
    judge_reads,
    judge_versions,
)
from hybridengine.doctor.judging_links import judge_links, judge_names, judge_ports
from hybridengine.doctor.links import LinkFacts, probe_all
from hybridengine.doctor.names import name_facts
from hybridengine.doctor.node_facts import (
    IMPORT_LIMIT_S,
    FolderFacts,
    NodeFacts,
    is_seen,
    lock_is_seen,
    locked_mark,
    made,
    node_facts,
    try_folder,
    unreadable,
)
from hybridengine.doctor.posts import ASK_LIMIT_S, Posts, try_links
from hybridengine.errors import ConfigError, HybridEngineError
from hybridengine.formatting import format_bytes, format_seconds
from hybridengine.rows.protocols import ONE_TO_ALL, RankContext, register
from hybridengine.topology.sizes import TrainSizes

START_LIMIT_S = 120.0
"""Time limit for the first answer of a node's actor."""
CLOCK_READINGS = 5
REDUCED_BYTES = 64 * 2**20
NUM_SUMS = 3

Say = Callable[[str], None]


def examine_cluster(needs: RunNeeds, own: NodeFacts, say: Say) -> list[Finding]:
    """Examine the nodes of a run and a world of ranks on them; without pools, every node of the connected cluster.

    This machine, on which the run's controller will be, is examined as well.
    """
    offers = cluster.node_offers()
    use_gpus = needs.uses_gpus(any(one.num_gpus for one in offers))
    here = ray.get_runtime_context().get_node_id()
    own = replace(own, node=next((one.address for one in offers if one.node_id == here), own.node))
    rooms = {offer.address: offer.num_ranks(1, use_gpus) for offer in offers}
    places, misfits = cluster.place_pools(needs.started, offers, use_gpus)
    offers, spare = nodes_of_run(offers, own.node, {} if misfits else places)
    if spare:
        say(f"not examining {', '.join(spare)}: no rank of the run will be there")
    ways = probe_all({one.address: one.port for one in offers if one.address != own.node})
    cut_off = {node: way for node, way in ways.items() if way.error or way.packet_bytes}
    findings = [*judge_links({own.node: cut_off}), *_without_answer(own.node, cut_off)]
    posts = Posts([one for one in offers if one.address not in cut_off])
    elsewhere = [node for node in ways if node not in cut_off]
    if elsewhere:
        say(f"asking {len(elsewhere)} other node(s); they import torch, Megatron-core and vLLM")
    answers = posts.ask_all(node_facts, of=elsewhere, limit_s=IMPORT_LIMIT_S + START_LIMIT_S)
    facts = [own, *(replace(one, node=node) for node, one in answers.items())]
    ranks = Counter(node for nodes in places.values() for node in nodes)
    computing = [node for node, room in rooms.items() if (ranks[node] if needs.pools else room)]
    findings += [failure(Subject.DEVICES, text) for text in misfits]
    findings += judge_versions([one for one in facts if one.node in (own.node, *computing)])
    # Only nodes that compute count: the controller may run elsewhere, and a head node may have no GPUs.
    nodes = [one for one in facts if one.node in computing]
    findings += judge_devices(nodes, needs)
    findings += judge_memory(nodes, needs, places, use_gpus=use_gpus)
    say(f"writing to {needs.folder} from every node")
    findings += _folder_findings(posts, needs)
    read = posts.ask_all(unreadable, list(needs.reads.values()), of=computing)
    findings += judge_reads(needs.reads, read)
    say("comparing clocks")
    findings += judge_clocks(clock_offsets(posts))
    if len(posts.nodes) > 1:
        say("connecting nodes with each other, and sending data from each to the next")
        links = try_links(posts)
        findings += [*judge_ports(links), *judge_links(links)]
        hosts: dict[str, str] = posts.ask_all(socket.gethostname)
        findings += judge_names(posts.ask_all(name_facts, sorted(set(hosts.values()))))
    context = ray.init(ignore_reinit_error=True, logging_level=logging.ERROR)
    findings += judge_dashboard(getattr(context, "dashboard_url", None))
    findings += posts.failures
    if _are_cut_off(findings):
        remedy = "see the problems above"
        findings.append(
            warning(Subject.LINKS, "no ranks were started: nodes do not reach each other", remedy)
        )
    elif not misfits:
        num_ranks = (1,) * len(computing) if len(computing) > 1 else (min(2, max(rooms.values())),)
        ranks_per_node = next(iter(needs.pools.values()), num_ranks)
        findings.append(_world_finding(needs, ranks_per_node, use_gpus, say))
    return findings


def _without_answer(here: str, ways: Mapping[str, LinkFacts]) -> Iterator[Finding]:
    """Yield findings on nodes of Ray that cannot be connected to from this one."""
    remedy = (
        "check the network to it, and start Ray there with an address that others reach (--node-ip-address)"
    )
    for node, way in ways.items():
        if way.error:
            text = f"the node does not answer: {here} cannot connect to it ({way.error})"
            yield problem(Subject.PORTS, text, remedy, node)


def nodes_of_run(
    offers: Sequence[cluster.NodeOffer], here: str, places: Mapping[str, Sequence[str]]
) -> tuple[list[cluster.NodeOffer], list[str]]:
    """Return the nodes at `here` and in `places`, and the addresses of the others, whose faults the run does not meet.

    Without places, which are the nodes of each pool's ranks, all nodes are returned.
    """
    used = {here, *(node for nodes in places.values() for node in nodes)}
    spare = [one.address for one in offers if places and one.address not in used]
    return [one for one in offers if one.address not in spare], spare


def _folder_findings(posts: Posts, needs: RunNeeds) -> Iterator[Finding]:
    """Yield findings on whether all nodes and this machine see the same folder."""
    apart, locks = list[str](), dict[str, bool]()
    with made(needs.folder) as error:
        if error:
            seen = {THIS_MACHINE: FolderFacts(error=error)}
        else:
            seen: dict[str, FolderFacts] = posts.ask_all(try_folder, needs.folder)
        if not any(facts.error for facts in seen.values()):
            with locked_mark(needs.folder) as mark:
                apart = [node for node, is_there in posts.ask_all(is_seen, mark).items() if not is_there]
                locks = {} if apart else posts.ask_all(lock_is_seen, mark)
    yield from judge_folder(needs, seen, apart, [node for node, is_locked in locks.items() if not is_locked])


def _are_cut_off(findings: Sequence[Finding]) -> bool:
    """Return True if nodes do not answer, or do not reach each other: ranks would wait for each other in vain."""
    subjects = (Subject.PORTS, Subject.LINKS)
    return any(found.level == Level.PROBLEM and found.subject in subjects for found in findings)


def clock_offsets(posts: Posts) -> dict[str, tuple[float, float]]:
    """Return the seconds by which each node's clock is ahead of this one, and the error bound (RFC 5905, section 8)."""
    best = dict[str, tuple[float, float]]()
    for _ in range(CLOCK_READINGS):
        begin = time.time()
        clocks: dict[str, float] = posts.ask_all(time.time)
        doubt = (time.time() - begin) / 2
        for node, there in clocks.items():
            if node not in best or doubt < best[node][1]:
                best[node] = there - begin - doubt, doubt
    return best


class LinkWorker:
    """Worker on every rank of a world as in a run; its collectives use the same links."""

    def __init__(self, context: RankContext) -> None:
        self._rank, self._num_ranks = context.rank, context.world_size

    @register(ONE_TO_ALL)
    def all_reduce(self, num_bytes: int) -> float | None:
        """Sum a tensor over all ranks, like gradients; return the shortest time, None if an element is wrong."""
        on_gpu = "nccl" in str(dist.get_backend_config()) and torch.cuda.is_available()
        expected = self._num_ranks * (self._num_ranks + 1) / 2
        right, best = True, float("inf")
        for _ in range(NUM_SUMS):
            value = float(self._rank + 1)
            tensor = torch.full((num_bytes // 4,), value, device="cuda" if on_gpu else "cpu")
            dist.barrier()
            if on_gpu:
                torch.cuda.synchronize()
            begin = time.perf_counter()
            dist.all_reduce(tensor)
            if on_gpu:
                torch.cuda.synchronize()
            best = min(best, time.perf_counter() - begin)
            right = right and bool((tensor == expected).all())
        return best if right else None


def _world_finding(needs: RunNeeds, ranks_per_node: Sequence[int], use_gpus: bool, say: Say) -> Finding:
    """Start ranks as a run's actor does, and return whether they connect and sum a tensor correctly."""
    num_ranks = sum(ranks_per_node)
    say(f"starting {num_ranks} ranks, which sum {format_bytes(REDUCED_BYTES)}")
    pool = ResourcePool(
        ranks_per_node=ranks_per_node,
        name="doctor",
        use_gpus=use_gpus,
        env=rank_environment(use_gpus=use_gpus),
        start_timeout_s=needs.start_limit_s,
        timeout_s=ASK_LIMIT_S,
    )
    try:
        with pool:
            group = WorkerGroup(pool, LinkWorker, role="links", parallel=TrainSizes(1, 1, num_ranks))
            seconds: list[float | None] = group.all_reduce(REDUCED_BYTES).get()
    except ConfigError as error:
        return failure(Subject.DEVICES, error)
    except (HybridEngineError, RayError) as error:
        remedy = "open the nodes' ports to each other; NCCL_DEBUG=INFO says more"
        return problem(Subject.LINKS, f"ranks did not meet: {error}", remedy)
    wrong = [str(rank) for rank, one in enumerate(seconds) if one is None]
    if wrong:
        text = f"the sum over {num_ranks} ranks is wrong on ranks {', '.join(wrong)}"
        remedy = "a link or a GPU changes data: test memory (ECC), and NCCL_P2P_DISABLE=1"
        return problem(Subject.LINKS, text, remedy)
    slowest = format_seconds(max(filter(None, seconds)))
    text = f"{num_ranks} ranks meet and sum {format_bytes(REDUCED_BYTES)} right, in {slowest}"
    return fine(Subject.LINKS, f"{text} ({'NCCL' if use_gpus else 'gloo'})")

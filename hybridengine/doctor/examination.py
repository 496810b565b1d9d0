"""Examines a cluster: a post on each of its nodes, and last a world of ranks as a run has it."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hybridengine.backends.vllm.environment import rank_environment
from hybridengine.controller import cluster
from hybridengine.controller.pool import ResourcePool
from hybridengine.controller.worker_group import WorkerGroup
from hybridengine.doctor.findings import Finding, Subject, fine, problem
from hybridengine.doctor.judging import (
    Needs,
    judge_devices,
    judge_folder,
    judge_memory,
    judge_reads,
    judge_versions,
)
from hybridengine.doctor.judging_network import (
    judge_clocks,
    judge_dashboard,
    judge_links,
    judge_ports,
    judge_raylets,
)
from hybridengine.doctor.link_worker import AllReduced, LinkWorker
from hybridengine.doctor.machine import THIS_MACHINE, Say, Wanted, made, required
from hybridengine.doctor.node_facts import (
    IMPORT_LIMIT_S,
    FolderFacts,
    NodeFacts,
    locked_mark,
    marks_seen,
)
from hybridengine.doctor.node_post import NodePost, Reached, clock_offset
from hybridengine.errors import ConfigError, HybridEngineError
from hybridengine.metrics.formatting import format_bytes, format_seconds
from hybridengine.topology.sizes import TrainSizes

START_LIMIT_S = 120.0
"""Until a post answers for the first time."""
ASK_LIMIT_S = 60.0
SENT_BYTES = 256 * 2**20
REDUCED_BYTES = 64 * 2**20


def examine_cluster(wanted: Wanted, own: NodeFacts, say: Say) -> list[Finding]:
    """Every node of the cluster that is connected, and a world of ranks on it.

    Args:
        own: of this machine, which may be one of the nodes.
    """
    offers = cluster.node_offers()
    use_gpus = wanted.device == "cuda" or (wanted.device == "auto" and any(one.num_gpus for one in offers))
    findings = list[Finding]()
    with Posts(offers) as posts:
        own = replace(own, node=next((one.address for one in offers if is_this_machine(one)), own.node))
        elsewhere = [one.address for one in offers if one.address != own.node]
        if elsewhere:
            say(f"asking {len(elsewhere)} other node(s); they import torch, Megatron-core and vLLM")
        limit_s = IMPORT_LIMIT_S + START_LIMIT_S
        findings += judge_raylets([one.address for one in offers])
        facts: list[NodeFacts] = [own, *posts.ask_all("facts", of=elsewhere, limit_s=limit_s).values()]
        ranks, misfits = ranks_on_nodes(wanted.pools, offers, use_gpus)
        rank_bytes = wanted.rank_bytes + (0 if use_gpus else wanted.model_bytes)
        needs = Needs(ranks, rank_bytes, wanted.kept_bytes, wanted.checkpoint_bytes)
        rooms = {offer.address: offer.num_ranks(1, use_gpus) for offer in offers}
        computing = [node for node, room in rooms.items() if (ranks[node] if wanted.pools else room)]
        findings += [_refused(text) for text in misfits]
        findings += judge_versions([one for one in facts if one.node in (own.node, *computing)], required())
        # The controller may run elsewhere, and a head may have no GPUs: what computes counts.
        nodes = [one for one in facts if one.node in computing]
        findings += judge_devices(nodes, wanted.device)
        findings += judge_memory(nodes, needs)
        say(f"writing to {wanted.folder} from every node")
        findings += _folder_findings(posts, wanted.folder, needs)
        read = posts.ask_all("unreadable", list(wanted.reads.values()), of=computing)
        findings += judge_reads(wanted.reads, read)
        say("comparing clocks")
        findings += judge_clocks(posts.clock_offsets())
        if len(posts.nodes) > 1:
            say(f"connecting nodes with each other, and sending {format_bytes(SENT_BYTES)} from each")
            findings += judge_ports(posts.reach_each_other())
            findings += judge_links(posts.send_around())
        findings += judge_dashboard(dashboard_address())
        findings += posts.failures
    if not misfits:
        num_ranks = (1,) * len(computing) if len(computing) > 1 else (min(2, max(rooms.values())),)
        findings += _world_findings(wanted, wanted.pools[0] if wanted.pools else num_ranks, use_gpus, say)
    return findings


def is_this_machine(offer: cluster.NodeOffer) -> bool:
    """Whether the node is the one that this process runs on."""
    return offer.node_id == ray.get_runtime_context().get_node_id()


def ranks_on_nodes(
    pools: Sequence[Sequence[int]], offers: Sequence[cluster.NodeOffer], use_gpus: bool
) -> tuple[dict[str, int], list[str]]:
    """Node -> ranks of all pools together, placed as a run places them; and why they do not fit."""
    rooms = [offer.num_ranks(1, use_gpus) for offer in offers]
    ranks = dict.fromkeys((offer.address for offer in offers), 0)
    misfits = list[str]()
    for place in cluster.order_pools(pools, rooms):
        problems = cluster.capacity_problems(pools[place], 1, use_gpus, offers)
        nodes = cluster.choose_nodes(pools[place], rooms)
        if problems or nodes is None:
            misfits += problems or [
                f"ranks_per_node={list(pools[place])} finds no room beside the ranks of the other pools; put roles on the"
                " same pool, or start the cluster with more nodes, CPUs or GPUs"
            ]
            continue
        for node, count in zip(nodes, pools[place], strict=True):
            rooms[node] -= count
            ranks[offers[node].address] += count
    return ranks, misfits


class Posts:
    """A post on every node of the cluster; a context manager, which ends them."""

    def __init__(self, offers: Sequence[cluster.NodeOffer]) -> None:
        self._offers = offers
        self._posts = dict[str, Any]()
        self.failures: list[Finding] = []
        """Of nodes that have not answered, since the last look."""

    def __enter__(self) -> Posts:
        post_class = ray.remote(NodePost)
        for offer in self._offers:
            where = NodeAffinitySchedulingStrategy(offer.node_id, soft=False)
            self._posts[offer.address] = post_class.options(num_cpus=0, scheduling_strategy=where).remote(
                offer.address
            )
        return self

    def __exit__(self, *_: object) -> None:
        for post in self._posts.values():
            ray.kill(post)

    @property
    def nodes(self) -> list[str]:
        """Addresses of those that still answer."""
        return list(self._posts)

    def ask_all(
        self, method: str, *arguments: Any, of: Sequence[str] | None = None, limit_s: float = ASK_LIMIT_S
    ) -> dict[str, Any]:
        """Node -> answer, of those that give one; a post that does not is asked no more.

        Args:
            of: the nodes; all where left out.
        """
        posts = {node: post for node, post in self._posts.items() if of is None or node in of}
        return self._answers(
            {node: getattr(post, method).remote(*arguments) for node, post in posts.items()}, limit_s
        )

    def _answers(self, asked: Mapping[str, Any], limit_s: float = ASK_LIMIT_S) -> dict[str, Any]:
        ready, _ = (
            ray.wait(list(asked.values()), num_returns=len(asked), timeout=limit_s) if asked else ([], [])
        )
        answers = {}
        for node, reference in asked.items():
            try:
                if reference not in ready:
                    raise GetTimeoutError(f"no answer within {limit_s:g} s")
                answers[node] = ray.get(reference, timeout=limit_s)
            except RayError as error:
                self._failed(node, error)
        return answers

    def _failed(self, node: str, error: RayError) -> None:
        self._posts.pop(node, None)
        self.failures.append(_unasked(node, error))

    def clock_offsets(self) -> dict[str, tuple[float, float]]:
        """Node -> seconds that its clock is ahead of this one, and how far that may be wrong."""
        offsets = {}
        for node, post in list(self._posts.items()):

            def ask(post: Any = post) -> float:
                return ray.get(post.now.remote(), timeout=ASK_LIMIT_S)

            try:
                offsets[node] = clock_offset(ask)
            except RayError as error:
                self._failed(node, error)
        return offsets

    @functools.cached_property
    def _ports(self) -> dict[str, int]:
        return self.ask_all("open_port")

    def reach_each_other(self) -> dict[tuple[str, str], Reached]:
        """(from, to) -> how a port answers, of all nodes and all others."""
        targets = {
            node: [(other, port) for other, port in self._ports.items() if other != node]
            for node in self.nodes
        }
        limit_s = ASK_LIMIT_S + 5.0 * len(targets)
        asked = {node: self._posts[node].reach.remote(others) for node, others in targets.items()}
        return {
            (node, other): one
            for node, reached in self._answers(asked, limit_s).items()
            for (other, _), one in zip(targets[node], reached, strict=True)
        }

    def send_around(self) -> dict[tuple[str, str], Reached]:
        """(from, to) -> how long bytes take, from each node to the next one, all at the same time."""
        ports = {node: port for node, port in self._ports.items() if node in self._posts}
        names = list(ports)
        following = dict(zip(names, [*names[1:], *names[:1]], strict=True))
        asked = {
            node: self._posts[node].reach.remote([(other, ports[other])], SENT_BYTES)
            for node, other in following.items()
        }
        return {(node, following[node]): one for node, (one,) in self._answers(asked).items()}


def _unasked(node: str, error: Exception) -> Finding:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    missing = next(
        (line.strip() for line in lines if "ModuleNotFoundError" in line or "ImportError" in line), None
    )
    if missing:
        remedy = "install hybridengine there, in the environment that Ray was started from"
        return problem(Subject.VERSIONS, f"the node cannot be asked: {missing}", remedy, node)
    remedy = "see whether its raylet still runs (`ray status`), and Ray's logs of that node"
    return problem(Subject.PORTS, f"the node does not answer: {lines[0]}", remedy, node)


def _refused(text: str) -> Finding:
    """A message of this project's, which ends in what to do."""
    what, _, remedy = text.rpartition("; ")
    return problem(Subject.DEVICES, what, remedy)


def _folder_findings(posts: Posts, folder: str, needs: Needs) -> list[Finding]:
    """Whether all nodes, and this machine, see the same folder."""
    with made(folder) as error:
        if error:
            return judge_folder(folder, {THIS_MACHINE: FolderFacts(error=error)}, {}, {})
        seen: dict[str, FolderFacts] = posts.ask_all("try_folder", folder)
        usable = [node for node, facts in seen.items() if not facts.error]
        if len(usable) < len(seen):
            return judge_folder(folder, seen, {}, {}, needs)
        with locked_mark(folder) as own:
            locks: dict[str, bool] = {}
            marks: dict[str, str] = posts.ask_all("leave_mark", folder)
            names = {THIS_MACHINE: own, **marks}
            found: dict[str, list[str]] = posts.ask_all("marks_seen", folder, list(names.values()))
            found[THIS_MACHINE] = marks_seen(folder, list(names.values()))
            unseen = {
                node: [other for other, name in names.items() if name not in there]
                for node, there in found.items()
            }
            if not any(unseen.values()):
                locks = posts.ask_all("lock_is_seen", folder, own)
            posts.ask_all("remove_mark")
            for name in marks.values():
                (Path(folder) / name).unlink(missing_ok=True)  # of those that have stopped answering
        return judge_folder(folder, seen, unseen, locks, needs)


def dashboard_address() -> str | None:
    """Where Ray's dashboard listens; None where there is none."""
    context = ray.init(ignore_reinit_error=True, logging_level=logging.ERROR)
    return getattr(context, "dashboard_url", None) or None


def _world_findings(wanted: Wanted, ranks_per_node: Sequence[int], use_gpus: bool, say: Say) -> list[Finding]:
    """Ranks as a run's actor has them: do they start, meet, and add up right?"""
    num_ranks = sum(ranks_per_node)
    say(f"starting {num_ranks} ranks, which sum {format_bytes(REDUCED_BYTES)}")
    pool = ResourcePool(
        ranks_per_node=ranks_per_node,
        name="doctor",
        use_gpus=use_gpus,
        env=rank_environment(use_gpus=use_gpus),
        start_timeout_s=wanted.start_limit_s,
        timeout_s=ASK_LIMIT_S,
    )
    try:
        with pool:
            group = WorkerGroup(pool, LinkWorker, role="links", parallel=TrainSizes(1, 1, num_ranks))
            seen: list[AllReduced] = group.all_reduce(REDUCED_BYTES).get()
    except ConfigError as error:
        return [_refused(str(error))]
    except (HybridEngineError, RayError) as error:
        remedy = "open the nodes' ports to each other; NCCL_DEBUG=INFO says more"
        return [problem(Subject.LINKS, f"ranks did not meet: {error}", remedy)]
    wrong = [str(rank) for rank, one in enumerate(seen) if not one.right]
    if wrong:
        text = f"the sum over {num_ranks} ranks is wrong on ranks {', '.join(wrong)}"
        remedy = "a link or a GPU changes data: test memory (ECC), and NCCL_P2P_DISABLE=1"
        return [problem(Subject.LINKS, text, remedy)]
    seconds = max(one.seconds for one in seen)
    text = (
        f"{num_ranks} ranks meet and sum {format_bytes(REDUCED_BYTES)} right, in {format_seconds(seconds)}"
        f" ({'NCCL' if use_gpus else 'gloo'})"
    )
    return [fine(Subject.LINKS, text)]

"""A process of its own with a Ray cluster of three raylets: 6 light ranks in one pool, then a run with four pools, during
which a node disappears, and the findings of `doctor` on the other two.

    python -m tests.full.programs.several_nodes CONFIG OUTPUT

Nodes join in an order that differs from both the numeric and the textual order of their addresses.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ray

from hybridengine.config import load_config
from hybridengine.controller import cluster
from hybridengine.controller.call_log import call_log
from hybridengine.controller.pool import ResourcePool
from hybridengine.controller.rows import Rows
from hybridengine.controller.worker_group import WorkerGroup
from hybridengine.doctor.examination import examine_cluster
from hybridengine.doctor.findings import merged
from hybridengine.doctor.judging import RunNeeds
from hybridengine.doctor.node_facts import node_facts
from hybridengine.doctor.ranks import view
from hybridengine.training.run import train
from tests.full.probe_workers import ProbeWorker
from tests.warm_workers import with_warm_workers

JOINED = ("127.0.0.10", "127.0.0.2", "127.0.0.9")
CPUS_PER_NODE = 5
NUM_ROWS = 31
"""Number of rows; no number of ranks used here divides it."""


@contextmanager
def raylets() -> Iterator[None]:
    """Start a Ray cluster of several nodes on this machine, and name it in RAY_ADDRESS."""
    for name, value in {**cluster.QUIET_RAY, "RAY_AUTH_MODE": "disabled"}.items():
        os.environ.setdefault(name, value)
    from ray.cluster_utils import Cluster  # after the environment is set, which the import reads

    with_warm_workers(None)
    nodes = Cluster()
    try:
        for address in JOINED:
            nodes.add_node(
                num_cpus=CPUS_PER_NODE, num_gpus=0, node_ip_address=address, include_dashboard=False
            )
        os.environ["RAY_ADDRESS"] = str(nodes.address)
        yield
    finally:
        ray.shutdown()
        nodes.shutdown()


def see_light_ranks() -> dict[str, Any]:
    """Return the nodes of 6 ranks, and rows that travel between groups of 3-2-1 and 1-2-3."""
    with ResourcePool([2, 2, 2], timeout_s=120, start_timeout_s=240) as pool:
        actor = WorkerGroup(pool, ProbeWorker, role="actor", parallel="3-2-1", generate="1-1")
        critic = WorkerGroup(pool, ProbeWorker, role="critic", parallel="1-2-3", config={"offset": 100})
        described = actor.describe().get()
        rows = actor.wide(Rows.numbered(NUM_ROWS))
        narrowed = critic.narrowed(rows)
        pool.wait()
        exchange = call_log()
        records = {str(record): record for record in exchange.take_records()}
        before = exchange.payload_bytes
        views = pool.on_nodes(view, "", [])
        return {
            "nodes": [seen["context"].node for seen in described],
            "local_ranks": [int(seen["env"]["LOCAL_RANK"]) for seen in described],
            "worlds": [list(seen["world"]) for seen in described],
            "tp_sums": actor.tp_sum(10.0).get(),
            "payload_bytes": before,
            "transferred": dict(records["critic.narrowed"].transferred),
            "narrowed": narrowed.get("narrow")["narrow"].tolist(),
            "ports": {node: one.port for node, one in views.items()},
            "ports_of_ray": {node["NodeManagerAddress"]: node["ObjectManagerPort"] for node in ray.nodes()},
        }


def examined(folder: str) -> list[dict[str, Any]]:
    """Return the findings of `doctor` on the nodes that are left."""
    return [asdict(found) for found in merged(examine_cluster(RunNeeds(folder), node_facts(), print))]


def main() -> None:
    config, output = sys.argv[1:]
    with raylets():
        cluster.start_ray()
        seen = {"offers": [str(offer) for offer in cluster.node_offers()], "light": see_light_ranks()}
        train(load_config(config))
        seen["left"] = [offer.address for offer in cluster.node_offers()]
        seen["doctor"] = examined(str(Path(config).parent / "examined"))
    Path(output).write_text(json.dumps(seen))


if __name__ == "__main__":
    main()

"""Predicted seconds, compared with sums worked out by hand on links with round figures."""

from __future__ import annotations

import numpy as np
import pytest

from hybridengine.planning.costs.clusters import Cluster
from hybridengine.planning.switch.switch_cost import SwitchPricer
from hybridengine.planning.switch.switch_seconds import (
    hosted_ranks,
    joined,
    line_rate_seconds,
    predict_seconds,
)
from hybridengine.reshard.cost import REMOTE, Traffic
from hybridengine.topology.generation import GenerationGrid
from hybridengine.topology.grid import Grid
from hybridengine.topology.links import LinkClass, NodeMap
from hybridengine.topology.sizes import GenSizes, TrainSizes
from tests.unit.numpy_shards import small_shape

NODE, NETWORK = LinkClass.SAME_NODE, LinkClass.BETWEEN_NODES
ELEMENT_BYTES = 2


def cluster(**links: dict[str, float]) -> Cluster:
    """Return a cluster with 100 B/s of memory, 10 B/s inside a node, 1 B/s between nodes, no latency."""
    figures: dict[str, dict[str, float]] = {
        "same_device": {"bytes_per_s": 100, "latency_s": 0},
        "same_node": {"bytes_per_s": 10, "latency_s": 0},
        "between_nodes": {"bytes_per_s": 1, "latency_s": 0},
    }
    for name, changes in links.items():
        figures[name] |= changes
    return Cluster.model_validate(
        {
            "name": "c",
            "source": "s",
            "nodes": 9,
            "devices_per_node": 2,
            "device_memory_bytes": 1,
            "links": figures,
        }
    )


class Built:
    """Builds the traffic of one domain, cell by cell."""

    def __init__(self, buckets: int, ranks: int) -> None:
        self.moved = np.zeros((buckets, len(REMOTE), 2, 2, ranks), dtype=np.int64)
        self.messages = np.zeros((buckets, len(REMOTE), 2, ranks), dtype=np.int64)
        self.copied = np.zeros((buckets, 3, ranks), dtype=np.int64)
        self.gathered, self.spread = self.copied[:, 0], self.copied[:, 1]
        self.overlaps = np.zeros(buckets, dtype=bool)

    def send(
        self, bucket: int, step: int, sender: int, receiver: int, link: LinkClass, elements: int
    ) -> Built:
        place = REMOTE.index(link)
        self.moved[bucket, place, 0, step, receiver] += elements
        self.moved[bucket, place, 1, step, sender] += elements
        for rank in (sender, receiver):
            self.messages[bucket, place, step, rank] += 1
        return self

    def done(self) -> Traffic:
        return Traffic(self.moved, self.messages, self.copied, self.overlaps)


def hosts(num_ranks: int, *nodes: dict[int, int]) -> np.ndarray:
    """Return how often each node, given as rank -> times, hosts each rank."""
    return np.array([[node.get(rank, 0) for node in nodes or ({},)] for rank in range(num_ranks)])


def seconds(traffic: Built, hardware: Cluster, *nodes: dict[int, int]) -> float:
    done = traffic.done()
    return predict_seconds(done, hosts(done.copied_KPR.shape[-1], *nodes), hardware, ELEMENT_BYTES)


def test_nothing_moves_in_no_time() -> None:
    assert seconds(Built(3, 4), cluster()) == 0


def test_the_slowest_rank_decides() -> None:
    traffic = Built(1, 3).send(0, 0, 0, 1, NODE, 10).send(0, 0, 0, 2, NODE, 30)
    assert seconds(traffic, cluster()) == pytest.approx(40 * 2 / 10)  # rank 0 sends all of it


def test_links_of_two_classes_and_both_directions_work_at_the_same_time() -> None:
    traffic = Built(1, 2).send(0, 0, 0, 1, NODE, 50).send(0, 0, 1, 0, NODE, 50).send(0, 0, 0, 1, NETWORK, 4)
    assert seconds(traffic, cluster()) == pytest.approx(max(50 * 2 / 10, 4 * 2 / 1))


def test_steps_and_buckets_follow_each_other() -> None:
    traffic = Built(2, 2).send(0, 0, 0, 1, NETWORK, 3).send(0, 1, 1, 0, NODE, 20).send(1, 0, 1, 0, NETWORK, 5)
    assert seconds(traffic, cluster()) == pytest.approx(3 * 2 + 20 * 2 / 10 + 5 * 2)


def test_every_message_takes_the_latency_of_its_link() -> None:
    traffic = Built(1, 2).send(0, 0, 0, 1, NETWORK, 3).send(0, 0, 0, 1, NETWORK, 3)
    slow = cluster(between_nodes={"latency_s": 0.25}, same_node={"latency_s": 9})
    assert seconds(traffic, slow) == pytest.approx(6 * 2 + 2 * 0.25)


def test_copies_read_and_write_and_start_once_a_bucket() -> None:
    traffic = Built(2, 2)
    traffic.gathered[0] = [10, 20]
    traffic.spread[1] = [50, 0]
    memory = cluster(same_device={"latency_s": 0.5})
    assert seconds(traffic, cluster()) == pytest.approx((20 + 50) * 2 * 2 / 100)
    assert seconds(traffic, memory) == pytest.approx((20 + 50) * 2 * 2 / 100 + 2 * 0.5)


def test_spreading_overlaps_with_the_next_transfer_where_the_plan_lets_it() -> None:
    traffic = Built(3, 2)
    for bucket in range(3):
        traffic.send(bucket, 0, 0, 1, NODE, 25)  # 5 s
        traffic.spread[bucket, 1] = 75  # 3 s
    assert seconds(traffic, cluster()) == pytest.approx(3 * 5 + 3 * 3)
    traffic.overlaps[:] = [False, True, True]
    assert seconds(traffic, cluster()) == pytest.approx(5 + 5 + 5 + 3)
    traffic.overlaps[:] = [False, True, False]
    assert seconds(traffic, cluster()) == pytest.approx(5 + 5 + 3 + 5 + 3)


def test_buckets_in_flight_use_both_directions_of_a_link_and_queue_in_one() -> None:
    """Buckets of 10 s between nodes, there, back and there, each forwarded in 2 s."""
    traffic = Built(3, 3)
    for bucket, (sender, receiver) in enumerate([(0, 1), (1, 0), (0, 1)]):
        traffic.send(bucket, 0, sender, receiver, NETWORK, 5).send(bucket, 1, receiver, 2, NODE, 10)
    assert seconds(traffic, cluster()) == pytest.approx(3 * (10 + 2))
    traffic.overlaps[:] = [False, True, True]
    # 0 and 1 cross until 10; 0 is forwarded until 12, when 2 sets off; 1 until 14; 2 arrives at 22, and is forwarded
    assert seconds(traffic, cluster()) == pytest.approx(24)
    traffic.overlaps[:] = [False, True, False]
    # the same until 14, when 2 sets off
    assert seconds(traffic, cluster()) == pytest.approx(26)
    same_way = Built(2, 2).send(0, 0, 0, 1, NETWORK, 5).send(1, 0, 0, 1, NETWORK, 5)
    same_way.overlaps[1] = True
    assert seconds(same_way, cluster()) == pytest.approx(20)


def test_ranks_of_a_node_share_its_network() -> None:
    traffic = Built(1, 2).send(0, 0, 0, 1, NETWORK, 4)
    shared = cluster(between_nodes={"node_bytes_per_s": 1})
    alone, four_senders, two_of_each = {0: 1}, {0: 4}, {0: 2, 1: 2}
    assert seconds(traffic, shared, alone) == pytest.approx(4 * 2)
    assert seconds(traffic, shared, alone, four_senders) == pytest.approx(4 * 4 * 2)
    assert seconds(traffic, shared, two_of_each) == pytest.approx(2 * 4 * 2)  # the directions do not share
    assert seconds(traffic, cluster(), four_senders) == pytest.approx(4 * 2)


def test_domains_with_fewer_buckets_wait_for_the_others() -> None:
    short = Built(1, 2).send(0, 0, 0, 1, NODE, 30).done()
    long = Built(3, 2).send(0, 0, 0, 1, NODE, 5).send(2, 0, 0, 1, NODE, 10).done()
    both = joined([short, long])
    assert predict_seconds(both, hosts(4), cluster(), ELEMENT_BYTES) == pytest.approx((30 + 10) * 2 / 10)


def test_the_busiest_link_bounds_the_time() -> None:
    """Two senders, one bucket each: either order of buckets leaves one of them idle; the bound does not."""
    traffic = Built(2, 3).send(0, 0, 0, 2, NODE, 30).send(1, 0, 1, 2, NODE, 20).send(1, 0, 1, 0, NETWORK, 2)
    slow = cluster(same_node={"latency_s": 9}, between_nodes={"latency_s": 9})
    assert line_rate_seconds(traffic.done(), hosts(3), slow, ELEMENT_BYTES) == pytest.approx(50 * 2 / 10)
    shared = cluster(between_nodes={"node_bytes_per_s": 1})
    node = hosts(3, {0: 1, 1: 3})
    traffic.send(1, 0, 1, 0, NETWORK, 18)
    assert line_rate_seconds(traffic.done(), node, shared, ELEMENT_BYTES) == pytest.approx(
        3 * (2 + 18) * 2 / 1
    )
    assert line_rate_seconds(Built(1, 2).done(), hosts(2), slow, ELEMENT_BYTES) == 0


def test_contents_of_nodes() -> None:
    nodes = NodeMap((4, 4))
    ranks_hosted = hosted_ranks([((0, 4), (1, 5)), ((2, 6), (3, 7))], nodes)
    assert sorted(ranks_hosted.T.tolist()) == [[0, 2, 0, 2], [2, 0, 2, 0]]
    assert hosted_ranks([((0, 1), (2, 3), (4, 5), (6, 7))], nodes).tolist() == [[2], [2]]


def test_the_way_back_of_a_real_plan_is_copies_at_memory_bandwidth() -> None:
    generation = GenerationGrid(Grid(TrainSizes(2, 2, 2)), GenSizes(1, 1))
    shape = small_shape("llama", tied=False, vocab=256, layers=4, kv_heads=4)
    nodes = NodeMap.uniform(8, 2)
    cost = SwitchPricer(shape, "bfloat16", 2**30).price(generation, nodes)  # one bucket
    hardware = cluster()
    assert {len(plan.buckets) for plan in cost.plans} == {1}
    assert cost.seconds_back(hardware) == pytest.approx(2 * cost.copied_back_bytes_max / 100)
    there = cost.seconds_there(hardware)
    assert there > cost.received_bytes_max_by_link[NETWORK] / 1
    assert there == pytest.approx(cost.seconds_there(hardware.resized(5)))


def test_twice_the_bandwidth_takes_half_the_time() -> None:
    generation = GenerationGrid(Grid(TrainSizes(2, 4, 1)), GenSizes(1, 2))
    shape = small_shape("qwen3", tied=False, vocab=256, layers=4, kv_heads=4)
    cost = SwitchPricer(shape, "float32", 2**12).price(generation, NodeMap.uniform(8, 4))
    slow = cluster(between_nodes={"node_bytes_per_s": 3})
    fast = cluster(
        same_device={"bytes_per_s": 200},
        same_node={"bytes_per_s": 20},
        between_nodes={"bytes_per_s": 2, "node_bytes_per_s": 6},
    )
    assert cost.seconds_there(fast) == pytest.approx(cost.seconds_there(slow) / 2)
    assert cost.seconds_back(fast) == pytest.approx(cost.seconds_back(slow) / 2)


def test_traffic_of_a_plan_is_that_of_its_costs() -> None:
    generation = GenerationGrid(Grid(TrainSizes(2, 4, 1)), GenSizes(1, 2))
    shape = small_shape("qwen2", tied=True, vocab=250, layers=3, kv_heads=4)
    cost = SwitchPricer(shape, "float32", 2**13).price(generation, NodeMap.uniform(8, 4))
    for domain, _ in cost.domains:
        moved_KLDSR = domain.there.traffic.moved_KLDSR
        moved_LDR = 4 * moved_KLDSR.sum(axis=(0, 3))
        for position, rank_cost in enumerate(domain.there.costs):
            for place, link in enumerate(REMOTE):
                received, sent = moved_LDR[place, :, position]
                assert received == rank_cost.received_by_link[link]
                assert sent == rank_cost.sent_by_link[link]
        assert len(moved_KLDSR) == len(domain.there.plan.buckets)

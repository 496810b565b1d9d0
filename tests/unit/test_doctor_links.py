"""Findings about links between nodes: every rule with a link that follows it and one that breaks it."""

from __future__ import annotations

import pytest

from hybridengine.doctor.findings import Level
from hybridengine.doctor.judging_links import judge_links, judge_ports
from hybridengine.doctor.links import LinkFacts
from tests.unit.test_doctor_judging import told


def test_ports() -> None:
    assert told(judge_ports({"a": {"b": LinkFacts()}, "b": {}, "c": {}})) == []
    refused = LinkFacts(error="ConnectionRefusedError: Connection refused")
    (found,) = judge_ports({"a": {"b": LinkFacts()}, "b": {"a": LinkFacts(), "c": refused}, "c": {}})
    assert (found.level, found.nodes) == (Level.PROBLEM, ("b",))
    assert found.text == "a port of c cannot be reached (ConnectionRefusedError: Connection refused)"
    assert found.remedy == (
        "open the ports that the system chooses (net.ipv4.ip_local_port_range) between the nodes, and check the network"
        " between them"
    ), "names are none of a run's business, which uses addresses"
    (found,) = judge_ports({"10.0.0.2": {"127.0.1.1": refused}, "127.0.1.1": {"10.0.0.2": LinkFacts()}})
    assert found.remedy.startswith("start Ray there again with --node-ip-address")


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (LinkFacts(bytes_s=1e9), []),
        (LinkFacts(bytes_s=2.6e8, lost_share=0.004), []),
        (
            LinkFacts(bytes_s=2.4e8, round_trip_s=0.0021),
            [
                "warning: data goes to b at 1.92 Gbit/s, with 2 ms there and back; the fastest link has 8.00 Gbit/s"
            ],
        ),
        (
            LinkFacts(bytes_s=1e9, lost_share=0.0123),
            ["warning: 1.2% of the packets to b are lost: collectives wait for them"],
        ),
        (
            LinkFacts(packet_bytes=9000, passes_small=True),
            ["problem: packets of 9000 bytes to b are lost, and small ones arrive: ranks would hang"],
        ),
        (LinkFacts(packet_bytes=9000), ["problem: b accepts connections, and no data arrives there"]),
    ],
)
def test_links(facts: LinkFacts, expected: list[str]) -> None:
    found = list(judge_links({"a": {"b": facts, "c": LinkFacts()}, "b": {"a": LinkFacts(bytes_s=1e9)}}))
    assert told(found) == expected
    assert {node for one in found if one.level != Level.OK for node in one.nodes} <= {"a"}


def test_links_are_not_called_whole_where_one_is_cut() -> None:
    facts = {"a": {"b": LinkFacts(bytes_s=1e9), "c": LinkFacts()}, "b": {"a": LinkFacts(bytes_s=1e9)}}
    (found,) = judge_links(facts)
    assert found.text == "data goes from node to node at 8.00 Gbit/s or more, none is lost"
    facts["a"]["c"] = LinkFacts(error="OSError: No route to host")
    assert list(judge_links(facts)) == [], "judge_ports names the link"

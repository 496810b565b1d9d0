"""What the doctor sees of links between hosts: those that are down, slow, lose packets or drop large ones, and IPv6."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any, Literal

import pytest

from hybridengine.doctor.findings import Level
from hybridengine.doctor.judging_links import LOST_SHARE, judge_links, judge_ports
from hybridengine.doctor.links import TRIAL_BYTES, TRIAL_LIMIT_S, LinkFacts
from tests.machines.hosts import Host, joined_hosts

pytestmark = pytest.mark.timeout(120)
LISTEN = """
import sys
from hybridengine.doctor.links import open_port
print(open_port(), flush=True)
sys.stdin.read()
"""
REACH = """
import json, sys
from dataclasses import asdict
from hybridengine.doctor.links import reach
print(json.dumps(asdict(reach({sys.argv[1]: int(sys.argv[2])}, [sys.argv[1]])[sys.argv[1]])))
"""


def facts_between(first: Host, second: Host) -> LinkFacts:
    """Return what the first host sees of the way to the second one."""
    with second.start(
        sys.executable, "-c", LISTEN, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as listening:
        assert listening.stdout is not None and listening.stdin is not None
        port = listening.stdout.readline().strip()
        found = first.run(sys.executable, "-c", REACH, second.address, port, limit_s=60).stdout
        listening.stdin.close()
    return LinkFacts(**json.loads(found))


def problems(facts: LinkFacts) -> list[str]:
    """Return the findings on a link from first to second that are not fine, with their levels."""
    links = {"first": {"second": facts}}
    found = [*judge_ports(links), *judge_links(links)]
    return [f"{one.level}: {one.text}" for one in found if one.level != Level.OK]


def facts_with(**values: Any) -> LinkFacts:
    """Return what the first of two hosts sees of the way to the second one, whose cable has these values."""
    with joined_hosts(["first", "second"]) as network:
        network.change("second", **values)
        return facts_between(*network.hosts)


@pytest.mark.parametrize("ip_version", [4, 6])
def test_a_link_without_faults(ip_version: Literal[4, 6]):
    with joined_hosts(["first", "second"], ip_version=ip_version, own_name="unknown") as network:
        network.change("second", delay_s=0.003)
        facts = facts_between(*network.hosts)
        sent = network.sent_bytes()["first", "second"]
    assert facts.error == "" and facts.packet_bytes == 0
    assert TRIAL_BYTES < sent < 1.2 * TRIAL_BYTES or facts.bytes_s < TRIAL_BYTES / TRIAL_LIMIT_S
    assert 0.006 <= facts.round_trip_s < 0.05
    assert facts.lost_share < LOST_SHARE


def test_a_link_that_is_down():
    (found,) = problems(facts_with(up=False))
    reasons = "TimeoutError: timed out|OSError: No route to host"
    assert re.fullmatch(rf"problem: a port of second cannot be reached \(({reasons})\)", found)


def test_a_link_that_drops_large_packets():
    facts = facts_with(mtu=1400)
    assert facts == LinkFacts(packet_bytes=1500, passes_small=True)
    text = "problem: packets of 1500 bytes to second are lost, and small ones arrive: ranks would hang"
    assert problems(facts) == [text]


def test_a_link_that_is_slow():
    """The rate that was asked for is measured, without headers; on a busy machine less."""
    facts = facts_with(rate_bits_s=2e7, delay_s=0.02, queue_s=10.0)
    expected = 2e7 / 8 * 1448 / 1514
    assert 0.3 * expected < facts.bytes_s < 1.05 * expected
    assert 0.04 <= facts.round_trip_s < 0.1
    found = problems(facts)[0]
    assert re.fullmatch(r"warning: data goes to second at \d+ Mbit/s, with \d\d ms there and back", found)


def test_a_link_that_loses_packets():
    facts = facts_with(loss=0.02)
    assert 0.01 < facts.lost_share < 0.1
    assert re.fullmatch(r"warning: \d\.\d% of the packets to second are lost: .*", problems(facts)[-1])

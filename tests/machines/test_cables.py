"""Cables have the rate, the delay and the loss that was asked for, go down, and come back."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.machines.hosts import Host, Network, joined_hosts
from tests.machines.switch import INTERFACE, Cable
from tests.machines.traffic import listening, on_the_wire, round_trips_s, seconds_to_send

TRIES = 20


@pytest.fixture
def network() -> Iterator[Network]:
    """Two hosts, of which the second listens, and a third one."""
    with joined_hosts(["first", "second", "third"]) as network, listening(network.hosts[1]):
        yield network


@pytest.mark.parametrize(("rate_bits_s", "num_bytes"), [(10e6, 10**6), (100e6, 10**7), (1e9, 3 * 10**7)])
def test_bytes_take_the_time_that_the_rate_gives_them(network: Network, rate_bits_s: float, num_bytes: int):
    """Never less; more by a tenth and the first round trips, unless the machine is too busy each time."""
    first, second, _ = network.hosts
    network.change("second", rate_bits_s=rate_bits_s)
    least_s = on_the_wire(num_bytes) * 8 / rate_bits_s
    for _ in range(TRIES):
        took_s = seconds_to_send(first, second, num_bytes)
        assert took_s > 0.99 * least_s
        if took_s < 1.1 * least_s + 0.02:
            return
    pytest.fail(f"the last of {TRIES} tries has taken {took_s:.3f} s instead of {least_s:.3f} s")


def test_bytes_are_counted_as_on_a_wire(network: Network):
    first, second, _ = network.hosts
    before = network.sent_bytes()["first", "second"]
    seconds_to_send(first, second, 10**7)
    seen = network.sent_bytes()["first", "second"] - before
    assert on_the_wire(10**7) <= seen <= 1.01 * on_the_wire(10**7)
    assert network.sent_bytes()["second", "first"] < 0.05 * seen, "acknowledgements"


def test_a_round_trip_takes_all_four_delays(network: Network):
    """Never less; the quickest takes little more."""
    first, second, _ = network.hosts
    for first_s, second_s in ((0.0, 0.0), (0.01, 0.02), (0.01, 0.0)):
        network.change("first", delay_s=first_s)
        network.change("second", delay_s=second_s)
        quickest_s = round_trips_s(first, second, 30)[0]
        expected_s = 2 * (first_s + second_s)
        assert expected_s <= quickest_s < expected_s + 0.005


def test_single_packets_are_lost_with_the_probability_that_was_asked_for(network: Network):
    """UDP packets, which nobody sends again."""
    first, second, _ = network.hosts
    network.change("second", loss=0.1)
    count = 5000
    with second.start(sys.executable, "-c", COUNT_PACKETS, second.address, stdout=subprocess.PIPE) as counter:
        assert counter.stdout is not None and counter.stdout.readline() == "ready\n"
        first.run(sys.executable, "-c", SEND_PACKETS, second.address, count)
        arrived = int(counter.stdout.readline())
    # Six standard deviations of the number of those that are lost: sqrt(n p (1 - p)) = 21.
    assert abs(count - arrived - 0.1 * count) < 6 * 21.2
    assert network.dropped_frames()["first", "second"] == pytest.approx(count - arrived, abs=5)


def test_tcp_brings_all_bytes_over_a_cable_that_loses_some(network: Network):
    first, second, _ = network.hosts
    network.change("first", loss=0.01)
    assert 0 < seconds_to_send(first, second, 2 * 10**6) < 30
    assert network.dropped_frames()["first", "second"] > 3


def test_a_host_disappears_and_comes_back(network: Network):
    """Silently: a connection waits, and goes on when packets pass again; a new one is not refused."""
    first, second, third = network.hosts
    assert connects(first, second) == "connected"
    network.change("second", up=False)
    assert connects(first, second) == "silence"
    assert connects(third, first) == "refused", "the others reach each other"
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(round_trips_s, first, second, 1)
        time.sleep(0.5)
        assert not waiting.done()
        network.change("second", up=True)
        waiting.result(timeout=20)
    assert connects(first, second) == "connected"


def test_a_firewall_between_two_hosts_blocks_no_other(network: Network):
    first, second, third = network.hosts
    network.block(("second", "first"))
    assert connects(first, second) == "silence"
    assert connects(third, second) == "connected"
    network.block()
    assert connects(first, second) == "connected"


def test_large_packets_vanish_in_a_tunnel_that_nobody_knows_of(network: Network):
    """Small ones pass, so that hosts connect, but do not get on."""
    first, second, _ = network.hosts
    network.change("second", mtu=1400)
    assert connects(first, second) == "connected"
    with pytest.raises(subprocess.TimeoutExpired):
        seconds_to_send(first, second, 10**5, limit_s=3)
    first.run("ip", "link", "set", INTERFACE, "mtu", 1400)
    assert seconds_to_send(first, second, 10**5) < 3


def test_hosts_may_have_addresses_of_ipv6_alone():
    with joined_hosts(["first", "second"], ip_version=6, cable=Cable(delay_s=0.01)) as network:
        first, second = network.hosts
        with listening(second):
            assert second.address == "fd77::2"
            assert seconds_to_send(first, second, 10**7) < 20
            assert round_trips_s(first, second, 3)[0] >= 0.04


SEND_PACKETS = """
import socket, sys, time
packets = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for number in range(int(sys.argv[2])):
    packets.sendto(b"some", (sys.argv[1], 5078))
    time.sleep(0.001 if number % 20 == 0 else 0)
"""
COUNT_PACKETS = """
import socket, sys
packets = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
SO_RCVBUFFORCE = 33
packets.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 2**24)
packets.bind((sys.argv[1], 5078))
print("ready", flush=True)
count = 0
try:
    while packets.recv(10):
        packets.settimeout(2)
        count += 1
except TimeoutError:
    print(count, flush=True)
"""
CONNECT = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], 5077), timeout=0.5)
    print("connected")
except ConnectionRefusedError:
    print("refused")
except OSError:  # no answer, be it to the request for the Ethernet address
    print("silence")
"""


def connects(one: Host, other: Host) -> str:
    """Return what comes of connecting to the port of `listening`."""
    return one.run(sys.executable, "-c", CONNECT, other.address).stdout.strip()

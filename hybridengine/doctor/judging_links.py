"""Rules that derive findings from reported facts about links between nodes, and their names. They query no node."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hybridengine.doctor.findings import Finding, Subject, fine, problem, warning
from hybridengine.doctor.links import LinkFacts
from hybridengine.doctor.names import NameFacts
from hybridengine.formatting import format_seconds

SLOW_SHARE = 0.25
"""Share of the fastest link's rate below which a link is slow."""
SLOW_BYTES_S = 30e6
"""Rate below which any link is slow."""
LOST_SHARE = 0.005
"""Share of lost packets above which collectives get slower."""

Links = Mapping[str, Mapping[str, LinkFacts]]
"""Facts about the link from a node to another one, by address."""


def judge_ports(links: Links) -> Iterator[Finding]:
    """Check that every node reaches every other one."""
    closed = (
        "open the ports that the system chooses (net.ipv4.ip_local_port_range) between the nodes, and check the network"
        " between them"
    )
    loopback = "start Ray there again with --node-ip-address and an address that the other nodes reach"
    for node, ways in links.items():
        for target, one in ways.items():
            if one.error:
                text = f"a port of {target} cannot be reached ({one.error})"
                remedy = loopback if target.startswith("127.") or target == "::1" else closed
                yield problem(Subject.PORTS, text, remedy, node)
    if links and not any(one.error for ways in links.values() for one in ways.values()):
        yield fine(Subject.PORTS, f"{len(links)} nodes reach each other's ports")


def judge_names(facts: Mapping[str, NameFacts]) -> Iterator[Finding]:
    """Check that names of other hosts, where a node can resolve them, lead to these hosts.

    A run does not use them, and a host's own name may resolve to loopback.
    """
    remedy = (
        "correct /etc/hosts or DNS there, and give Ray addresses instead of names (`ray start --address`)"
    )
    for node, one in facts.items():
        for target, other in facts.items():
            wrong = [place for place in one.resolved.get(other.host, ()) if place not in other.addresses]
            if wrong and other.host != one.host:
                text = f"{other.host} resolves to {', '.join(wrong)}, which is no address of that host ({target})"
                yield warning(Subject.PORTS, text, remedy, node)


def judge_links(links: Links) -> Iterator[Finding]:
    """Check that data arrives, in packets of all sizes, at similar rates and without losses."""
    fastest = max((one.bytes_s for ways in links.values() for one in ways.values()), default=0.0)
    faults = [
        fault
        for node, ways in links.items()
        for target, one in ways.items()
        for fault in _faults(node, target, one, fastest)
    ]
    yield from faults
    slowest = min(
        (one.bytes_s for ways in links.values() for one in ways.values() if one.bytes_s), default=0.0
    )
    is_cut = any(one.error for ways in links.values() for one in ways.values())
    if slowest and not faults and not is_cut:
        yield fine(Subject.LINKS, f"data goes from node to node at {_rate(slowest)} or more, none is lost")


def _faults(node: str, target: str, one: LinkFacts, fastest: float) -> Iterator[Finding]:
    if one.packet_bytes and one.passes_small:
        text = f"packets of {one.packet_bytes} bytes to {target} are lost, and small ones arrive: ranks would hang"
        remedy = (
            "lower the MTU of the nodes' interfaces to what the network between them lets pass (`ip link set dev NAME mtu"
            " 1400`), or raise that of the network; net.ipv4.tcp_mtu_probing=1 makes Linux find it"
        )
        yield problem(Subject.LINKS, text, remedy, node)
    elif one.packet_bytes:
        text = f"{target} accepts connections, and no data arrives there"
        remedy = "look for a firewall, or a device on the way that has failed"
        yield problem(Subject.LINKS, text, remedy, node)
    if one.bytes_s and one.bytes_s < max(SLOW_BYTES_S, SLOW_SHARE * fastest):
        text = f"data goes to {target} at {_rate(one.bytes_s)}, with {format_seconds(one.round_trip_s)} there and back"
        if fastest > one.bytes_s:
            text += f"; the fastest link has {_rate(fastest)}"
        remedy = (
            "see the speed of both interfaces (`ethtool NAME`), and what else uses the link; every step waits for the"
            " slowest link"
        )
        yield warning(Subject.LINKS, text, remedy, node)
    if one.lost_share > LOST_SHARE:
        text = f"{one.lost_share:.1%} of the packets to {target} are lost: collectives wait for them"
        remedy = "check cables, and counts of errors and drops of both interfaces (`ip -s link`)"
        yield warning(Subject.LINKS, text, remedy, node)


def _rate(bytes_s: float) -> str:
    """Return a rate as text, in bits as networks are named."""
    return f"{bytes_s * 8 / 1e9:.2f} Gbit/s" if bytes_s >= 125e6 else f"{bytes_s * 8 / 1e6:.0f} Mbit/s"

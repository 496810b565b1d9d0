"""From what nodes say about clocks, ports and links to findings. As beside it, nothing is asked here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median

from hybridengine.doctor.findings import Finding, Subject, fine, problem, warning
from hybridengine.doctor.node_post import Reached
from hybridengine.metrics.formatting import format_bytes, format_seconds

SLOW_SHARE = 0.5
"""Of the median: a link below is worth a look."""
SLOW_BYTES_S = 100e6
"""Less than gigabit Ethernet carries: worth a look even where all links are so."""
CLOCK_WARNING_S = 0.1
CLOCK_PROBLEM_S = 60.0


def judge_clocks(offsets: Mapping[str, tuple[float, float]]) -> list[Finding]:
    """Clocks against the controller's.

    Args:
        offsets: node -> seconds that it is ahead, and how far that may be wrong.
    """
    findings = list[Finding]()
    remedy = "have all nodes keep time with chrony or ntpd"
    for node, (offset, doubt) in offsets.items():
        certain = max(0.0, abs(offset) - doubt)
        text = f"the clock is {format_seconds(abs(offset))} {'ahead' if offset > 0 else 'behind'}"
        if certain > CLOCK_PROBLEM_S:
            findings.append(problem(Subject.CLOCK, f"{text}: signed requests expire", remedy, node))
        elif certain > CLOCK_WARNING_S:
            findings.append(warning(Subject.CLOCK, f"{text}: timelines of nodes do not fit", remedy, node))
    if not findings and offsets:
        most = max(abs(offset) + doubt for offset, doubt in offsets.values())
        findings.append(fine(Subject.CLOCK, f"clocks are within {format_seconds(most)} of the controller's"))
    return findings


def judge_ports(reached: Mapping[tuple[str, str], Reached]) -> list[Finding]:
    """Whether every node reaches a port that the system has chosen on every other one.

    Args:
        reached: (from, to) -> how it answered.
    """
    findings = list[Finding]()
    for (source, target), one in reached.items():
        if one.error:
            remedy = (
                "open the ports that the system chooses (net.ipv4.ip_local_port_range) between the nodes, and have names"
                " resolve to addresses that the others reach"
            )
            text = f"a port of {target} cannot be reached ({one.error})"
            findings.append(problem(Subject.PORTS, text, remedy, source))
    if reached and not findings:
        slowest = max(one.latency_s for one in reached.values())
        num_nodes = len({source for source, _ in reached})
        text = f"{num_nodes} nodes reach each other's ports, within {format_seconds(slowest)}"
        findings.append(fine(Subject.PORTS, text))
    return findings


def judge_raylets(addresses: Sequence[str]) -> list[Finding]:
    """Whether each machine is one node.

    Args:
        addresses: of all nodes.
    """
    remedy = "`ray stop --force` there, and start one raylet only"
    return [
        problem(
            Subject.DEVICES,
            f"{count} raylets run there: its devices are offered {count} times",
            remedy,
            address,
        )
        for address, count in Counter(addresses).items()
        if count > 1
    ]


def judge_links(sent: Mapping[tuple[str, str], Reached]) -> list[Finding]:
    """How fast bytes go from node to node.

    Args:
        sent: (from, to) -> what was sent, all at the same time.
    """
    findings = list[Finding]()
    rates = {pair: one.num_bytes / one.seconds for pair, one in sent.items() if not one.error and one.seconds}
    for (source, target), one in sent.items():
        if one.error:
            remedy = (
                "see whether the network loses packets (MTU, cables, a firewall that ends long connections)"
            )
            findings.append(
                problem(Subject.LINKS, f"sending to {target} failed ({one.error})", remedy, source)
            )
    if not rates:
        return findings
    usual = median(rates.values())
    for (source, target), rate in rates.items():
        if rate < (least := max(SLOW_SHARE * usual, SLOW_BYTES_S)):
            text = f"{format_bytes(rate)}/s to {target}, where {format_bytes(max(usual, least))}/s are usual"
            remedy = "look at the cable, the speed of the interface, and what else uses it"
            findings.append(warning(Subject.LINKS, text, remedy, source))
    if not findings:
        text = f"one TCP connection from node to node: {format_bytes(min(rates.values()))}/s or more"
        findings.append(fine(Subject.LINKS, text))
    return findings


def judge_dashboard(address: str | None) -> list[Finding]:
    """Whether others than this machine's users reach Ray's dashboard, which carries out what it is sent.

    Args:
        address: host:port; None where there is no dashboard.
    """
    host = (address or "").rpartition(":")[0].strip("[]")
    if not host or host in ("127.0.0.1", "localhost", "::1"):
        return []
    remedy = (
        "ray start --dashboard-host=127.0.0.1 and an SSH tunnel, or RAY_AUTH_MODE=token; whoever reaches it runs code as"
        " you"
    )
    return [warning(Subject.PORTS, f"Ray's dashboard listens at {address}", remedy)]

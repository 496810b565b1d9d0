"""Names of hosts: what a node resolves them to, and nodes that disagree."""

from __future__ import annotations

import socket
import threading
from dataclasses import replace
from typing import Any

import pytest

from hybridengine.doctor import names
from hybridengine.doctor.findings import Level
from hybridengine.doctor.judging_links import judge_names
from hybridengine.doctor.names import NameFacts, name_facts

FIRST = NameFacts("first", ["10.0.0.1", "fd00::1"], {"first": ["127.0.1.1"], "second": ["10.0.0.2"]})
SECOND = NameFacts("second", ["10.0.0.2", "192.168.0.2"], {"first": ["fd00::1", "10.0.0.1"]})


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (FIRST, SECOND, []),  # its own name leads to loopback, and not every node knows its own
        (replace(FIRST, resolved={"second": ["192.168.0.2"]}), SECOND, []),  # another interface
        (replace(FIRST, resolved={}), SECOND, []),
        (
            FIRST,
            replace(SECOND, host="first", resolved={"first": ["127.0.1.1"]}),
            [],
        ),  # two nodes on one host
        (
            replace(FIRST, resolved={"second": ["10.0.0.99"]}),
            SECOND,
            [("10.0.0.1", "second resolves to 10.0.0.99, which is no address of that host (10.0.0.2)")],
        ),
        (
            FIRST,
            replace(SECOND, resolved={"first": ["10.0.0.1", "10.0.0.2"]}),
            [("10.0.0.2", "first resolves to 10.0.0.2, which is no address of that host (10.0.0.1)")],
        ),
        (
            FIRST,
            replace(SECOND, resolved={"first": ["127.0.0.1"]}),
            [("10.0.0.2", "first resolves to 127.0.0.1, which is no address of that host (10.0.0.1)")],
        ),
    ],
)
def test_names_that_lead_to_other_hosts(
    first: NameFacts, second: NameFacts, expected: list[tuple[str, str]]
) -> None:
    found = list(judge_names({"10.0.0.1": first, "10.0.0.2": second}))
    assert [(*one.nodes, one.text) for one in found] == expected
    assert {one.level for one in found} <= {Level.WARNING}


def test_what_a_node_resolves(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that takes too long counts as unknown."""
    answer, ended = socket.getaddrinfo, threading.Event()

    def resolve(host: str, *arguments: Any, **options: Any) -> Any:
        if host == "slow":
            ended.wait(60)
        if host == "unknown":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return answer("fe80::1%1" if host == "linked" else "10.0.0.7", *arguments, **options)

    monkeypatch.setattr(names.socket, "getaddrinfo", resolve)
    monkeypatch.setattr(names, "RESOLVE_LIMIT_S", 1.0)
    facts = name_facts(["other", "linked", "unknown", "slow"])
    ended.set()
    assert facts.resolved == {"other": ["10.0.0.7"], "linked": ["fe80::1"]}
    assert facts.host == socket.gethostname()
    assert not {"127.0.0.1", "::1", ""} & {*facts.addresses}

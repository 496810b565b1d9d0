"""Findings of an examination: each is fine, worth knowing, or the reason why a run fails, with what to do about it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

THIS_MACHINE = "this machine"
"""Name of the node on which the command runs, until a cluster knows it by an address."""


class Level(StrEnum):
    """Severity of a finding."""

    OK = "ok"
    WARNING = "warning"
    """A run works, but slower or less safely than it could."""
    PROBLEM = "problem"
    """A run fails."""


class Subject(StrEnum):
    """Subjects of the examination, in the order of the report."""

    VERSIONS = "versions"
    DEVICES = "devices"
    MEMORY = "memory"
    FILES = "shared files"
    CLOCK = "clock"
    PORTS = "ports"
    LINKS = "links"


@dataclass(frozen=True)
class Finding:
    """One thing that was examined."""

    subject: Subject
    level: Level
    text: str
    """Observation, with its value."""
    remedy: str = ""
    """Remedy; empty if nothing needs to be done."""
    nodes: tuple[str, ...] = ()
    """Nodes that it concerns; empty for this machine alone, and for all of them."""


def fine(subject: Subject, text: str, *nodes: str) -> Finding:
    """Return a finding that needs no action."""
    return Finding(subject, Level.OK, text, nodes=nodes)


def warning(subject: Subject, text: str, remedy: str, *nodes: str) -> Finding:
    """Return a finding with which a run works."""
    return Finding(subject, Level.WARNING, text, remedy, nodes)


def problem(subject: Subject, text: str, remedy: str, *nodes: str) -> Finding:
    """Return a finding with which no run works."""
    return Finding(subject, Level.PROBLEM, text, remedy, nodes)


def failure(subject: Subject, error: Exception | str) -> Finding:
    """Return the problem that an error of this project reports: its message ends with "; " and the remedy."""
    text, _, remedy = str(error).rpartition("; ")
    if not text:
        return problem(subject, f"{type(error).__name__}: {remedy}", "see the logs of Ray's session")
    return problem(subject, text, remedy)


def merged(findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings in the order of their subjects, equal ones of several nodes as one with all nodes."""
    nodes = dict[tuple[Subject, Level, str, str], dict[str, None]]()
    for found in findings:
        key = (found.subject, found.level, found.text, found.remedy)
        nodes.setdefault(key, {}).update(dict.fromkeys(found.nodes))
    order = list(Subject)
    return sorted(
        (Finding(*key, nodes=tuple(names)) for key, names in nodes.items()),
        key=lambda found: order.index(found.subject),
    )

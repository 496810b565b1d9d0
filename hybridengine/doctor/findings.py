"""Findings of an examination, each with a severity and a remedy."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

THIS_MACHINE = "this machine"
"""Name of the node on which the command runs, if its address in a cluster is unknown."""


class Level(StrEnum):
    """Severity of a finding: with a warning, a run works, but slower or less safely; with a problem, it fails."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


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
    """Result of one check."""

    subject: Subject
    level: Level
    text: str
    remedy: str = ""
    nodes: tuple[str, ...] = ()
    """Nodes concerned; empty for this machine alone, and for all nodes."""


def fine(subject: Subject, text: str, *nodes: str) -> Finding:
    """Return a finding that needs no action."""
    return Finding(subject, Level.OK, text, nodes=nodes)


def warning(subject: Subject, text: str, remedy: str, *nodes: str) -> Finding:
    """Return a finding that does not keep a run from working."""
    return Finding(subject, Level.WARNING, text, remedy, nodes)


def problem(subject: Subject, text: str, remedy: str, *nodes: str) -> Finding:
    """Return a finding that makes a run fail."""
    return Finding(subject, Level.PROBLEM, text, remedy, nodes)


def failure(subject: Subject, error: Exception | str) -> Finding:
    """Return the problem that an error of this project reports; its message ends with "; " and the remedy."""
    text, _, remedy = str(error).rpartition("; ")
    if not text:
        return problem(subject, f"{type(error).__name__}: {remedy}", "see the logs of Ray's session")
    return problem(subject, text, remedy)


def merged(findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings in the order of their subjects, with equal findings of several nodes merged."""
    nodes = dict[tuple[Subject, Level, str, str], dict[str, None]]()
    for found in findings:
        key = (found.subject, found.level, found.text, found.remedy)
        nodes.setdefault(key, {}).update(dict.fromkeys(found.nodes))
    order = list(Subject)
    once = (Finding(*key, nodes=tuple(names)) for key, names in nodes.items())
    return sorted(once, key=lambda found: order.index(found.subject))

"""What an examination finds: each finding is fine, worth knowing, or in the way of a run, and then says what to fix."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """How bad it is."""

    OK = "ok"
    WARNING = "warning"
    """A run works, but slower or less safely than it could."""
    PROBLEM = "problem"
    """A run fails."""


class Subject(StrEnum):
    """What is examined, in this order."""

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
    """What was seen, with its value."""
    remedy: str = ""
    """What to do; empty where nothing needs to be done."""
    nodes: tuple[str, ...] = ()
    """Where; empty where it is about this machine alone, or about all."""


def fine(subject: Subject, text: str, *nodes: str) -> Finding:
    """Nothing to do."""
    return Finding(subject, Level.OK, text, nodes=nodes)


def warning(subject: Subject, text: str, remedy: str, *nodes: str) -> Finding:
    """Something that a run survives."""
    return Finding(subject, Level.WARNING, text, remedy, nodes)


def problem(subject: Subject, text: str, remedy: str, *nodes: str) -> Finding:
    """Something that no run survives."""
    return Finding(subject, Level.PROBLEM, text, remedy, nodes)


def merged(findings: Iterable[Finding]) -> list[Finding]:
    """Findings in the order of their subjects; the same one of several nodes is told once, with all of them."""
    nodes = dict[tuple[Subject, Level, str, str], dict[str, None]]()
    for found in findings:
        key = (found.subject, found.level, found.text, found.remedy)
        nodes.setdefault(key, {}).update(dict.fromkeys(found.nodes))
    order = list(Subject)
    return sorted(
        (Finding(*key, nodes=tuple(names)) for key, names in nodes.items()),
        key=lambda found: order.index(found.subject),
    )


def count(findings: Sequence[Finding], level: Level) -> int:
    """How many are of a level."""
    return sum(found.level == level for found in findings)

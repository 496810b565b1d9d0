"""Section of rollouts of several turns, whose function draws turns and calls tools."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, JsonValue

from hybridengine.config.values import (
    BYTE_UNITS,
    Bytes,
    Count,
    ImportPath,
    PathText,
    Seconds,
    Section,
    like,
)

ADDRESS = r"[^\s:]+:[0-9]{1,5}|\[[0-9a-fA-F:.]+\]:[0-9]{1,5}"
"""Pattern of HOST:PORT, with an IPv6 address in brackets."""

TAKEN_METRICS = ("reward", "failure", "turns")
"""Names of columns that every episode has (`report.keys.EPISODE_COLUMNS`)."""

MetricNames = Annotated[
    tuple[str, ...],
    like(
        r"[A-Za-z][A-Za-z0-9_]*",
        "cannot be the name of a metric, which is part of a column's name; use letters, digits and '_', a letter first",
    ),
]

ProcessBytes = Annotated[Bytes, Field(ge=128 * BYTE_UNITS["MiB"])]
"""Memory limit of a process: with 64MiB numpy waits forever for memory; with a tokenizer, 256MiB are too few."""


class EpisodeSection(Section):
    """Rollouts of several turns: a function that draws turns, calls tools and ends with a reward."""

    function: ImportPath | None = None
    """Async function, package.module:function, called as function(client, row) for every response; by default, the one
    that plays `data.environment`."""
    options: dict[str, JsonValue] = Field(default_factory=dict)
    """Values that the function reads as row.options."""
    metrics: MetricNames = ()
    """Names of numbers that the function returns in addition to the reward; their means are metrics episode/NAME."""
    max_turns: Count = 64
    """Largest number of turns of one response."""
    max_running: Count = 256
    """Largest number of responses of an engine whose functions run at once."""
    num_processes: Count = 1
    """Processes of an engine that run functions."""
    python: Annotated[str, like("/.+", "must be an absolute path")] | None = None
    """Path of the Python of another environment for these processes, whose packages functions then import."""
    addresses: Annotated[tuple[str, ...], like(ADDRESS, "must be HOST:PORT")] = ()
    """Other hosts that run the processes, HOST:PORT of `hybridengine episodes serve`; this host by default."""
    key_file: PathText | None = None
    """File with the key of these hosts, the same on all; needed with `addresses`."""
    deadline_s: Seconds = 600.0
    """Time limit of one response, from its last start."""
    blocked_s: Seconds = 30.0
    """Longest time for which code of one response's function may run without awaiting anything."""
    memory_bytes: ProcessBytes | None = None
    """Memory limit of one process, at least 128MiB; none by default."""
    on_failure: Literal["drop", "fail"] = "drop"
    """Action after a response whose function raised, exceeded a limit or returned what it may not: continue without its
    row, or end the run."""

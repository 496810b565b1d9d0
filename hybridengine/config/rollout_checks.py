"""Rules of how responses are drawn: what restricts them, and what a server leaves to its clients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hybridengine.config.algorithm import Conflict, ServedAlgorithm
from hybridengine.config.run_config import RunConfig
from hybridengine.config.sections import RolloutSection, StructureSection

OF_REQUESTS = ("top_p", "top_k", "min_p", "stop", "structure")
"""Keys of `rollout` that every request to a server has of its own."""
UNREAD_KEYWORDS = ("not", "if", "dependentRequired", "dependentSchemas")
"""Keywords of a JSON schema that the engine's grammar ignores without a word."""
NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")
"""Keywords whose values have schemas under names of their own."""
VALUES = ("enum", "const", "default", "examples")
"""Keywords whose values are no schemas."""


def rollout_conflicts(config: RunConfig) -> Iterator[Conflict]:
    """Yield the violated rules of drawing responses."""
    rollout = config.rollout
    if isinstance(config.algorithm, ServedAlgorithm):
        for name in OF_REQUESTS:
            if (value := getattr(rollout, name)) != RolloutSection.model_fields[name].default:
                yield Conflict(
                    f"rollout.{name}={value} is not read by a server, whose clients choose it for each request; leave it"
                    " out",
                    (f"rollout.{name}",),
                )
    if (structure := rollout.structure) is not None:
        yield from structure_conflicts("rollout.structure", structure)


def structure_conflicts(key: str, structure: StructureSection) -> Iterator[Conflict]:
    """Yield a structure that is given in no way, or in several."""
    given = [name for name in StructureSection.model_fields if getattr(structure, name)]
    if len(given) != 1:
        names = ", ".join(StructureSection.model_fields)
        remedy = "leave out all but one" if given else f"add one, or leave {key} out"
        yield Conflict(
            f"{key} must be given by exactly one of {names}, found {' and '.join(given) or 'none'}; {remedy}",
            tuple(f"{key}.{name}" for name in StructureSection.model_fields),
        )
    if unread := sorted({*unread_keywords(structure.json_schema)}):
        yield Conflict(
            f"{key}.json_schema has {', '.join(unread)}, which the engine's grammar ignores, so that responses could"
            " violate the schema; write it without",
            (f"{key}.json_schema",),
        )


def unread_keywords(schema: Mapping[str, Any]) -> Iterator[str]:
    """Yield the `UNREAD_KEYWORDS` of a JSON schema and of the schemas in it."""
    for keyword, value in schema.items():
        if keyword in UNREAD_KEYWORDS:
            yield keyword
        elif keyword not in VALUES:
            parts = value if isinstance(value, list) else [value]
            if keyword in NAMED_SCHEMAS and isinstance(value, dict):
                parts = value.values()
            for part in parts:
                if isinstance(part, dict):
                    yield from unread_keywords(part)

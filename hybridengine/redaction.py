"""Keeps secrets out of what a run prints, writes and sends: configurations, errors, reports.

A secret is the value of a name that says so (api_key, HF_TOKEN, password, ...), in a configuration or in the environment,
and what stands before the @ of an address.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "(hidden)"
SHORTEST = 6
"""Characters of a secret in the environment; shorter values would be found everywhere."""

_NAME = re.compile(
    r"(^|[_\-.])((api|access|private|secret|encryption|auth)[_\-]?keys?|auth|authorization|bearer|credentials?|passw(or)?d"
    r"|passphrase|secrets?|tokens?)$",
    re.IGNORECASE,
)
_IN_ADDRESS = re.compile(r"(?<=://)[^/\s@]+@")


def is_secret(name: str) -> bool:
    """Whether what has this name is nobody's business."""
    return _NAME.search(name) is not None


def without_secrets(text: str) -> str:
    """`text` with the names of the environment's secrets in place of their values."""
    secrets = {
        name: value for name, value in os.environ.items() if is_secret(name) and len(value) >= SHORTEST
    }
    for name, value in sorted(secrets.items(), key=lambda item: -len(item[1])):
        text = text.replace(value, f"(hidden: {name})")
    return _IN_ADDRESS.sub(f"{HIDDEN}@", text)


def redacted(value: Any, name: str = "") -> Any:
    """A configuration, or a part of it, without its secrets.

    Args:
        name: under which `value` stands.
    """
    if isinstance(value, Mapping):
        return {key: redacted(one, str(key)) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [redacted(one, name) for one in value]
    if isinstance(value, str):
        return HIDDEN if value and is_secret(name) else without_secrets(value)
    return value

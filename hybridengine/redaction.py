"""Removal of secrets from everything that a run prints, writes and sends.

Secrets are values under a secret's name (api_key, HF_TOKEN, password, ...) in a configuration, the environment or a URL's
query, the part of a URL before the @, and the credentials of an Authorization header.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "(hidden)"
SHORTEST = 6
"""Least number of characters of a secret; shorter values would match unrelated text."""
IN_ENVIRONMENT = ("_KEY", "_PASS", "_PWD", "_PAT", "_DSN")
"""Suffixes of secret names in the environment; not applied to configurations, in which `pass` may be a count."""

_NAME = re.compile(
    r"((^|[_\-.])(auth|authorization|bearer|dsn|tokens?|(access|private|secret|encryption|auth)[_\-]?keys?)"
    r"|api[_\-]?keys?|passw(or)?ds?|passphrases?|secrets?|credentials?)$",
    re.IGNORECASE,
)
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_IN_ADDRESS = re.compile(r"(?<=://)([^/\s:@]+:\S+|[^/\s@]+)@")
_IN_QUERY = re.compile(
    r"([?&](?:api[_\-]?key|key|(?:access[_\-]?)?token|secret|password|sig(?:nature)?)=)(?!\(hidden)[^&\s\"'#]+",
    re.IGNORECASE,
)
_BEARER = re.compile(r"(\bbearer\s+)(?!\(hidden)[\w.~+/\-]{16,}=*", re.IGNORECASE)
_IN_HEADER = re.compile(
    r"""((?:x-api-key|authorization)(?:[\\"']*\s*[:=]\s*|["']\s*,\s*)b?[\\"']*)(?!\(hidden)[^\\"'\n]+""",
    re.IGNORECASE,
)
"""A header as sent, in JSON, in nested JSON, or as a pair of byte strings; up to the closing quote or end of line."""
_MARKER = re.compile(r"(^|_)(eos|bos|pad|stop|unk|sep|mask|end|start)_tokens?$", re.IGNORECASE)
"""Names of special tokens of a text, which are not secrets."""


def is_secret(name: str) -> bool:
    """Return True if the value under this name is a secret."""
    name = _CAMEL.sub("_", name)
    return _NAME.search(name) is not None and _MARKER.search(name) is None


def _may_count(name: str) -> bool:
    """Return True if a number of this name may be a count, and a mapping the settings of a reward term."""
    return name.lower().endswith(("token", "tokens"))


def _beneath(name: str, key: str) -> str:
    """Return the name by which to judge the value of `key` in the mapping `name`.

    All values of a mapping called `credentials` are secrets; a mapping called `tokens` may be a reward term.
    """
    return name if is_secret(name) and not _may_count(name) else key


def _is_secret_value(value: Any, name: str) -> bool:
    """Return True if a configuration value is a secret by its name; YAML may have parsed a password as a number."""
    if isinstance(value, str):
        return bool(value) and is_secret(name)
    return isinstance(value, int) and not isinstance(value, bool) and is_secret(name) and not _may_count(name)


_known = set[str]()
"""Secrets from the configurations that this process has read."""


def remember_secrets(value: Any, name: str = "") -> None:
    """Register the secrets of a configuration, or of its part under the key `name`, for removal from later texts."""
    if isinstance(value, Mapping):
        for key, one in value.items():
            remember_secrets(one, _beneath(name, str(key)))
    elif isinstance(value, list | tuple):
        for one in value:
            remember_secrets(one, name)
    elif _is_secret_value(value, name) and len(str(value)) >= SHORTEST:
        _known.add(str(value))


def without_secrets(text: str) -> str:
    """Return `text` with its secrets hidden; secrets from the environment are replaced by their variables' names."""
    secrets = {
        name: value
        for name, value in os.environ.items()
        if (is_secret(name) or name.endswith(IN_ENVIRONMENT)) and len(value) >= SHORTEST
    }
    shown = {value: f"(hidden: {name})" for name, value in secrets.items()}
    for value in sorted({*shown, *_known}, key=len, reverse=True):
        text = text.replace(value, shown.get(value, HIDDEN))
    text = _IN_ADDRESS.sub(f"{HIDDEN}@", text)
    for pattern in (_IN_QUERY, _IN_HEADER, _BEARER):
        text = pattern.sub(rf"\g<1>{HIDDEN}", text)
    return text


def redacted(value: Any, name: str = "") -> Any:
    """Return a configuration, or its part under the key `name`, with its secrets hidden."""
    if isinstance(value, Mapping):
        return {key: redacted(one, _beneath(name, str(key))) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [redacted(one, name) for one in value]
    if _is_secret_value(value, name):
        return HIDDEN
    return without_secrets(value) if isinstance(value, str) else value

"""Removal of secrets from everything that a run prints, writes and sends.

Secrets are a configuration's values of type SecretStr, values under a secret's name (api_key, HF_TOKEN, password, ...) in
the environment or a URL's query, the part of a URL before the @, and the credentials of an Authorization header.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from pydantic import SecretStr

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
_OF_TEXT = re.compile(
    r"(^|_)((eos|bos|pad|stop|unk|sep|mask|end|start)_tokens?|(batch|prompt|response|cache|model|new|max|num)_tokens)$",
    re.IGNORECASE,
)
"""Names of special tokens of a text and of numbers of tokens, which are not secrets."""


def is_secret(name: str) -> bool:
    """Return True if the value under this name is a secret."""
    name = _CAMEL.sub("_", name)
    return _NAME.search(name) is not None and _OF_TEXT.search(name) is None


_known = set[str]()
"""Secrets from the configurations that this process has read."""


def remember_secrets(value: Any) -> None:
    """Register every SecretStr of a configuration, or a part of it, for removal from all later texts."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for one in value:
            remember_secrets(one)
    elif isinstance(value, SecretStr) and len(value) >= SHORTEST:
        _known.add(value.get_secret_value())


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


def redacted(value: Any) -> Any:
    """Return plain values with the secrets in their texts hidden."""
    if isinstance(value, Mapping):
        return {key: redacted(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [redacted(one) for one in value]
    return without_secrets(value) if isinstance(value, str) else value

"""Objects by import path."""

from __future__ import annotations

import importlib
from typing import Any

from hybridengine.errors import ConfigError


def import_object(path: str) -> Any:
    """The object at "package.module.Name", or at "package.module:name".

    Raises:
        ConfigError: there is no such module or name.
    """
    module, _, name = path.replace(":", ".").rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"{path!r} cannot be imported ({error}); write it as package.module.Name"
        ) from error

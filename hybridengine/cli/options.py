"""Kinds of command-line options."""

from __future__ import annotations

import argparse
from typing import Any

from hybridengine.errors import ConfigError


class Once(argparse.Action):
    """Stores an option's value, and refuses the option where it is given again: `action=Once`.

    Raises:
        ConfigError: the option is given twice.
    """

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Store `values`, as argparse calls it."""
        given: set[str] = vars(namespace).setdefault("given_options", set())
        if self.dest in given:
            both = [getattr(namespace, self.dest), values]
            first, second = (
                " ".join(map(str, value)) if isinstance(value, list) else str(value) for value in both
            )
            raise ConfigError(
                f"{option_string} is given twice, as {first} and as {second}; leave one of them out"
            )
        given.add(self.dest)
        setattr(namespace, self.dest, values)

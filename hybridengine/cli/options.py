"""Kinds of command-line options."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hybridengine.errors import ConfigError

STDOUT = "-"
"""What `--json` without a file stands for: figures alone on stdout."""


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


def once(parser: argparse.ArgumentParser) -> Callable[..., None]:
    """`parser.add_argument` for options that may be given once."""

    def option(*names: str, **settings: Any) -> None:
        settings.setdefault("action", Once)
        parser.add_argument(*names, **settings)

    return option


def add_json_option(parser: argparse.ArgumentParser) -> None:
    """Add `--json` with a file, or with none for stdout."""
    once(parser)(
        "--json", nargs="?", const=STDOUT, metavar="FILE", help="figures as JSON: to FILE, or alone on stdout"
    )


def json_file(options: argparse.Namespace) -> Path | None:
    """The file that `--json` names, if it names one."""
    return None if options.json in (None, STDOUT) else Path(options.json)

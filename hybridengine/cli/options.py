"""Kinds of command-line options."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from hybridengine.config.values import Bytes
from hybridengine.errors import ConfigError, HybridEngineError
from hybridengine.topology.sizes import GenSizes, TrainSizes

STDOUT = Path("-")
"""Value of `--json` without a file: figures alone on stdout."""


DTYPES = ("float32", "bfloat16")
"""Types of weights that this machine can train or generate with."""

Value = TypeVar("Value")


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
    help_text = "figures as JSON: to FILE, or alone on stdout"
    once(parser)("--json", nargs="?", type=Path, const=STDOUT, metavar="FILE", help=help_text)


def json_file(options: argparse.Namespace) -> Path | None:
    """The file that `--json` names, if it names one."""
    return None if options.json in (None, STDOUT) else options.json


def parsed(parse: Callable[[str], Value]) -> Callable[[str], Value]:
    """Return a `type=` for argparse that parses with `parse`, and names the option in its errors."""

    def convert(text: str) -> Value:
        try:
            return parse(text)
        except HybridEngineError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


train_sizes, gen_sizes = parsed(TrainSizes.parse), parsed(GenSizes.parse)


def between(least: float, most: float, kind: type[int] | type[float] = int) -> Callable[[str], Any]:
    """Return a `type=` for argparse: numbers of a kind from `least` to `most`."""

    def convert(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most:
            number = "an integer" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"{text[:60]!r} must be {number} from {least} to {most}")
        return value

    return convert


def byte_size(text: str) -> int:
    """Return the bytes that an option gives as an integer or with a unit: a `type=` for argparse."""
    try:
        return TypeAdapter(Bytes).validate_python(f"{text}B" if text.isdecimal() else text)
    except ValidationError as error:
        raise argparse.ArgumentTypeError(
            f"{text[:60]!r} is no size in bytes; write an integer or a unit such as 64MiB"
        ) from error

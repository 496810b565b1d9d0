"""Argument parser and option types of the command line."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from pydantic import TypeAdapter, ValidationError

from hybridengine.config.values import Bytes
from hybridengine.errors import ConfigError, HybridEngineError
from hybridengine.topology.sizes import GenSizes, TrainSizes

STDOUT = Path("-")
"""Value of `--json` without a file: print only the figures, to stdout."""
DTYPES = ("float32", "bfloat16")
"""Supported types of weights."""

Value = TypeVar("Value")


class Parser(argparse.ArgumentParser):
    """Argument parser that raises its errors, and prints descriptions and examples verbatim."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **settings)

    def error(self, message: str) -> NoReturn:
        """Reject the command line.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(f"{message}; see {self.prog} --help")


def parsed(parse: Callable[[str], Value]) -> Callable[[str], Value]:
    """Return a `type=` for argparse that calls `parse` and names the option in errors."""

    def convert(text: str) -> Value:
        try:
            return parse(text)
        except HybridEngineError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


train_sizes, gen_sizes = parsed(TrainSizes.parse), parsed(GenSizes.parse)


def between(least: float, most: float, kind: type[int] | type[float] = int) -> Callable[[str], Any]:
    """Return a `type=` for argparse that accepts numbers of a kind from `least` to `most`."""

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
    """Return a number of bytes, given as an integer or with a unit; a `type=` for argparse."""
    try:
        return TypeAdapter(Bytes).validate_python(f"{text}B" if text.isdecimal() else text)
    except ValidationError as error:
        raise argparse.ArgumentTypeError(
            f"{text[:60]!r} is no size in bytes; write an integer or a unit such as 64MiB"
        ) from error


def add_json_option(parser: argparse.ArgumentParser) -> None:
    """Add `--json [FILE]`; without a file, it prints to stdout."""
    help_text = "figures as JSON: to FILE.json, or alone on stdout"
    parser.add_argument("--json", nargs="?", type=Path, const=STDOUT, metavar="FILE", help=help_text)

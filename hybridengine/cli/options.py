"""Argument parser and option types of the command line."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from pydantic import TypeAdapter, ValidationError

from hybridengine.config import RunConfig
from hybridengine.config.values import Bytes
from hybridengine.errors import ConfigError, HybridEngineError

STDOUT = Path("-")
"""Value of `--json` without a file: print only the figures, to stdout."""
DTYPES = ("float32", "bfloat16")


def check_generates(config: RunConfig, command: str) -> None:
    """Raise ConfigError if the algorithm draws no responses, which `command` counts with."""
    if not config.algorithm.generates:
        raise ConfigError(
            f"algorithm.name={config.algorithm.name} draws no responses, and hybridengine {command} counts with those"
            " that do; hybridengine train CONFIG --dry-run prints its groups and memory"
        )


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Formatter that prints descriptions and examples verbatim, and adds defaults to the help of options."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        is_empty = isinstance(action.default, list) or action.default in (None, "")
        if is_empty or not (action.option_strings and action.metavar):
            return action.help
        return f"{action.help} (default %(default){'g' if isinstance(action.default, float) else 's'})"


class Parser(argparse.ArgumentParser):
    """Argument parser that raises its errors."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(formatter_class=_Formatter, **settings)

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError: the command line is rejected."""
        raise ConfigError(f"{message}; see {self.prog} --help")

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        try:
            return super()._get_value(action, arg_string)
        except HybridEngineError as error:
            raise argparse.ArgumentError(action, str(error)) from None


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
            f"{text[:60]!r} is not a size in bytes; write an integer from 1, or one with a unit such as 64MiB"
        ) from error


def add_json_option(parser: argparse.ArgumentParser) -> None:
    """Add `--json [FILE]`; without a file, it prints to stdout."""
    help_text = "figures as JSON: to FILE.json, or alone on stdout"
    parser.add_argument("--json", nargs="?", type=Path, const=STDOUT, metavar="FILE", help=help_text)

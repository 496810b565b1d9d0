"""Output of commands: progress, lines, figures as JSON, and files, which are checked before any work."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from itertools import combinations
from pathlib import Path
from typing import Any

from hybridengine.cli.options import STDOUT
from hybridengine.errors import raise_all

SUFFIXES = {
    "--json": (".json",),
    "--plot": (".png", ".svg", ".pdf"),
    "--out": (".yaml", ".yml"),
    "--output": (".html",),
}
"""Suffixes allowed for the file of an option."""

Content = str | Callable[[Path], object]
"""Text of a file, or a function that writes to a path."""


def progress_printer() -> Callable[[str], None]:
    """Return a function that prints a line to stderr, prefixed with the seconds since this call."""
    started = time.perf_counter()

    def say(text: str) -> None:
        print(f"[{time.perf_counter() - started:6.1f}s] {text}", file=sys.stderr, flush=True)

    return say


def show_status(text: str) -> None:
    """Show a line on stderr that the next one overwrites; do nothing if stderr is not a terminal."""
    if sys.stderr.isatty():
        print(f"{text}\x1b[K", end="\r", file=sys.stderr, flush=True)


def emit(
    options: argparse.Namespace,
    figures: Any,
    lines: Iterable[str],
    files: Mapping[str, tuple[Path | None, Content]] | None = None,
) -> None:
    """Write the figures and files that options name, and print `lines`, or the figures for `--json` without a file. A
    ConfigError lists the files that could not be written; the others are written and the text is printed all the same."""
    show_status("")
    text = json.dumps(figures, indent=2)
    try:
        write_outputs({"--json": (options.json, text + "\n"), **(files or {})})
    finally:
        print(text if options.json == STDOUT else "\n".join(lines))


def check_outputs(files: Mapping[str, Path | None], sources: Mapping[str, str | Path | None]) -> None:
    """Check that the files that options name are writable and distinct, without leaving any behind.

    Args:
        sources: file or folder that the command reads, by option; other names, such as presets, are ignored.

    Raises:
        ConfigError: a file cannot be written, has a wrong suffix, is named twice, or is read by the command.
    """
    given = {option: file for option, file in files.items() if file not in (None, STDOUT)}
    raise_all(problem for option, file in given.items() if file and (problem := _problem(option, file)))
    places = {option: os.path.realpath(file) for option, file in given.items() if file}
    raise_all(
        f"{one} {given[one]} and {other} {given[other]} are the same file; name two"
        for one, other in combinations(places, 2)
        if places[one] == places[other]
    )
    raise_all(
        f"{option} {given[option]} is what {source} reads; name another file"
        for option, place in places.items()
        for source, name in sources.items()
        if name is not None and place in (os.path.realpath(name), os.path.realpath(Path(name, "config.json")))
    )


def _problem(option: str, file: Path) -> str | None:
    """Return the reason why `file` cannot be the output of `option`; None if it can."""
    if file.suffix.lower() not in SUFFIXES[option]:
        return f"{option} {file} must end in {' or '.join(SUFFIXES[option])}; rename it"
    if option == "--plot" and find_spec("matplotlib") is None:
        return f"{option} needs matplotlib; install hybridengine[plots]"
    try:
        place, new = _places(file)
        if place.exists() and not place.is_file():
            return f"{option} {file} exists and is not a regular file; name another file"
        new.touch()
        new.unlink()
    except OSError as error:
        return _unwritten(option, file, error)
    return None


def write_outputs(files: Mapping[str, tuple[Path | None, Content]]) -> None:
    """Write the file of each option, if given, atomically; raise ConfigError for all that fail, which are unchanged."""
    problems = list[str]()
    for option, (file, content) in files.items():
        if file is None or file == STDOUT:
            continue
        place, new = _places(file)
        try:
            if isinstance(content, str):
                new.write_text(content, encoding="utf-8", errors="replace")
            else:
                content(new)
            new.replace(place)
        except OSError as error:
            problems.append(_unwritten(option, file, error))
        finally:
            new.unlink(missing_ok=True)
    raise_all(problems)


def _places(file: Path) -> tuple[Path, Path]:
    """Return `file` with links resolved, and the temporary file next to it that is written and then renamed."""
    place = Path(os.path.realpath(file))
    return place, place.with_name(f".hybridengine-{os.getpid()}{place.suffix}")


def _unwritten(option: str, file: Path, error: OSError) -> str:
    return (
        f"{option} {file} cannot be written ({error.strerror or error}); name a file in a folder that exists, can be"
        " written to and has space"
    )

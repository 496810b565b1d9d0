"""Rows of a JSONL or parquet file, checked: every malformed row is reported with its number."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from hybridengine.errors import DataError, UnreadableError, raise_all
from hybridengine.reading import check_regular, parse_json

MAX_LISTED_PROBLEMS = 10
"""Malformed rows listed in one error; the rest are counted."""
MAX_LINE_BYTES = 64 * 2**20
"""Longest line of a JSONL file; a longer one is refused before it is read into memory."""

Conversation = str | list[dict[str, str]]
"""A user's text, or chat messages with `role` and `content`."""


@dataclass(frozen=True)
class Row:
    """One checked row of a data file."""

    place: str
    """Where it stands, for messages: "train.jsonl, line 3"."""
    prompt: Conversation
    answer: str
    """What the reward needs: the row's string, or the JSON text of any other value."""
    response: str | None = None
    """A demonstration's response; None where the file need not have one."""

    @property
    def messages(self) -> list[dict[str, str]]:
        """The prompt as chat messages: a plain text is one message of the user."""
        return [{"role": "user", "content": self.prompt}] if isinstance(self.prompt, str) else self.prompt


def read_rows(path: str | Path, needs_response: bool = False) -> list[Row]:
    """All rows of a JSONL or parquet file with the keys prompt, answer and, for demonstrations, response.

    Blank lines of a JSONL file are skipped. Further keys are ignored.

    Raises:
        DataError: the file is missing, empty, of another kind, or has malformed rows (all of them, up to ten).
    """
    path = Path(path)
    readers = {".jsonl": _read_jsonl, ".parquet": _read_parquet}
    if path.suffix not in readers:
        raise DataError(
            f"data file {path} ends in {path.suffix!r}; it must end in .jsonl or .parquet, convert the file"
        )
    try:
        check_regular(path)
    except FileNotFoundError:
        raise DataError(f"data file {path} does not exist; correct the path or write the file") from None
    except UnreadableError as error:
        raise DataError(f"data file {error}; name a .jsonl or .parquet file") from None
    keys = ("prompt", "answer", "response") if needs_response else ("prompt", "answer")
    rows: list[Row] = []
    problems: list[str] = []
    for place, value, unreadable in readers[path.suffix](path):
        found = [unreadable] if unreadable else _row_problems(value, keys)
        problems += [f"{place}: {problem}" for problem in found]
        if not found:
            response = value["response"] if needs_response else None
            rows.append(Row(place, value["prompt"], _as_text(value["answer"]), response))
    raise_listed(problems)
    if not rows:
        raise DataError(f"data file {path} has no rows; write at least one with the keys {', '.join(keys)}")
    return rows


def raise_listed(problems: Sequence[str]) -> None:
    """Raise one DataError with the first problems and the number of the others; do nothing where there is none."""
    listed = list(problems[:MAX_LISTED_PROBLEMS])
    if len(problems) > MAX_LISTED_PROBLEMS:
        listed.append(f"and {len(problems) - MAX_LISTED_PROBLEMS} more malformed rows; correct them alike")
    raise_all(listed, DataError)


def _read_jsonl(path: Path) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Place and value of each line, and the problem of a line that is no JSON object."""
    for number, line in enumerate(_lines(path), start=1):
        if not line.strip():
            continue
        place = f"{path.name}, line {number}"
        if len(line) > MAX_LINE_BYTES:
            yield place, {}, f"the line has more than {MAX_LINE_BYTES} bytes, the most of a row; shorten it"
            continue
        try:
            value = parse_json(line)
        except UnreadableError as error:
            yield place, {}, f"{_shortened(line)} is not JSON ({error}); write one JSON object per line"
            continue
        if isinstance(value, dict):
            yield place, value, ""
        else:
            kind = type(value).__name__
            rule = 'each line must be an object like {"prompt": ..., "answer": ...}'
            yield place, {}, f"{_shortened(line)} is a JSON {kind}; {rule}"


def _lines(path: Path) -> Iterator[bytes]:
    """Lines without their ends; of one that is too long, one byte more than is allowed."""
    with path.open("rb") as file:
        while line := file.readline(MAX_LINE_BYTES + 1):
            rest = line
            while len(rest) > MAX_LINE_BYTES and not rest.endswith(b"\n"):
                rest = file.readline(MAX_LINE_BYTES + 1)
            yield line.removesuffix(b"\n")


def _read_parquet(path: Path) -> Iterator[tuple[str, dict[str, Any], str]]:
    try:
        records = pyarrow.parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        raise DataError(f"{path} is not a readable parquet file ({error}); write it again") from None
    for number, record in enumerate(records, start=1):
        yield f"{path.name}, row {number}", record, ""


def _row_problems(row: Mapping[str, Any], keys: Sequence[str]) -> list[str]:
    missing = [key for key in keys if row.get(key) is None]
    if missing:
        return [
            f"keys {sorted(row)} lack {', '.join(map(repr, missing))}; each row needs {', '.join(keys)}, not null"
        ]
    problems = []
    prompt = row["prompt"]
    if isinstance(prompt, list):
        problems += _message_problems(prompt)
    elif not isinstance(prompt, str) or not prompt:
        problems.append(
            f"prompt={_shortened(prompt)} must be a text that is not empty, or a list of chat messages"
        )
    if "response" in keys and not isinstance(row["response"], str):
        problems.append(f"response={_shortened(row['response'])} must be a text")
    return problems or [problem for key in keys for problem in _text_problems(key, row[key])]


def _text_problems(key: str, value: Any) -> list[str]:
    """Return the reasons why a value cannot be written as text."""
    try:
        _as_text(value).encode()
    except UnicodeEncodeError as error:
        found = ascii(error.object[error.start])
        return [f"{key} has half of a surrogate pair, {found}, which is no character; write the whole one"]
    except RecursionError:
        return [f"{key} is nested too deeply; write it as a text"]
    return []


def _message_problems(messages: list[Any]) -> list[str]:
    if not messages:
        return ["prompt=[] has no chat message; write at least one of the role 'user'"]
    for message in messages:
        texts = [message.get(key) for key in ("role", "content")] if isinstance(message, dict) else [None]
        if not all(isinstance(text, str) for text in texts):
            return [
                f"prompt message {_shortened(message)} must be an object with the texts 'role' and 'content'"
            ]
    if messages[-1]["role"] == "assistant":
        return ["the prompt's last message has role='assistant'; end it with the message to be answered"]
    return []


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _shortened(value: Any, limit: int = 60) -> str:
    text = repr(value) if not isinstance(value, bytes) else repr(value.decode("utf-8", "replace"))
    return text if len(text) <= limit else text[: limit - 3] + "..."

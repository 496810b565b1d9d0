"""Validated rows of a JSONL or parquet file: every malformed row is reported with its number."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pyarrow
import pyarrow.parquet
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError
from typing_extensions import TypedDict

from hybridengine.config.algorithm import RowsKind
from hybridengine.config.loading import rule
from hybridengine.errors import DataError, UnreadableError, raise_all, shown
from hybridengine.files import check_regular

MAX_LISTED_PROBLEMS = 10
MAX_LINE_BYTES = 64 * 2**20
"""Longest line of a JSONL file; a longer one is rejected before it is read into memory."""


class Message(TypedDict):
    """A chat message; additional keys are passed to the chat template."""

    __pydantic_config__ = ConfigDict(extra="allow", strict=True)  # type: ignore[misc]
    role: str
    content: str


def _ends_with_a_request(messages: list[Message]) -> list[Message]:
    if not messages or messages[-1]["role"] == "assistant":
        raise PydanticCustomError(
            "answered", "messages that end with one to be answered, not of role 'assistant'"
        )
    return messages


def _is_trained_whole(message: Message) -> Message:
    """Refuse an assistant's message with a key that the template reads and training would not."""
    if message["role"] != "assistant":
        return message
    for key, value in message.items():
        if key in ("role", "content") or value in (None, "", [], {}) or (key, value) == ("weight", 1):
            continue
        remedy = "write what the chat template makes of it into the content, or remove the key"
        if key == "weight":
            remedy = "for the last turn alone, write those before it as prompt and it as response"
        raise PydanticCustomError(
            "ignored",
            "a message without the key {key}, as all of the assistant's turns are trained, and their content alone;"
            " {remedy}",
            {"key": key, "remedy": remedy},
        )
    return message


def _not_null(value: Any) -> Any:
    if value is None:
        raise PydanticCustomError("null", "a value other than null")
    return value


def _empty_if_null(value: Any) -> Any:
    """Return an empty list for null, which rows of parquet files have in place of a missing key."""
    return [] if value is None else value


Text = Annotated[str, Field(min_length=1), Tag("text")]
Messages = Annotated[list[Message], AfterValidator(_ends_with_a_request), Tag("messages")]


Prompt = Annotated[
    Text | Messages, Discriminator(lambda value: "messages" if isinstance(value, list) else "text")
]


class DataRow(BaseModel):
    """Keys of every row; those that no kind of row has are ignored."""

    model_config = ConfigDict(strict=True)

    images: Annotated[list[Annotated[str, Field(min_length=1)]], BeforeValidator(_empty_if_null)] = []


class PromptRow(DataRow):
    """Keys of a row of prompts."""

    prompt: Prompt
    answer: Annotated[Any, AfterValidator(_not_null)]


class DemonstrationRow(DataRow):
    """Keys of a demonstration: a prompt and its response, or a conversation."""

    prompt: Prompt | None = None
    response: str | None = None
    messages: list[Annotated[Message, AfterValidator(_is_trained_whole)]] | None = None

    @model_validator(mode="after")
    def _is_one(self) -> DemonstrationRow:
        single = (self.prompt is not None) + (self.response is not None)
        if single + 2 * (self.messages is not None) != 2:
            raise PydanticCustomError("keys", "a row with prompt and response, or with messages alone")
        if self.messages is not None:
            roles = [message["role"] for message in self.messages]
            if len(roles) < 2 or roles[-1] != "assistant" or roles[0] == "assistant":
                raise PydanticCustomError(
                    "roles", "a row whose messages begin with another role and end with the role 'assistant'"
                )
        return self


class PreferenceRow(DataRow):
    """Keys of a preference."""

    prompt: Prompt
    chosen: str
    rejected: str

    @model_validator(mode="after")
    def _differ(self) -> PreferenceRow:
        if self.chosen == self.rejected:
            raise PydanticCustomError("same", "a row whose chosen response is another than the rejected one")
        return self


ROW_MODELS: dict[RowsKind, type[PromptRow | DemonstrationRow | PreferenceRow]] = {
    "prompts": PromptRow,
    "demonstrations": DemonstrationRow,
    "preferences": PreferenceRow,
}


@dataclass(frozen=True)
class Row:
    """One validated row of a data file."""

    place: str
    """Location in the file, for messages: "train.jsonl, line 3"."""
    prompt: str | list[Message]
    """Prompt; for a conversation, its messages before the assistant's first one."""
    answer: str = ""
    """Answer for the reward: the row's string, or the JSON text of any other value."""
    responses: tuple[str, ...] = ()
    """Response of a demonstration, or chosen and rejected response of a preference."""
    later: Sequence[Message] = ()
    """Messages of a conversation from the assistant's first one."""
    images: tuple[Path, ...] = ()
    """Files of the prompt's images; relative paths begin at the data file's folder."""

    @property
    def messages(self) -> list[Message]:
        """Prompt as chat messages: plain text is one user message."""
        return [{"role": "user", "content": self.prompt}] if isinstance(self.prompt, str) else self.prompt


def read_rows(path: str | Path, kind: RowsKind = "prompts") -> list[Row]:
    """Return all rows of a JSONL or parquet file; blank lines of a JSONL file and unknown keys are ignored.

    Raises DataError if the file is missing, empty, of another format, or has malformed rows (lists up to ten).
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
    model = ROW_MODELS[kind]
    rows, problems = list[Row](), list[str]()
    for place, content in readers[path.suffix](path):
        if isinstance(content, bytes) and len(content) > MAX_LINE_BYTES:
            problems.append(f"{place}: the line has more than {MAX_LINE_BYTES} bytes; shorten it")
            continue
        try:
            validate = model.model_validate_json if isinstance(content, bytes) else model.model_validate
            found = validate(content)  # type: ignore[arg-type]
        except ValidationError as error:
            problems += [
                f"{place}: {_problem(fault, content, model)}" for fault in error.errors(include_url=False)
            ]
            continue
        rows.append(_row(place, found, tuple(path.parent / image for image in found.images)))
    raise_listed(problems)
    if not rows:
        raise DataError(f"data file {path} has no rows; write at least one with the keys {_keys(model)}")
    return rows


def _row(place: str, found: PromptRow | DemonstrationRow | PreferenceRow, images: tuple[Path, ...]) -> Row:
    if isinstance(found, PromptRow):
        answer = found.answer
        if not isinstance(answer, str):
            answer = json.dumps(answer, ensure_ascii=False, default=str)
        return Row(place, found.prompt, answer, images=images)
    if isinstance(found, PreferenceRow):
        return Row(place, found.prompt, responses=(found.chosen, found.rejected), images=images)
    if found.messages is None:
        assert found.prompt is not None and found.response is not None, "checked by the row's model"
        return Row(place, found.prompt, responses=(found.response,), images=images)
    first = next(place for place, one in enumerate(found.messages) if one["role"] == "assistant")
    return Row(place, found.messages[:first], later=found.messages[first:], images=images)


def _keys(model: type[BaseModel]) -> str:
    if model is DemonstrationRow:
        return "prompt and response, or messages"
    return ", ".join(name for name, field in model.model_fields.items() if field.is_required())


def raise_listed(problems: Sequence[str]) -> None:
    """Raise one DataError with the first problems and the number of the others, if there are any."""
    listed = list(problems[:MAX_LISTED_PROBLEMS])
    if len(problems) > MAX_LISTED_PROBLEMS:
        listed.append(f"and {len(problems) - MAX_LISTED_PROBLEMS} more malformed rows; correct them alike")
    raise_all(listed, DataError)


def _read_jsonl(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield location and text of each line; for a line that is too long, one byte more than the limit."""
    with path.open("rb") as file:
        number = 0
        if file.read(len(codecs.BOM_UTF8)) != codecs.BOM_UTF8:  # which editors on Windows write
            file.seek(0)
        while line := file.readline(MAX_LINE_BYTES + 1):
            rest, number = line, number + 1
            while len(rest) > MAX_LINE_BYTES and not rest.endswith(b"\n"):
                rest = file.readline(MAX_LINE_BYTES + 1)
            if line.strip():
                yield f"{path}, line {number}", line.removesuffix(b"\n")


def _read_parquet(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        records = pyarrow.parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        raise DataError(f"{path} is not a readable parquet file ({error}); write it again") from None
    for number, record in enumerate(records, start=1):
        yield f"{path}, row {number}", record


def _problem(fault: ErrorDetails, content: object, model: type[BaseModel]) -> str:
    """Return the message for one validation error of a row."""
    tags = ("text", "messages")  # of the prompt's two forms, after its own name
    name = ".".join(str(part) for place, part in enumerate(fault["loc"]) if not place or part not in tags)
    if isinstance(content, bytes) and fault["type"] == "json_invalid":
        text, reason = content.decode(errors="replace"), fault["msg"].removeprefix("Invalid JSON: ")
        return f"{shown(text)} is not JSON ({reason}); write one JSON object per line"
    if fault["type"] == "missing":
        if len(fault["loc"]) > 1:
            return f"{name} is missing; each message needs role and content"
        return f"{name} is missing; each row needs {_keys(model)}"
    other = " or a list of chat messages" if "text" in fault["loc"] else ""
    return (
        f"{name or 'the line'}={shown(fault['input'])} must be {rule(fault['msg'])}{other}; correct the row"
    )

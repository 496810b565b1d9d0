"""Types of single configuration values: ranges, byte sizes, parallel sizes, import paths."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
)

from hybridengine.errors import TopologyError
from hybridengine.redaction import is_secret, remember_secrets
from hybridengine.topology.sizes import GenSizes, Sizes, TrainSizes

BYTE_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
MAX_BYTES = 2**60
"""An exbibyte: far beyond any memory, and exact in 64 bits."""


class Section(BaseModel):
    """A section of the run configuration: typed, frozen, and without undeclared keys."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        validate_default=True,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        for name, field in cls.model_fields.items():
            if is_secret(name) and re.search(r"\b(str|Any)\b", str(field.annotation)):
                raise TypeError(
                    f"{cls.__name__}.{name} is a secret by its name; declare it as pydantic.SecretStr"
                )

    def model_post_init(self, _: Any) -> None:
        """Redact the secrets of the section from all later output of this process."""
        remember_secrets(self.__dict__)

    def __setstate__(self, state: dict[Any, Any]) -> None:
        super().__setstate__(state)
        self.model_post_init(None)


def _parse_bytes(value: Any) -> Any:
    """Return the number of bytes of an integer or of a text with a unit: "64MiB"."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?(B|KiB|MiB|GiB)", value.strip())
    if match is None:
        raise ValueError(
            f"{value!r} is not a size in bytes; write an integer or a unit such as 64MiB or 1.5GiB"
        )
    return int(min(float(match[1]) * BYTE_UNITS[match[2]], 2 * MAX_BYTES))  # float() may give infinity


def _parsed(sizes: type[Sizes]) -> PlainValidator:
    def parse(value: Any) -> Sizes:
        try:
            return value if isinstance(value, sizes) else sizes.parse(value)
        except TopologyError as error:
            raise ValueError(str(error)) from None

    return PlainValidator(parse)


def like(pattern: str, rule: str) -> AfterValidator:
    """Return a validator that matches a text, or every key of a mapping; `rule` follows the text in the message."""

    def check(value: Any) -> Any:
        for text in (value,) if isinstance(value, str) else value:
            if not re.fullmatch(pattern, text):
                raise ValueError(f"{text!r} {rule}")
        return value

    return AfterValidator(check)


IMPORT_PATH = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*"
"""Pattern of package.module:name."""

Count = Annotated[int, Field(ge=1)]
"""A positive integer."""
CountOrZero = Annotated[int, Field(ge=0)]
"""A non-negative integer."""
Positive = Annotated[float, Field(gt=0)]
"""A positive number."""
Seconds = Annotated[float, Field(gt=0, le=1e6)]
"""A time limit of up to 11 days: the operating system counts waits in 31 bits of milliseconds."""
NonNegative = Annotated[float, Field(ge=0)]
"""A non-negative number."""
Share = Annotated[float, Field(ge=0, le=1)]
"""A number from 0 to 1."""
AboveOne = Annotated[float, Field(gt=1)]
DecayRate = Annotated[float, Field(ge=0, lt=1)]
Smoothing = Annotated[float, Field(ge=0, lt=0.5)]
Temperature = Annotated[float, Field(ge=0.01, le=2)]
NumTerms = Annotated[int, Field(ge=3)]
Seed = Annotated[int, Field(ge=0, lt=2**31)]
Bytes = Annotated[int, BeforeValidator(_parse_bytes), Field(ge=1, le=MAX_BYTES)]
"""Number of bytes: an integer, or a text with a unit such as 64MiB."""
BucketBytes = Annotated[Bytes, Field(ge=4)]
"""Number of bytes of at least one float32."""
TrainSizesField = Annotated[TrainSizes, _parsed(TrainSizes), PlainSerializer(str)]
"""A text p-t-d, e.g. "2-2-1"."""
GenSizesField = Annotated[GenSizes, _parsed(GenSizes), PlainSerializer(str)]
"""A text p_g-t_g, e.g. "1-1"."""
NonEmpty = Annotated[str, Field(min_length=1)]
"""A text of at least one character."""
FolderName = Annotated[
    str,
    like(
        r"[A-Za-z0-9][A-Za-z0-9._-]{,199}",
        "cannot be the name of a folder; use up to 200 letters, digits, '.', '_' and '-', a letter or digit first",
    ),
]
"""A name that is safe as a folder name."""
ImportPath = Annotated[
    str, like(IMPORT_PATH, "is not a function's import path; write package.module:function")
]
"""package.module:function."""
PathText = Annotated[
    str, like(r"(?s).*\S.*", "is an empty path; name a file or folder, or leave the key out")
]
"""A path; relative paths start at the working directory of the command."""


def flat(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted key and the value of every entry of a nested mapping."""
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value

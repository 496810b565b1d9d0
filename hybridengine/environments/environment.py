"""What an environment is, and how one is made of its name."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from hybridengine.episodes.client import Client, Message, Result, Row
from hybridengine.errors import DataError, shown
from hybridengine.importing import import_object

CLASSES = {
    "reasoning_gym": "hybridengine.environments.reasoning_gym:ReasoningGym",
    "verifiers": "hybridengine.environments.verifiers:Verifiers",
    "gymnasium": "hybridengine.environments.gymnasium:Gymnasium",
}
REMEDIES = {
    "reasoning_gym": "install hybridengine[tasks]",
    "verifiers": "install verifiers into an environment of its own and name its Python in rollout.episode.python",
    "gymnasium": "install hybridengine[environments]",
}
"""Kind -> what to do if its package is missing."""

T = TypeVar("T")


@dataclass(frozen=True)
class Prompt:
    """A row that an environment writes."""

    prompt: str | list[Message]
    answer: Any
    """What `play` needs to find the problem again, as values of JSON."""
    key: str
    """Rows with the same key are the same problem."""


class Environment(Protocol):
    """One environment in a process; its episodes run at once."""

    def __init__(self, name: str, options: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        """Raise DataError for an unknown name and for settings that the kind does not have."""

    def prompts(self, seed: int, count: int) -> Iterator[Prompt]:
        """Yield up to `count` prompts; the same arguments give the same ones."""
        ...

    async def play(self, client: Client, row: Row, answer: Any) -> Result:
        """Run the episode of a prompt with this `answer`; its metrics may have more names than the run wants."""
        ...


def load_environment(name: str, options: Mapping[str, Any], settings: Mapping[str, Any]) -> Environment:
    """Return the environment KIND/NAME; raise DataError for one that cannot be used."""
    kind, _, rest = name.partition("/")
    try:
        return import_object(CLASSES[kind])(rest, options, settings)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing != kind:
            raise
        raise DataError(f"needs the package {kind}, which is not installed; {REMEDIES[kind]}") from None


def settings_of(kind: type[T], given: Mapping[str, Any]) -> T:
    """Return a kind's dataclass of settings; raise DataError for an unknown key, another type or a negative number."""
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for key, value in given.items():
        if key not in fields:
            raise DataError(f"has no setting {key!r}; {meant(key, fields)}")
        default = fields[key].default
        wanted = list if default is dataclasses.MISSING else type(default)
        fits = isinstance(value, int | float if wanted is float else wanted)
        if not fits or (isinstance(value, bool) and wanted is not bool):
            raise DataError(f"settings.{key}={shown(value)} must be of type {wanted.__name__}; correct it")
        if wanted in (int, float) and value < 0:
            raise DataError(f"settings.{key}={shown(value)} must be at least 0; correct it")
    return kind(**given)


def meant(name: str, names: Iterable[str]) -> str:
    """Return a hint at the nearest of some names, or at all of them."""
    known = sorted(names)
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"


def system_message(text: str) -> list[Message]:
    """Return instructions as the beginning of a conversation; nothing for no text."""
    return [{"role": "system", "content": text}] if text else []


def constructed(error: Exception) -> DataError:
    """Return the error of a constructor that refuses its options."""
    return DataError(
        f"refuses its options ({type(error).__name__}: {' '.join(str(error).split())}); correct them"
    )


def plain(value: Any) -> Any:
    """Return a value with Python's numbers and texts in place of NumPy's, also in collections."""
    import numpy as np  # which not all environments need

    if isinstance(value, Mapping):
        return {plain(key): plain(one) for key, one in value.items()}
    for kind in (list, tuple, set):
        if isinstance(value, kind):
            return kind(map(plain, value))
    return value.item() if isinstance(value, np.generic) else value

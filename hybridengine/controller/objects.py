"""Objects of Ray's object store: no wait is without an end, and an object that is lost has a place and a reason."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import ray
from ray import ObjectRef
from ray.exceptions import GetTimeoutError, ObjectStoreFullError, OutOfDiskError, RayError

from hybridengine.errors import StorageError
from hybridengine.runtime.row_reader import MissingObjectError


def put_object(value: Any) -> ObjectRef:
    """Return a reference to a copy of a value, which this process owns.

    Raises:
        StorageError: there is no room for it.
    """
    try:
        return ray.put(value)
    except (ObjectStoreFullError, OutOfDiskError) as error:
        text = " ".join(str(error).split())
        raise StorageError(
            f"Ray's object store has no room for rows ({type(error).__name__}: {text}); give Ray more of /dev/shm, or of"
            " the disk that it spills to, or let go of references to rows that nobody will read"
        ) from error


def get_objects(references: Sequence[ObjectRef], timeout_s: float) -> list[Any]:
    """Return the values behind references; large ones are shared memory, to be read only.

    Raises:
        MissingObjectError: an object is lost, or does not arrive in time.
    """
    try:
        return ray.get(list(references), timeout=timeout_s)
    except RayError as error:
        missing = list(_missing(references))
        # What is on its way, nobody has lost: it only has not arrived in no time.
        lost = [one for one in missing if not isinstance(one[1], GetTimeoutError)]
        late = missing if isinstance(error, GetTimeoutError) else []
        place, error = [*lost, *late, (0, error)][0]
        if isinstance(error, GetTimeoutError):
            raise MissingObjectError(place, f"it has not arrived after {timeout_s:g} s") from error
        text = " ".join(str(error).split())
        raise MissingObjectError(place, f"{type(error).__name__}: {text}") from error


def _missing(references: Sequence[ObjectRef]) -> Iterator[tuple[int, RayError]]:
    """Objects that are not there: (place, why)."""
    for place, reference in enumerate(references):
        try:
            ray.get(reference, timeout=0)
        except RayError as error:
            yield place, error

"""Objects that cannot be had: the one that is lost is named, not one that is only on its way."""

from __future__ import annotations

from typing import Any

import pytest
from ray.exceptions import GetTimeoutError, OwnerDiedError, RayError

from hybridengine.controller import objects
from hybridengine.runtime.row_reader import MissingObjectError

HERE, ON_ITS_WAY, LOST = "here", "on its way", "lost"


def error_of(kind: str) -> RayError:
    return OwnerDiedError("00ff", None, "") if kind == LOST else GetTimeoutError("not yet")


@pytest.mark.parametrize(
    ("asked", "first", "place", "reason"),
    [
        ([HERE, ON_ITS_WAY, LOST], LOST, 2, "OwnerDiedError: "),
        ([HERE, ON_ITS_WAY, HERE], ON_ITS_WAY, 1, "it has not arrived after 3 s"),
        ([ON_ITS_WAY, LOST], ON_ITS_WAY, 1, "OwnerDiedError: "),
    ],
)
def test_the_object_that_is_lost_is_named(
    asked: list[str], first: str, place: int, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def get(wanted: Any, timeout: float) -> Any:
        if isinstance(wanted, list):
            raise error_of(first)
        if wanted != HERE:
            raise error_of(wanted)

    monkeypatch.setattr(objects.ray, "get", get)
    with pytest.raises(MissingObjectError) as caught:
        objects.get_objects(asked, timeout_s=3)  # type: ignore[arg-type]
    assert caught.value.place == place
    assert caught.value.reason.startswith(reason)

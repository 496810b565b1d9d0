"""Errors of ranks that may pass once these are started again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from ray.exceptions import RayError

from hybridengine.controller.failures import failure_signature, is_passing, is_unforeseen
from hybridengine.errors import RanksLostError, WorkerError

P = ParamSpec("P")
T = TypeVar("T")


def tells_of_loss(method: Callable[P, T]) -> Callable[P, T]:
    """Return a method that raises RanksLostError in place of errors that may pass once the ranks are started again."""

    @functools.wraps(method)
    def telling(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return method(*args, **kwargs)
        except (WorkerError, RayError) as error:
            if not is_passing(error):
                raise
            raise RanksLostError(str(error), failure_signature(error), is_unforeseen(error)) from error

    return telling

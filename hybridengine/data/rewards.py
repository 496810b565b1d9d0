"""Reward functions by import path."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

from hybridengine.errors import ConfigError, DataError
from hybridengine.importing import import_object

RewardFunction = Callable[[list[str], list[str]], Sequence[float]]
"""(responses, answers) -> one score each."""


def load_reward_function(path: str) -> RewardFunction:
    """The function at "package.module:function".

    Raises:
        DataError: there is no such module or function.
    """
    try:
        function = import_object(path)
    except ConfigError as error:
        raise DataError(f"reward.function: {error}") from None
    if not callable(function):
        raise DataError(f"reward.function={path} is a {type(function).__name__}; name a function")
    return cast(RewardFunction, function)

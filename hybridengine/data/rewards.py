"""Reward functions by import path."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import cast

from hybridengine.errors import DataError

RewardFunction = Callable[[list[str], list[str]], Sequence[float]]
"""(responses, answers) -> one score each."""


def load_reward_function(path: str) -> RewardFunction:
    """The function at "package.module:function".

    Raises:
        DataError: there is no such module or function.
    """
    module, _, name = path.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise DataError(
            f"reward.function={path} cannot be imported ({error}); write package.module:function"
        ) from None
    if not callable(function):
        raise DataError(f"reward.function={path} is a {type(function).__name__}; name a function")
    return cast(RewardFunction, function)

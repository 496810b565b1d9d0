"""The function that a configuration names as its dataflow."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from hybridengine.config.algorithm_sections import AlgorithmSection
from hybridengine.drivers.roles import Roles, Sampling, State
from hybridengine.errors import ConfigError
from hybridengine.importing import import_module

Step = Callable[[Roles, Sampling, AlgorithmSection, State], dict[str, float]]
"""One iteration: samples, scores, updates; returns its metrics."""
SIGNATURE = "step(roles, sampling, settings, state)"


def load_step(settings: AlgorithmSection) -> Step:
    """`step` of the dataflow's module.

    Raises:
        ConfigError: there is no such module, or it has no such function.
    """
    asked = f"algorithm.name={settings.name}"
    try:
        module = import_module(settings.driver)
    except Exception as error:
        raise ConfigError(
            f"{asked} cannot be imported ({type(error).__name__}: {error}); name a module that is installed, or lies"
            " where the command is run"
        ) from error
    step: Any = getattr(module, "step", None)
    if not callable(step):
        raise ConfigError(
            f"{asked} has no function step; write {SIGNATURE}, which returns the iteration's metrics"
        )
    try:
        inspect.signature(step).bind("roles", "sampling", "settings", "state")
    except TypeError as error:
        raise ConfigError(
            f"{asked}: step{inspect.signature(step)} must be callable as {SIGNATURE} ({error}); change its parameters"
        ) from None
    return module.step

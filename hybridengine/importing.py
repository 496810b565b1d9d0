"""Imports of objects by path, and imports without garbage collection."""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import signal
import traceback
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from hybridengine.errors import ConfigError


def import_object(path: str) -> Any:
    """Return the object at "package.module.Name" or "package.module:name"; raise ConfigError if there is none."""
    module, _, name = path.replace(":", ".").rpartition(".")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"{path!r} cannot be imported ({error}); write it as package.module.Name, of a module that is installed"
            " or in the folder where the command is run"
        ) from error


def import_module(name: str) -> ModuleType:
    """Import a module of the user's; raise ImportError if it calls `sys.exit`, as a script without a guard does."""
    try:
        return importlib.import_module(name)
    except SystemExit as end:
        if end.code == 128 + signal.SIGTERM:  # this process has received SIGTERM
            raise
        place = traceback.extract_tb(end.__traceback__)[-1]
        raise ImportError(
            f"{name} calls sys.exit({end.code!r}) while it is imported; put that beneath `if __name__ == '__main__'`"
            f" ({place.filename}, line {place.lineno})"
        ) from end


@contextlib.contextmanager
def nothing_collected() -> Iterator[None]:
    """Disable garbage collection during imports, then freeze the objects that exist (`gc.freeze`): scans of the million
    long-lived objects of torch, Megatron-core and vLLM take a third of the CPU time of an actor's start."""
    atexit.register(gc.unfreeze)  # some modules report leaked objects at exit
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()

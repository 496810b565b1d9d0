"""Objects by import path, and imports that leave the garbage collector alone."""

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
    """Return the object at "package.module.Name", or at "package.module:name".

    Raises:
        ConfigError: there is no such module or name.
    """
    module, _, name = path.replace(":", ".").rpartition(".")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"{path!r} cannot be imported ({error}); write it as package.module.Name"
        ) from error


def import_module(name: str) -> ModuleType:
    """Import a module that anybody may have written.

    Raises:
        ImportError: it ends the process (`sys.exit`), which a program at the end of its file does.
        Exception: whatever it raises.
    """
    try:
        return importlib.import_module(name)
    except SystemExit as end:
        if end.code == 128 + signal.SIGTERM:  # somebody has ended this process meanwhile
            raise
        place = traceback.extract_tb(end.__traceback__)[-1]
        raise ImportError(
            f"{name} calls sys.exit({end.code!r}) while it is imported; put that beneath `if __name__ == '__main__'`"
            f" ({place.filename}, line {place.lineno})"
        ) from end


@contextlib.contextmanager
def nothing_collected() -> Iterator[None]:
    """Keep the garbage collector from searching during imports, and later among the objects that exist by then.

    torch, Megatron-core and vLLM create a million objects that stay. Python searches them again and again while
    they grow, and vLLM five times as it starts: a third of the CPU time in which an actor starts.
    """
    atexit.register(gc.unfreeze)  # modules count what they leave behind, and say so
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()

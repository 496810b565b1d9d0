"""Attributes of other modules, replaced for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute of a module or class while the context is open."""
    kept = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, kept)


@contextmanager
def all_replaced(*replacements: tuple[Any, str, Any]) -> Iterator[None]:
    """Set several attributes, each given as (owner, name, value), while the context is open."""
    with ExitStack() as stack:
        for one in replacements:
            stack.enter_context(replaced(*one))
        yield

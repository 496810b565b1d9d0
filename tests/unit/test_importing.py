"""Imports that do not disturb the garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from hybridengine.importing import nothing_collected


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    """Restore the collector's state after the test."""
    yield
    gc.unfreeze()
    gc.enable()


def test_what_is_imported_is_left_out_of_later_searches():
    found: list[object] = []
    gc.callbacks.append(lambda phase, info: found.append(phase))
    try:
        with nothing_collected():
            kept = [[] for _ in range(10_000)]
        assert not found
    finally:
        gc.callbacks.pop()
    assert gc.isenabled()
    assert gc.get_freeze_count() >= len(kept)


def test_an_import_that_fails_leaves_the_collector_on():
    with pytest.raises(ImportError), nothing_collected():
        raise ImportError
    assert gc.isenabled()

"""What the controller knows of the rows of all pools: their keys, and the bytes that have moved."""

from __future__ import annotations

import itertools
import secrets
from collections import Counter
from functools import cache

from hybridengine.runtime.row_reader import RowReader

READ_TIMEOUT_S = 300.0
"""Longest that a rank may take to hand rows to the controller."""


class RowExchange:
    """One per controller, for all its pools: rows go from ranks of any to ranks of any."""

    def __init__(self) -> None:
        self.secret = secrets.token_bytes(32)
        """What processes on other machines must know to be given rows."""
        self.payload_bytes = 0
        """Bytes of rows that have passed through the controller, sent or fetched."""
        self.transferred: Counter[tuple[str, str]] = Counter()
        """(producing call, consuming call) -> bytes that have gone from rank to rank."""
        self._keys = itertools.count()
        self.reader = RowReader(self.secret, READ_TIMEOUT_S)
        """For rows that the controller itself wants."""

    def next_key(self) -> int:
        """A key for the rows of one call, the same on all ranks."""
        return next(self._keys)


@cache
def row_exchange() -> RowExchange:
    """This process's."""
    return RowExchange()

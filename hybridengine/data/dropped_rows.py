"""Warnings of rows that are dropped: a batch may have hundreds, for one reason."""

from __future__ import annotations

import logging

MOST_NAMED = 8
"""Dropped rows of a call that are named in the log, whatever their kind; metrics count all."""

_logger = logging.getLogger(__name__)


class DroppedRows:
    """Warnings of the dropped rows of one call, one line each: the first `MOST_NAMED`, and the first of each kind.

    Args:
        counted_as: metric that counts all of them.
    """

    def __init__(self, counted_as: str) -> None:
        self._counted_as, self._number = counted_as, 0
        self._kinds = set[str]()

    def warn(self, text: str, kind: str = "") -> None:
        """Log why a row is dropped, unless enough are named and one of its kind is among them."""
        self._number += 1
        if self._number <= MOST_NAMED or kind not in self._kinds:
            last = f"; further ones are only counted ({self._counted_as})"
            _logger.warning("%s%s", text, last if self._number == MOST_NAMED else "")
        self._kinds.add(kind)

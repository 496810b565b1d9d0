"""Warnings of rows that are dropped: a batch may have hundreds, for one reason."""

from __future__ import annotations

import logging

MOST_NAMED = 8
"""Dropped rows of a call that are named in the log; metrics count all."""

_logger = logging.getLogger(__name__)


class DroppedRows:
    """Warnings of the dropped rows of one call, one line each, up to `MOST_NAMED`.

    Args:
        counted_as: metric that counts all of them.
    """

    def __init__(self, counted_as: str) -> None:
        self._counted_as, self._number = counted_as, 0

    def warn(self, text: str) -> None:
        """Log why a row is dropped, unless enough are named."""
        self._number += 1
        if self._number <= MOST_NAMED:
            last = f"; further ones are only counted ({self._counted_as})"
            _logger.warning("%s%s", text, last if self._number == MOST_NAMED else "")

"""A lock whose threads take turns."""

from __future__ import annotations

import threading
from types import TracebackType


class FairLock:
    """A lock that threads get in the order in which they ask for it, unlike `threading.Lock`; a context manager."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._asked, self._served = 0, 0

    def __enter__(self) -> None:
        with self._changed:
            number, self._asked = self._asked, self._asked + 1
            self._changed.wait_for(lambda: self._served == number)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._served += 1
            self._changed.notify_all()

"""Results of requests: stored, and announced to those who wait for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future

from hybridengine.errors import HybridEngineError, RequestError
from hybridengine.serving.store import DONE, FAILED, QUEUED, Request, Store


class Results:
    """Ends of requests; any thread may call its methods."""

    def __init__(self, store: Store) -> None:
        self._store = store
        # held from a look at a request's state until its future is there, so that no announcement falls between
        self._lock = threading.Lock()
        self._futures: dict[str, Future[None]] = {}
        self.given_up = False
        """True if no more results are stored."""
        self._releases = False

    def done(self, request_id: str) -> Future[None]:
        """Return a future that completes when the request is done, has failed, or is released.

        Raises RequestError if the request is unknown.
        """
        with self._lock:
            if self._store.get(Request, request_id).state == QUEUED and not self._releases:
                return self._futures.setdefault(request_id, Future())
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def finish(self, results: Mapping[str, bytes | Exception]) -> None:
        """Store results and errors in one transaction, and announce them; do nothing once they are given up."""
        if self.given_up:
            return
        with self._store.transaction() as transaction:
            for request_id, result in results.items():
                record(transaction.get_one(Request, request_id), result)
        self.announce(results)

    def give_up(self) -> None:
        """Complete all futures: no more results will come, and none is stored."""
        self.given_up = True
        self.release()

    def release(self) -> None:
        """Complete all futures from now on, also those of requests that wait: the server ends."""
        with self._lock:
            self._releases = True
        self.announce([*self._futures])

    def announce(self, request_ids: Iterable[str]) -> None:
        """Complete the futures of requests whose results are stored."""
        for request_id in request_ids:
            with self._lock:
                future = self._futures.pop(request_id, None)
            if future is not None:
                future.set_result(None)


def record(request: Request, result: bytes | Exception) -> None:
    """Set the columns of a request that has ended with `result`."""
    request.done_s = time.time()
    if isinstance(result, bytes):
        request.state, request.result = DONE, result
        return
    request.state = FAILED
    request.category = "user" if isinstance(result, RequestError) else "server"
    ours = isinstance(result, HybridEngineError)
    request.error = str(result) if ours else f"{type(result).__name__}: {result}"

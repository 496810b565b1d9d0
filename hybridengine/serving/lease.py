"""A lease on a database, so that one server at a time uses it."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator

import psutil
from sqlalchemy import delete, update
from sqlalchemy.exc import IntegrityError, SQLAlchemyError

from hybridengine.errors import ConfigError, HybridEngineError
from hybridengine.serving.store import Lease, Store

logger = logging.getLogger(__name__)

LEASE_S = 60.0
"""Age of the last renewal at which a lease ends, unless its process is known to be gone."""
RENEWAL_S = 10.0


@contextlib.contextmanager
def leased(store: Store, at_loss: Callable[[HybridEngineError], object]) -> Iterator[None]:
    """Hold the lease on a database, and renew it; call `at_loss` if another server has taken it nevertheless.

    Raises ConfigError if another server holds it.
    """
    holder = uuid.uuid4().hex
    _take(store, holder)
    ended = threading.Event()

    def renew() -> None:
        while not ended.wait(RENEWAL_S):
            try:
                held = _renewed(store, holder)
            except SQLAlchemyError as error:  # a database that is away for a moment
                logger.warning("the lease on serve.database could not be renewed: %s", error)
                continue
            if not held:
                at_loss(HybridEngineError(_refusal(store.find(Lease, Lease.KEY))))
                return

    thread = threading.Thread(target=renew, name="lease", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        with store.transaction() as transaction:
            transaction.execute(delete(Lease).where(Lease.holder == holder))


def _take(store: Store, holder: str) -> None:
    own = Lease(
        key=Lease.KEY, holder=holder, host=socket.gethostname(), pid=os.getpid(), renewed_s=time.time()
    )
    found = store.find(Lease, Lease.KEY)
    try:
        with store.transaction() as transaction:
            if found is not None:
                if not _is_over(found):
                    raise ConfigError(_refusal(found))
                # a server that has taken it meanwhile is another holder
                transaction.execute(delete(Lease).where(Lease.holder == found.holder))
            transaction.add(own)
    except IntegrityError:
        raise ConfigError(_refusal(store.find(Lease, Lease.KEY))) from None


def _renewed(store: Store, holder: str) -> bool:
    """Renew the lease; return False if it is no longer there."""
    with store.transaction() as transaction:
        renewal = update(Lease).where(Lease.holder == holder).values(renewed_s=time.time())
        return transaction.execute(renewal.returning(Lease.key)).first() is not None


def _is_over(lease: Lease) -> bool:
    here = lease.host == socket.gethostname()
    # a process id of this process was that of an earlier one, as in a container that starts again
    gone = here and (lease.pid == os.getpid() or not _is_alive(lease.pid))
    return gone or time.time() - lease.renewed_s >= LEASE_S


def _is_alive(pid: int) -> bool:
    """Return whether a process exists and has not ended; its parent may not have asked for its status."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _refusal(lease: Lease | None) -> str:
    holder = "another server"
    if lease is not None:
        age_s = time.time() - lease.renewed_s
        holder = (
            f"a server (process {lease.pid} on {lease.host}, which gave a sign of life {age_s:.0f} s ago)"
        )
    return (
        f"serve.database is used by {holder}, and a database is for one server at a time; stop that server, or choose"
        f" another database; if that server is gone, wait until its last sign is {LEASE_S:.0f} s old"
    )

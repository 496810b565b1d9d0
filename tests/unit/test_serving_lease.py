"""The lease of a server on its database."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from hybridengine.errors import ConfigError
from hybridengine.serving import lease
from hybridengine.serving.lease import leased
from hybridengine.serving.store import Lease, Store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(f"sqlite:///{tmp_path}/server.db")
    yield store
    store.close()


def ignore(_: object) -> None:
    """Do nothing."""


def left_by(store: Store, host: str, pid: int, age_s: float) -> None:
    store.add(Lease(key=Lease.KEY, holder="another", host=host, pid=pid, renewed_s=time.time() - age_s))


def test_a_second_server_is_refused_until_the_first_has_ended(store: Store) -> None:
    parent = os.getppid()
    with leased(store, ignore):
        found = store.get(Lease, Lease.KEY)
        assert (found.host, found.pid) == (socket.gethostname(), os.getpid())
        store.update(Lease, Lease.KEY, pid=parent)  # as if another process held it
        with (
            pytest.raises(
                ConfigError, match=rf"is used by a server \(process {parent} on .* a sign of life 0 s ago"
            ),
            leased(store, ignore),
        ):
            pass
    assert store.find(Lease, Lease.KEY) is None
    with leased(store, ignore):
        pass


@pytest.mark.parametrize("reaped", [True, False])
def test_the_lease_of_a_process_that_is_gone_is_free_at_once(store: Store, reaped: bool) -> None:
    """Also if its parent has not asked for its status, as the first process of a container may never do."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    if reaped:
        gone.wait()
    while not reaped and psutil.Process(gone.pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    left_by(store, socket.gethostname(), gone.pid, age_s=0)
    with leased(store, ignore):
        assert store.get(Lease, Lease.KEY).pid == os.getpid()


def test_the_lease_of_another_host_ends_with_its_last_renewal(store: Store) -> None:
    left_by(store, "elsewhere", 1, age_s=lease.LEASE_S - 5)
    with pytest.raises(ConfigError, match="process 1 on elsewhere"), leased(store, ignore):
        pass
    store.update(Lease, Lease.KEY, renewed_s=time.time() - lease.LEASE_S)
    with leased(store, ignore):
        assert store.get(Lease, Lease.KEY).host == socket.gethostname()


def test_a_lease_is_renewed_and_its_loss_is_told(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "RENEWAL_S", 0.02)
    told, errors = threading.Event(), list[Exception]()
    with leased(store, lambda error: (errors.append(error), told.set())):
        store.update(Lease, Lease.KEY, renewed_s=0.0)
        time.sleep(0.3)
        assert store.get(Lease, Lease.KEY).renewed_s > time.time() - 10
        assert not told.is_set()
        store.update(Lease, Lease.KEY, holder="another", host="elsewhere", pid=7)
        assert told.wait(10)
        assert "process 7 on elsewhere" in str(errors[0])
    assert store.get(Lease, Lease.KEY).holder == "another"

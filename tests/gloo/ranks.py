"""Start gloo ranks from a warm forkserver, run a function on each, and return the results."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Sequence
from multiprocessing import connection, forkserver, util
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from hybridengine.backends.vllm.environment import ON_CPU
from hybridengine.weights import failure_notes
from tests.warm_workers import spawn_warm

ROOT = Path(__file__).parents[2]

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
}
"""Environment variables of the forkserver, and so of every rank, in addition to this process's own."""

GRACE_S = failure_notes.GRACE_S + 5.0
"""Seconds that the other ranks may continue after the first failure."""


class RankError(Exception):
    """A rank raised, died, or did not end in time."""


class RankLauncher:
    """Runs module-level functions on fresh ranks, each a fork of a process that has already imported everything."""

    def __init__(self, preload: Sequence[str] = ("tests.preload",)) -> None:
        """Start the forkserver with what vLLM has to find in the environment, from the warm process if there is one.

        Args:
            preload: modules that the forkserver imports for all ranks.
        """
        self._context: Any = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(preload))
        spawn = spawn_warm if "WARM_WORKERS" in os.environ else util.spawnv_passfds
        with (
            mock.patch.dict(os.environ, ON_CPU | ENVIRONMENT),
            mock.patch.object(util, "spawnv_passfds", spawn),
        ):
            forkserver.ensure_running()

    def __call__(
        self,
        world_size: int,
        function: Callable[..., Any],
        *args: Any,
        timeout_s: float = 240.0,
        may_die: Collection[int] = (),
        backend: str = "gloo",
    ) -> list[Any]:
        """Return the result of `function(rank, *args)` of every rank, in rank order.

        The ranks are a world over `backend`; each has one thread. Tensors come back by value.

        Args:
            may_die: ranks that may end without an answer; their result is None.

        Raises:
            RankError: a rank raised (its traceback is in the message), died, or has not ended after `timeout_s`.
        """
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        payload = pickle.dumps((function, args))
        connections, processes = {}, []
        try:
            for rank in range(world_size):
                own, theirs = self._context.Pipe()
                process = self._context.Process(
                    target=_run_rank,
                    args=(theirs, rank, world_size, store.port, backend, payload),
                    daemon=True,
                )
                process.start()
                theirs.close()
                connections[rank] = own
                processes.append(process)
            return _Answers(connections, processes, time.monotonic() + timeout_s, may_die).collect()
        finally:
            for own in connections.values():
                own.close()  # a rank exits when its connection closes
            _end(processes)


class _Answers:
    """Waits for one answer from each rank."""

    def __init__(
        self,
        connections: dict[int, connection.Connection],
        processes: list[BaseProcess],
        deadline: float,
        may_die: Collection[int],
    ) -> None:
        self._connections, self._processes, self._deadline = dict(connections), processes, deadline
        self._may_die = may_die
        self._values: dict[int, Any] = {}
        self._errors: dict[int, str] = {}

    def collect(self) -> list[Any]:
        world_size = len(self._connections)
        while self._connections:
            left_s = self._deadline - time.monotonic()
            ready = connection.wait(list(self._connections.values()), timeout=max(0.0, left_s))
            if not ready:
                break
            for rank in [rank for rank, own in self._connections.items() if own in ready]:
                self._take(rank)
        if self._errors or self._connections:
            raise RankError(self._message())
        return [self._values[rank] for rank in range(world_size)]

    def _take(self, rank: int) -> None:
        try:
            kind, content = pickle.loads(self._connections[rank].recv_bytes())
        except (EOFError, ConnectionError):
            self._processes[rank].join(GRACE_S)
            kind, content = "error", f"the process ended with exit code {self._processes[rank].exitcode}\n"
            if rank in self._may_die:
                kind, content = "value", None
        del self._connections[rank]
        if kind == "value":
            self._values[rank] = content
            return
        self._errors[rank] = str(content)
        self._deadline = min(self._deadline, time.monotonic() + GRACE_S)

    def _message(self) -> str:
        """Return the first error in full (others mostly follow from it) and the last line of each other one."""
        parts = []
        for rank, text in self._errors.items():
            parts.append(
                f"rank {rank}:\n{text}" if not parts else f"rank {rank}: {text.strip().splitlines()[-1]}"
            )
        if self._connections:
            parts.append(f"ranks {list(self._connections)} have not ended in time and were killed")
        return "\n".join(parts)


def _run_rank(
    own: connection.Connection, rank: int, world_size: int, port: int, backend: str, payload: bytes
) -> None:
    try:
        faulthandler.enable()
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
        function, args = pickle.loads(payload)
        answer, stays = pickle.dumps(("value", function(rank, *args))), True
    except BaseException:
        answer, stays = pickle.dumps(("error", traceback.format_exc())), False
    with contextlib.suppress(OSError, EOFError):
        own.send_bytes(answer)
        if stays:
            own.recv_bytes()  # until the last rank has answered: others may still communicate with this one
    os._exit(0)


def _end(processes: list[BaseProcess]) -> None:
    deadline = time.monotonic() + 1.0
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()

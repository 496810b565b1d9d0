"""Starts the ranks of a benchmark, shows their progress, and ends them whatever happens. Imports no torch."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing import connection, forkserver
from multiprocessing.process import BaseProcess
from typing import Any

from hybridengine.bench.results import PairResult
from hybridengine.bench.spec import BenchSpec, LayoutPair
from hybridengine.errors import ConfigError, HybridEngineError, WorkerError, WorkerTimeoutError
from hybridengine.temporary import temporary_folder

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}
"""Environment of the ranks, on top of this process's own. The last lets the forkserver ask for GPUs and fork."""

PRELOADED = "hybridengine.bench.rank_process"

GRACE_S = 3.0
"""How long the other ranks may still speak after the first has failed."""


class RankStarter:
    """Measures pairs of layouts, each on ranks of its own: forks of a process that has loaded torch and Megatron.

    Args:
        main_module: module of the command line, which every rank loads again because multiprocessing has it do so.
    """

    def __init__(self, main_module: str) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([PRELOADED, main_module])
        with _environment(ENVIRONMENT):
            try:
                forkserver.ensure_running()
            except OSError as error:
                raise ConfigError(
                    f"no sockets can be made in the temporary folder {tempfile.gettempdir()} ({error}); set TMPDIR to a"
                    " folder with a short name that can be written to"
                ) from error

    def measure(self, spec: BenchSpec, pair: LayoutPair, say: Callable[[str], None]) -> PairResult:
        """What the ranks of one pair have measured.

        Raises:
            HybridEngineError: of the rank that failed first; WorkerError where a rank died, WorkerTimeoutError where
                nothing was heard for as long as any wait may take.
        """
        with temporary_folder("bench") as folder:
            ranks = _Ranks(spec, say)
            try:
                for rank in range(pair.train.num_ranks):
                    ranks.start(self._context, spec, pair, rank, str(folder / "store"))
                return ranks.result()
            finally:
                ranks.end()


class _Ranks:
    """The processes of one world."""

    def __init__(self, spec: BenchSpec, say: Callable[[str], None]) -> None:
        self._silence_s, self._say = spec.timeout_s + 60.0, say
        self._processes: list[BaseProcess] = []
        self._channels: dict[int, connection.Connection] = {}
        self._failures: list[HybridEngineError] = []
        self._value: PairResult | None = None

    def start(self, context: Any, spec: BenchSpec, pair: LayoutPair, rank: int, store: str) -> None:
        own, theirs = context.Pipe()
        process = context.Process(target=_run_rank, args=(theirs, spec, pair, rank, store), daemon=True)
        process.start()
        theirs.close()
        self._processes.append(process)
        self._channels[rank] = own

    def result(self) -> PairResult:
        """Wait for the answers of all ranks."""
        waiting = set(self._channels)
        deadline = time.monotonic() + self._silence_s
        while waiting:
            by_channel = {self._channels[rank]: rank for rank in waiting}
            ready = connection.wait(list(by_channel), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for channel in ready:
                rank = by_channel[channel]  # type: ignore[index]
                if self._take(rank):
                    waiting.discard(rank)
            deadline = time.monotonic() + (GRACE_S if self._failures else self._silence_s)
        if self._failures:
            raise self._failures[0]
        if waiting or self._value is None:
            raise WorkerTimeoutError(
                f"ranks {sorted(waiting)} have said nothing for {self._silence_s:.0f} s; raise --timeout if the model"
                " is that large, else look for a rank that waits for memory"
            )
        return self._value

    def _take(self, rank: int) -> bool:
        """Take one message; True where it was the rank's last."""
        try:
            kind, content = self._channels[rank].recv()
        except (EOFError, OSError):
            process = self._processes[rank]
            process.join(GRACE_S)
            remedy = (
                "it was killed, most likely for lack of memory: choose a smaller model or fewer ranks"
                if process.exitcode == -signal.SIGKILL
                else "look for what it has printed above"
            )
            died = WorkerError(f"rank {rank} died with exit code {process.exitcode}; {remedy}")
            self._failures.insert(0, died)  # what the others report follows from it
            return True
        if kind == "say":
            self._say(content)
            return False
        if kind == "error":
            self._failures.append(content)
        elif rank == 0:
            self._value = content
        return True

    def end(self) -> None:
        """Leave no process behind."""
        for channel in self._channels.values():
            channel.close()  # a rank ends when its channel closes
        deadline = time.monotonic() + 1.0
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()


def _run_rank(*arguments: Any) -> None:
    from hybridengine.bench.rank_process import run_rank  # torch: in the rank only

    run_rank(*arguments)


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value

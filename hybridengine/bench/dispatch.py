"""What it takes to hand rows from one worker group to another: straight from rank to rank, and through the controller."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from hybridengine.errors import ConfigError, TopologyError, TransferError, raise_all
from hybridengine.metrics.formatting import format_bytes
from hybridengine.topology.sizes import TrainSizes

NUM_TOKENS = 1024
"""Of a row."""
ROW_BYTES = 8 * NUM_TOKENS
MAX_REPETITIONS = 1_000
PROCESS_BYTES = 450 * 2**20
"""What a rank's process takes by itself, roughly."""


@dataclass(frozen=True)
class DispatchSpec:
    """One measurement.

    Raises:
        ConfigError, TopologyError: values that cannot be.
    """

    producer: TrainSizes
    consumer: TrainSizes
    batch_bytes: int
    repetitions: int
    num_empty_calls: int
    timeout_s: float

    def __post_init__(self) -> None:
        raise_all(self._problems())
        if self.producer.num_ranks != self.consumer.num_ranks:
            raise TopologyError(
                f"{self.producer} has {self.producer.num_ranks} ranks and {self.consumer} has"
                f" {self.consumer.num_ranks}; both groups share one pool, choose sizes with equal products"
            )

    @property
    def num_rows(self) -> int:
        return self.batch_bytes // ROW_BYTES

    @property
    def needed_bytes(self) -> int:
        """Bytes that all processes take together at the worst moment, roughly.

        The rows of the producers in Ray's object store, those of every consumer (its data-parallel part on all its
        ranks), twice while they come through the controller: in an object and as a tensor; there the whole, and its
        parts in the object store.
        """
        consumed = self.batch_bytes * self.consumer.model_parallel_size
        return 3 * self.batch_bytes + 2 * consumed + self.producer.num_ranks * PROCESS_BYTES

    def check_memory(self, available: int | None) -> None:
        """Check that this machine can hold the batch as often as it is there at once.

        Args:
            available: bytes; None is enough for anything.

        Raises:
            ConfigError: it cannot.
        """
        if available is not None and self.needed_bytes > available:
            raise ConfigError(
                f"--bytes {self.batch_bytes}: a batch of {format_bytes(self.batch_bytes)} for {self.consumer} takes about"
                f" {format_bytes(self.needed_bytes)}, this machine has {format_bytes(available)} available; choose a"
                " smaller batch or more data-parallel replicas"
            )

    def _problems(self) -> Iterable[str]:
        replicas = max(self.producer.dp_size, self.consumer.dp_size)
        if self.num_rows < replicas:
            yield (
                f"--bytes {self.batch_bytes} is less than a row of {ROW_BYTES} bytes for each of {replicas} replicas;"
                f" choose at least {replicas * ROW_BYTES}"
            )
        for option, value, limit in (
            ("--repetitions", self.repetitions, MAX_REPETITIONS),
            ("--empty-calls", self.num_empty_calls, 100 * MAX_REPETITIONS),
        ):
            if not 1 <= value <= limit:
                yield f"{option} {value} is out of range; choose 1 to {limit}"
        if not 1 <= self.timeout_s <= 86400:
            yield f"--timeout {self.timeout_s:g} is out of range; choose 1 to 86400 seconds"


@dataclass(frozen=True)
class DispatchResult:
    """Seconds of the counted repetitions, in order."""

    direct_s: tuple[float, ...]
    through_controller_s: tuple[float, ...]
    empty_call_s: tuple[float, ...]
    controller_payload_bytes: int
    """Bytes of rows that passed through the controller in all direct repetitions."""
    through_payload_bytes: int
    """The same in one repetition through the controller."""
    received_bytes: int
    """Bytes that came from other processes in one direct repetition, all ranks together."""

    def as_dict(self, spec: DispatchSpec) -> dict[str, Any]:
        """Figures for programs. Units: seconds (medians, and all samples) and bytes."""
        return {
            "from": str(spec.producer),
            "to": str(spec.consumer),
            "num_rows": spec.num_rows,
            "batch_bytes": spec.num_rows * ROW_BYTES,
            "repetitions": spec.repetitions,
            "seconds_direct": statistics.median(self.direct_s),
            "seconds_through_controller": statistics.median(self.through_controller_s),
            "advantage": self.advantage,
            "controller_payload_bytes": self.controller_payload_bytes,
            "through_controller_payload_bytes": self.through_payload_bytes,
            "received_bytes": self.received_bytes,
            "empty_call_s": statistics.median(self.empty_call_s),
            "samples_direct_s": self.direct_s,
            "samples_through_controller_s": self.through_controller_s,
        }

    @property
    def advantage(self) -> float:
        """Seconds through the controller over those of the direct way, medians."""
        return statistics.median(self.through_controller_s) / statistics.median(self.direct_s)


def measure_dispatch(spec: DispatchSpec, say: Callable[[str], None]) -> DispatchResult:
    """Hand the same rows over both ways in turn; a first repetition, which is not counted, is checked.

    Raises:
        TransferError: rows arrived wrong.
        HybridEngineError: a rank failed or did not answer in time.
    """
    from hybridengine.backends.vllm import environment
    from hybridengine.controller.calls import call_log
    from hybridengine.controller.pool import ResourcePool
    from hybridengine.controller.rows import Rows
    from hybridengine.controller.worker_group import WorkerGroup

    workers = "hybridengine.bench.dispatch_workers"
    log = call_log()
    env = environment.ON_CPU  # as in a run
    with ResourcePool([spec.producer.num_ranks], env=env, timeout_s=spec.timeout_s) as pool:
        say(f"starting {spec.producer.num_ranks} ranks")
        producer = WorkerGroup(pool, f"{workers}.MakeRowsWorker", parallel=spec.producer)
        consumer = WorkerGroup(pool, f"{workers}.TakeRowsWorker", parallel=spec.consumer)
        say(f"making {spec.num_rows} rows of {ROW_BYTES} bytes on {spec.producer}")
        rows = producer.make_rows(Rows.numbered(spec.num_rows), NUM_TOKENS).wait()

        def direct(checks: bool = False) -> bool:
            return all(consumer.take_rows(rows, checks).get())

        def through(checks: bool = False) -> bool:
            return all(consumer.take_rows(rows.get(), checks).get())

        say(f"handing them to {spec.consumer} both ways, {1 + spec.repetitions} times; the first is checked")
        log.take_records()
        if not direct(checks=True):
            raise TransferError("rows arrived wrong from rank to rank; look for faulty memory or network")
        pool.wait()
        received = sum(sum(record.transferred.values()) for record in log.take_records())
        if not through(checks=True):
            raise TransferError(
                "rows arrived wrong through the controller; look for faulty memory or network"
            )
        direct_s, through_s, payload, through_payload = [], [], 0, 0
        for repetition in range(spec.repetitions):
            before = log.payload_bytes
            direct_s.append(_timed(direct))
            payload += log.payload_bytes - before
            before = log.payload_bytes
            through_s.append(_timed(through))
            through_payload = log.payload_bytes - before
            say(
                f"{repetition + 1} of {spec.repetitions}: direct {direct_s[-1]:.2f} s, through the controller"
                f" {through_s[-1]:.2f} s"
            )
        say(f"{spec.num_empty_calls} empty calls")
        empty = [_timed(lambda: producer.answer().get()) for _ in range(spec.num_empty_calls)]
    return DispatchResult(tuple(direct_s), tuple(through_s), tuple(empty), payload, through_payload, received)


def _timed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started

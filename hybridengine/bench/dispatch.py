"""Benchmark of the transfer of rows between worker groups: from rank to rank, and through the controller."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from hybridengine.backends.vllm import environment
from hybridengine.bench.dispatch_spec import NUM_TOKENS, ROW_BYTES, DispatchSpec
from hybridengine.controller.call_log import call_log
from hybridengine.controller.pool import ResourcePool
from hybridengine.controller.rows import Rows
from hybridengine.controller.worker_group import WorkerGroup
from hybridengine.errors import TransferError
from hybridengine.rows.protocols import ONE_TO_ALL, PROTO_3D, ROW_NUMBERS, RankContext, register

EMPTY_CALLS = 200
COLUMN = "tokens"
STRIDE = 1_000_003
"""Entry j of row i is i · STRIDE + j, so that all rows differ."""


class DispatchWorker:
    """Producer or consumer of rows whose contents are a function of their numbers."""

    def __init__(self, context: RankContext) -> None:
        pass

    @register(PROTO_3D, [ROW_NUMBERS], returns_rows=True)
    def make_rows(self, rows: TensorDictBase) -> TensorDict:
        """Return the rows: `tokens` [B, T] int64."""
        return TensorDict({COLUMN: expected_tokens(rows[ROW_NUMBERS])}, batch_size=[len(rows)])

    @register(PROTO_3D, [COLUMN, ROW_NUMBERS])
    def take_rows(self, rows: TensorDictBase, checks: bool) -> bool:
        """Read the rows; with `checks`, return True if their values are correct."""
        if not checks:
            return bool(rows[COLUMN].max() > 0)
        return torch.equal(rows[COLUMN], expected_tokens(rows[ROW_NUMBERS]))

    @register(ONE_TO_ALL)
    def answer(self) -> None:
        """Do nothing; serves as an empty call."""


def expected_tokens(numbers_B: Tensor) -> Tensor:
    """Return the `tokens` of the rows with the given numbers. Shapes: [B] -> [B, T]."""
    return numbers_B[:, None] * STRIDE + torch.arange(NUM_TOKENS)


def dispatch_figures(
    spec: DispatchSpec,
    direct_s: list[float],
    through_s: list[float],
    empty_call_s: list[float],
    payload_bytes: dict[str, int],
) -> dict[str, Any]:
    """Return the figures of a measurement: medians and samples in seconds, and bytes moved."""
    direct, through = statistics.median(direct_s), statistics.median(through_s)
    return {
        "from": str(spec.producer),
        "to": str(spec.consumer),
        "num_rows": spec.num_rows,
        "batch_bytes": spec.num_rows * ROW_BYTES,
        "repetitions": spec.repetitions,
        "seconds_direct": direct,
        "seconds_through_controller": through,
        "advantage": through / direct,
        **payload_bytes,
        "empty_call_s": statistics.median(empty_call_s),
        "samples_direct_s": direct_s,
        "samples_through_controller_s": through_s,
    }


def measure_dispatch(spec: DispatchSpec, say: Callable[[str], None]) -> dict[str, Any]:
    """Transfer the same rows both ways in turn; the first repetition is not counted, but checked (TransferError)."""
    log = call_log()
    with ResourcePool([spec.producer.num_ranks], env=environment.ON_CPU, timeout_s=spec.timeout_s) as pool:
        say(f"starting {spec.producer.num_ranks} ranks")
        producer = WorkerGroup(pool, DispatchWorker, role="producer", parallel=spec.producer)
        consumer = WorkerGroup(pool, DispatchWorker, role="consumer", parallel=spec.consumer)
        say(f"making {spec.num_rows} rows of {ROW_BYTES} bytes on {spec.producer}")
        rows = producer.make_rows(Rows.numbered(spec.num_rows)).wait()

        def hand_over(way: str, checks: bool) -> tuple[float, int]:
            """Return the seconds, and the bytes that passed through the controller."""
            before, started = log.payload_bytes, time.perf_counter()
            right = consumer.take_rows(rows if way == "direct" else rows.get(), checks).get()
            seconds = time.perf_counter() - started
            if not all(right):
                raise TransferError(f"rows arrived wrong, {way}; look for faulty memory or network")
            return seconds, log.payload_bytes - before

        say(f"handing them to {spec.consumer} both ways, {1 + spec.repetitions} times; the first is checked")
        log.take_records()
        hand_over("direct", checks=True)
        pool.wait()
        received = sum(sum(record.transferred.values()) for record in log.take_records())
        hand_over("through the controller", checks=True)
        direct, through = [], []
        for repetition in range(spec.repetitions):
            direct.append(hand_over("direct", checks=False))
            through.append(hand_over("through the controller", checks=False))
            seconds = f"direct {direct[-1][0]:.2f} s, through the controller {through[-1][0]:.2f} s"
            say(f"{repetition + 1} of {spec.repetitions}: {seconds}")
        say(f"{EMPTY_CALLS} empty calls")
        empty_call_s = []
        for _ in range(EMPTY_CALLS):
            started = time.perf_counter()
            producer.answer().get()
            empty_call_s.append(time.perf_counter() - started)
    payload_bytes = {
        "controller_payload_bytes": sum(num_bytes for _, num_bytes in direct),
        "through_controller_payload_bytes": through[-1][1],
        "received_bytes": received,
    }
    direct_s, through_s = ([seconds for seconds, _ in samples] for samples in (direct, through))
    return dispatch_figures(spec, direct_s, through_s, empty_call_s, payload_bytes)

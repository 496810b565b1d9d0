"""Answers of pipeline stages that do not exist: the shapes that Megatron-core exchanges before each message."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle
from typing import Any

from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from hybridengine.backends.megatron.step import PipelineRunner
from hybridengine.backends.policy import MicroBatch
from hybridengine.rehearsal.replacing import all_replaced


@contextmanager
def stages_answered() -> Iterator[None]:
    """Let neighbouring stages announce the shapes of this rank's micro-batches while the context is open."""
    run, exchange = PipelineRunner._run, P2PCommunicator._communicate_shapes
    # Of activations from the previous stage, and of those to the next one, whose gradients come back in their order.
    expected: Iterator[list[int]] = iter(())
    sent = deque[list[int]]()

    def run_with_shapes(runner: Any, batches: Sequence[MicroBatch], *args: Any, **named: Any) -> Any:
        nonlocal expected
        config = runner._config
        parts = config.context_parallel_size * (
            config.tensor_model_parallel_size if config.sequence_parallel else 1
        )
        shapes = [batch["tokens"].shape for batch in batches]
        expected = cycle([-(-length // parts), rows, config.hidden_size] for rows, length in shapes)
        sent.clear()
        return run(runner, batches, *args, **named)

    def announced(
        communicator: Any, tensor_send_next: Any, tensor_send_prev: Any, recv_prev: bool, recv_next: bool
    ) -> tuple[list[int], list[int]]:
        exchange(communicator, tensor_send_next, tensor_send_prev, recv_prev, recv_next)
        if tensor_send_next is not None:
            sent.append(list(tensor_send_next.shape))
        none = [0, 0, 0]
        return next(expected) if recv_prev else none, sent.popleft() if recv_next else none

    with all_replaced(
        (PipelineRunner, "_run", run_with_shapes), (P2PCommunicator, "_communicate_shapes", announced)
    ):
        yield

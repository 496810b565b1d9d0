"""Calls while they are under way, for those who want to see them: who was called, and which ranks have ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from ray import ObjectRef

from hybridengine.controller.exchange import CallObserver
from hybridengine.controller.waiting import Operation


def observe_call(
    observer: CallObserver, operation: Operation, outcomes: Mapping[int, ObjectRef], inputs: Sequence[Any]
) -> None:
    """Tell the observer of a call, and of each rank as it ends: Ray says so, nobody asks or waits.

    Args:
        inputs: the calls (`Produced`) whose rows it reads.
    """
    numbers = [produced.future.operation.number for produced in inputs]
    number, pool = operation.number, operation.pool
    observer.call_made(number, operation.role, operation.method, pool, len(outcomes), numbers)
    for rank, outcome in outcomes.items():
        outcome.future().add_done_callback(partial(_tell, observer, number, pool, rank))


def _tell(observer: CallObserver, number: int, pool: str, rank: int, _: object) -> None:
    observer.rank_ended(number, pool, rank)

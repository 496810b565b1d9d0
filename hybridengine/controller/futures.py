"""Results of group calls that may not exist yet."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import ray
from ray import ObjectRef
from ray.exceptions import RayError

from hybridengine.controller.exchange import row_exchange
from hybridengine.controller.waiting import Operation
from hybridengine.errors import WorkerError


class Future:
    """The results of a group call, a list by source rank; can be passed, as it is, to calls of other groups."""

    def __init__(
        self,
        operation: Operation,
        results: Mapping[int, ObjectRef],
        collect: Callable[[list[Any]], Any],
        timeout_s: float,
        blocked_by: Callable[[int], str | None],
        inputs: Sequence[Any] = (),
    ) -> None:
        """`results` are references to the results of the source ranks, in row order.

        `inputs` are calls (`Produced`) whose rows the call reads: they are kept until it has ended, and where it fails
        because one of them has, that one's failure is raised.
        """
        self._operation = operation
        self._results = dict(results)
        self._collect = collect
        self._timeout_s = timeout_s
        self._blocked_by = blocked_by
        self._inputs = list(inputs)
        self._is_settled = False
        self._error: WorkerError | None = None
        self._collected = False
        self._value: Any = None

    @property
    def operation(self) -> Operation:
        """The call on the ranks."""
        return self._operation

    @property
    def seconds(self) -> float:
        """Time inside the method on the slowest rank; complete once `wait` or `get` has returned."""
        return self._operation.seconds

    @property
    def reported(self) -> bool:
        """Whether `wait` or `get` has raised the call's failure."""
        return self._error is not None

    @property
    def references(self) -> list[ObjectRef]:
        """References to the results of the source ranks, in row order."""
        return list(self._results.values())

    def settle(self) -> None:
        """Once the call has ended well: give up the rows that it has read, and write down what it took."""
        if not self._is_settled and self._operation.poll() and not self._operation.failed:
            self._is_settled = True
            self._inputs.clear()
            row_exchange().records.append(self._operation.record)

    def done(self) -> bool:
        """Whether every rank has answered or one has failed; `get` then returns or raises at once."""
        return self._operation.poll() or self._operation.failed

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until every rank has ended the call; the result stays where it is.

        Raises:
            RankFailedError: a rank raised or died.
            WorkerTimeoutError: ranks have not answered after `timeout_s`, the group's timeout by default.
        """
        if self._error is not None:
            raise self._error
        if self._collected:
            return
        try:
            self._operation.wait(self._timeout_s if timeout_s is None else timeout_s, self._blocked_by)
        except WorkerError as error:
            cause = self._failure_of_inputs() or error
            if self._operation.failed:  # a timeout can be waited for again, a failure stays
                self._error = cause
            if cause is error:
                raise
            raise cause from None

    def _failure_of_inputs(self) -> WorkerError | None:
        """Why a call that should have produced the rows of this one has failed; None where all are well."""
        for produced in self._inputs:
            if produced.future.done() and produced.future.operation.failed:
                try:
                    produced.future.wait()
                except WorkerError as error:
                    return error
        return None

    def get(self, timeout_s: float | None = None) -> Any:
        """The collected result.

        Raises:
            RankFailedError: a rank raised or died.
            WorkerTimeoutError: ranks have not answered after `timeout_s`, the group's timeout by default.
            ProtocolError: ranks returned results that cannot be concatenated.
        """
        self.wait(timeout_s)
        if not self._collected:
            self._value = self._collect(self._fetch())
            self._collected = True
            self._results.clear()
        return self._value

    def stored(self) -> list[Any]:
        """The results of the source ranks as they are, which stay where they are; the call has ended."""
        return self._fetch()

    def _fetch(self) -> list[Any]:
        try:
            return ray.get(list(self._results.values()), timeout=self._timeout_s)
        except RayError as error:
            raise WorkerError(
                f"{self._operation} ended, but its results are lost ({type(error).__name__}: {error});"
                " a rank or its node has died since: start again from the last checkpoint"
            ) from error

    def __repr__(self) -> str:
        missing = self._operation.missing
        state = f"waiting for ranks {list(missing)}" if missing else "complete"
        return f"Future({self._operation}, {state})"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{self!r} cannot be sent to a rank inside another value; pass it as an argument of its own, or call"
            " get() first"
        )

"""Results of group calls that may not exist yet."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import ray
from ray import ObjectRef
from ray.exceptions import RayError

from hybridengine.controller.exchange import row_exchange
from hybridengine.controller.waiting import Operation, wait_for
from hybridengine.errors import WorkerError, WrongArgumentsError


class Future:
    """The results of a group call, a list by source rank; can be passed, as it is, to calls of other groups."""

    def __init__(
        self,
        operation: Operation,
        results: Mapping[int, ObjectRef],
        collect: Callable[[list[Any]], Any],
        unfinished: Callable[[], Sequence[Future]],
        inputs: Sequence[Any] = (),
    ) -> None:
        """`results` are references to the results of the source ranks, in row order.

        `unfinished` gives the calls of the pool that ranks have not ended, oldest first: they come first. `inputs` are
        calls (`Produced`) whose rows the call reads.
        """
        self._operation = operation
        self._results = dict(results)
        self._collect = collect
        self._unfinished = unfinished
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
        """Whether the call's failure has been raised, or that of a call whose rows it wants."""
        return self._error is not None or any(
            produced.future.operation.failed and produced.future.reported for produced in self._inputs
        )

    @property
    def references(self) -> list[ObjectRef]:
        """References to the results of the source ranks, in row order."""
        return list(self._results.values())

    def settle(self) -> None:
        """Once the call has ended well: forget the calls whose rows it has read, and write down what it took."""
        if not self._is_settled and self._operation.poll() and not self._operation.failed:
            self._is_settled = True
            self._inputs.clear()
            row_exchange().records.append(self._operation.record)

    def done(self) -> bool:
        """Whether every rank has answered or one has failed; `get` then returns or raises at once."""
        return self._operation.poll() or self._operation.failed

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until every rank has ended the call; the result stays where it is.

        By default each call that comes first may take the timeout of its group, and then this one; `timeout_s` is for
        all of them together.

        Raises:
            RankFailedError: a rank raised or died, in this call or in one that comes first.
            WorkerTimeoutError: ranks have not answered in time.
        """
        if self._error is not None:
            raise self._error
        if self._collected:
            return
        ahead = self._ahead()
        failed = wait_for(self._operation, [call.operation for call in ahead], timeout_s, self._blocked_by)
        if failed is None:
            return
        call = next((call for call in ahead if call.operation is failed), self)
        if call._error is None:
            call._error = failed.error()
        if self._operation.failed:  # where it has not, it may still end, and can be waited for again
            self._error = call._error
        raise call._error

    def _ahead(self) -> list[Future]:
        """Calls that must end before this one can, oldest first, without those that have ended well."""
        found = {self._operation.number: self}
        to_visit: list[Future] = [self]
        while to_visit:
            call = to_visit.pop()
            earlier = [
                other
                for other in call._unfinished()
                if other.operation.number < call.operation.number and not other.reported
            ]
            for other in [*earlier, *(produced.future for produced in call._inputs)]:
                if other.operation.number in found or (other.operation.poll() and not other.operation.failed):
                    continue
                found[other.operation.number] = other
                to_visit.append(other)
        del found[self._operation.number]
        return [found[number] for number in sorted(found)]

    def _blocked_by(self, rank: int) -> str | None:
        """The first call that the rank has not ended."""
        missing = (
            call.operation
            for call in self._unfinished()
            if not call.operation.poll() and rank in call.operation.missing
        )
        return next(map(str, missing), None)

    def get(self, timeout_s: float | None = None) -> Any:
        """The collected result.

        Raises:
            RankFailedError: a rank raised or died.
            WorkerTimeoutError: ranks have not answered in time; limits as for `wait`.
            ProtocolError: ranks returned results that cannot be concatenated.
        """
        self.wait(timeout_s)
        if not self._collected:
            self._value = self._collect(self._fetch(self.references))
            self._collected = True
            self._results.clear()
        return self._value

    def answers(self, timeout_s: float) -> list[Any]:
        """Results of the source ranks that end well within so long, in row order, where others have failed or hang."""
        ended = self._operation.ended_well(timeout_s)
        return self._fetch([result for rank, result in self._results.items() if rank in ended])

    def _fetch(self, references: list[ObjectRef]) -> list[Any]:
        try:
            return ray.get(references, timeout=self._operation.timeout_s)
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
        raise WrongArgumentsError(
            f"{self!r} cannot be sent to a rank inside another value; pass it as an argument of its own, or call"
            " get() first"
        )

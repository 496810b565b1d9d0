"""Relays: processes that pass calls on to ranks, so that the controller calls a few processes, whatever the ranks are."""

from __future__ import annotations

import asyncio
import math
import pickle
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import ray
from ray import ObjectRef
from ray.exceptions import RayError

from hybridengine.controller.failures import Answer, answer_of, lost_answer

NUM_CALLED = 16
"""Largest number of processes that the controller calls in a pool. A pool of up to as many ranks has no relays."""
FAN_OUT = 64
"""Largest number of ranks below one relay."""
LOOK_LIMIT_S = 5.0
"""Time limit for a relay below another one to say which of its ranks have answered."""
Path = tuple[int, ...]
"""Position of a source rank's rows below a branch: one index per relay; empty for a rank that is called directly."""


class Share(NamedTuple):
    """One rank's share of a call."""

    rows: range = range(0)
    """Rows or items of the rank."""
    is_source: bool = False
    """True if the protocol collects this rank's result."""


class Request(NamedTuple):
    """A call of one method on all ranks of a branch."""

    method: str
    """Method of `RankProcess`."""
    packed: bytes | ObjectRef
    """Pickled content that all ranks of the branch share."""
    shares: Sequence[Share] | bytes
    """Share of each rank of the branch; pickled for a relay, as Ray's own pickler takes ten times longer."""
    inputs: Sequence[ObjectRef] = ()
    """Inputs without which no rank begins: descriptions of rows, or lists of these by relay."""
    gives_rows: bool = False
    """True if source ranks return descriptions of rows."""

    def read_shares(self) -> Sequence[Share]:
        """Return the share of each rank."""
        return pickle.loads(self.shares) if isinstance(self.shares, bytes) else self.shares

    @property
    def has_rows(self) -> bool:
        """True if some ranks of the branch are sources of rows."""
        return self.gives_rows and any(share.is_source for share in self.read_shares())


class Asked(NamedTuple):
    """A request that a branch has been sent."""

    branch: Branch
    number: int
    """Number of the request among those of the branch."""
    answer: ObjectRef
    """Reference to the `Outcome` of a rank, or to the `Answer` of a relay."""
    rows: ObjectRef | None
    """Reference to the rows of a rank, or to [reference to a list of those below the relay]; None without sources."""


@dataclass(eq=False)
class Branch:
    """A rank, or a relay with the consecutive ranks below it."""

    process: Any
    """Handle of the Ray actor."""
    ranks: range
    children: tuple[Branch, ...] = ()
    """Branches that a relay calls; empty for a rank."""
    num_asked: int = 0

    def ask(self, request: Request) -> Asked:
        """Send a request; requests reach every rank in the order in which they were sent."""
        method, packed, shares, inputs, _ = request
        if not self.children:
            (share,) = request.read_shares()
            ask = self.process.give_rows if request.has_rows else getattr(self.process, method)
            sent = ask.remote(packed, share, *inputs)
        else:
            # References inside lists: the relay passes them on without waiting for them or reading them.
            passed = request._replace(
                packed=[packed] if isinstance(packed, ObjectRef) else packed,
                shares=pickle.dumps(shares),
                inputs=[*inputs],
            )
            ask = self.process.give_rows if request.has_rows else self.process.call
            sent = ask.remote(self.num_asked, passed)
        number, self.num_asked = self.num_asked, self.num_asked + 1
        answer, rows = sent if request.has_rows else (sent, None)
        return Asked(self, number, answer, rows)

    def paths(self, sources: Collection[int]) -> dict[int, Path]:
        """Return source rank -> path to its rows."""
        if not self.children:
            return {rank: () for rank in self.ranks if rank in sources}
        below = [found for child in self.children if (found := child.paths(sources))]
        return {rank: (at, *path) for at, found in enumerate(below) for rank, path in found.items()}


def branches_over(processes: Sequence[Any], new_relay: Callable[[Sequence[Branch]], Any]) -> list[Branch]:
    """Return at most `NUM_CALLED` branches over processes in rank order; `new_relay` starts a relay over branches."""
    level = [Branch(process, range(rank, rank + 1)) for rank, process in enumerate(processes)]
    size = FAN_OUT
    while len(level) > NUM_CALLED:
        parts = [tuple(level[begin : begin + size]) for begin in range(0, len(level), size)]
        level = [
            Branch(new_relay(part), range(part[0].ranks.start, part[-1].ranks.stop), part) for part in parts
        ]
        size = math.ceil(
            len(level) / NUM_CALLED
        )  # no more: ranks are sent the places of all rows below a branch
    return level


class Relay:
    """An actor that passes requests on to its branches, and answers each once for all of their ranks.

    It answers when all ranks have answered, or one has failed: then with references in place of missing outcomes. It
    reads neither arguments nor rows, and imports nothing heavy.
    """

    def __init__(self, branches: Sequence[Branch]) -> None:
        self._branches, self._begin = branches, branches[0].ranks.start
        self._next, self._turn = 0, asyncio.Condition()
        self._asked = dict[int, dict[asyncio.Task[Answer], Asked]]()
        """Number of each unanswered request -> what waits for its answers."""

    async def call(self, number: int, request: Request) -> Answer:
        """Pass on the request with this number, and return the answer of its ranks."""
        answer, _ = await self._pass_on(number, request)
        return answer

    @ray.method(num_returns=2)
    async def give_rows(self, number: int, request: Request) -> tuple[Answer, list[ObjectRef]]:
        """Do as `call`, and return [reference to a list of references to the sources' rows] as well."""
        answer, asked = await self._pass_on(number, request)
        # One reference for whoever owns this result: it would have to count each that it contains.
        return answer, [ray.put([one.rows for one in asked if one.rows is not None])]

    async def look(self, number: int) -> Answer:
        """Return the outcomes that have arrived, and references in place of others; empty for a request that has not."""
        answer = Answer()
        for task, asked in self._asked.get(number, {}).items():
            if task.done():
                answer |= task.result()
                continue
            answer |= dict.fromkeys(asked.branch.ranks, asked.answer)
            if asked.branch.children:
                looked = _outcomes(asked.branch.ranks, asked.branch.process.look.remote(asked.number))
                try:
                    answer |= await asyncio.wait_for(looked, LOOK_LIMIT_S)
                except TimeoutError:
                    continue
        return answer

    async def _pass_on(self, number: int, request: Request) -> tuple[Answer, Collection[Asked]]:
        async with self._turn:  # an asynchronous actor may begin requests in another order
            await self._turn.wait_for(lambda: self._next == number)
            packed = request.packed[0] if isinstance(request.packed, list) else request.packed
            shares = request.read_shares()
            asked = [
                branch.ask(request._replace(packed=packed, shares=self._shares(branch, shares)))
                for branch in self._branches
            ]
            self._next += 1
            self._turn.notify_all()
        waiting = {asyncio.create_task(_outcomes(one.branch.ranks, one.answer)): one for one in asked}
        self._asked[number] = waiting
        try:
            return await _first_answers(waiting), asked
        finally:
            del self._asked[number]

    def _shares(self, branch: Branch, shares: Sequence[Share]) -> Sequence[Share]:
        return shares[branch.ranks.start - self._begin : branch.ranks.stop - self._begin]


async def _first_answers(waiting: dict[asyncio.Task[Answer], Asked]) -> Answer:
    """Return the outcomes of all ranks, or once there is a failure the outcomes so far and references to the others."""
    answer, pending = Answer(), set(waiting)
    while pending:
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        told = [outcome for task in done for outcome in task.result().items()]
        answer.update(told)
        if any(isinstance(outcome, ObjectRef) or outcome.failure for _, outcome in told):
            break
    for task in pending:
        answer |= dict.fromkeys(waiting[task].branch.ranks, waiting[task].answer)
    return answer


def _outcomes(ranks: range, reference: Any) -> Coroutine[Any, Any, Answer]:
    async def outcomes() -> Answer:
        try:
            return answer_of(ranks, await reference)
        except RayError as error:
            return lost_answer(ranks, error)

    return outcomes()

"""Generation by the engines of a call together: requests that wait move to engines that will have none left.

Rows are divided over engines before their lengths are known. Where an engine has more rows than it runs at once, some of
them may still wait when another engine has free slots. So the engines compare their queues every `STEPS` steps, and
level them if one is about to be empty. A request that moves is continued after the tokens that it has; its draws depend
on its seed and on positions alone. In the end, every engine gets the responses to its own rows.

What moves depends on numbers of steps and never on time, so that a repeated run repeats it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, NamedTuple, cast

import numpy as np
import torch.distributed as dist

from hybridengine.backends.engine import Engine, Request, Response
from hybridengine.topology.generation import GenerationGrid
from hybridengine.topology.grid import group_with

STEPS = 128
"""Steps between two comparisons. Engines wait for each other there, less often with more steps."""


class Queue(NamedTuple):
    """State of one engine at a comparison."""

    num_waiting: int
    """Requests that wait for a slot or for room in the KV cache."""
    num_running: int
    num_ended: int
    """Responses that have ended since the last comparison."""


class Move(NamedTuple):
    """Requests that go from one engine to another."""

    giver: int
    taker: int
    count: int


def moves(queues: Sequence[Queue]) -> list[Move]:
    """Return the moves that level the waiting requests, if an engine is expected to have none before the next comparison.

    Afterwards the numbers of waiting requests differ by at most one; engines that run fewest get more.
    """
    waiting = [queue.num_waiting for queue in queues]
    if all(queue.num_waiting > queue.num_ended for queue in queues):
        return []
    share, more = divmod(sum(waiting), len(queues))
    by_load = sorted(range(len(queues)), key=lambda place: (queues[place].num_running, -waiting[place]))
    excess = [count - share for count in waiting]
    for place in by_load[:more]:
        excess[place] -= 1
    found, takers = [], [place for place in range(len(queues)) if excess[place] < 0]
    for giver in (place for place in range(len(queues)) if excess[place] > 0):
        while excess[giver] > 0:
            taker = takers[0]
            count = min(excess[giver], -excess[taker])
            found.append(Move(giver, taker, count))
            excess[giver] -= count
            excess[taker] += count
            if not excess[taker]:
                takers.pop(0)
    return found


class Peers:
    """This rank's counterparts in the other engines; each line of such ranks makes the same moves.

    Collective over all ranks of the grid.
    """

    def __init__(self, generation: GenerationGrid, rank: int, timeout_s: float) -> None:
        lines = generation.groups("replica")
        self._line = group_with(rank, lines)
        self.place = self._line.index(rank)
        """Number of this rank's engine."""
        self._group: dist.ProcessGroup | None = None
        for line in lines if len(self._line) > 1 else ():
            # On the host, and without NCCL's buffers: what is exchanged are Python objects.
            group = dist.new_group(sorted(line), timeout=timedelta(seconds=timeout_s), backend="gloo")
            if line == self._line:
                self._group = cast(dist.ProcessGroup, group)

    @property
    def count(self) -> int:
        """Number of engines."""
        return len(self._line)

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all engines, by number."""
        by_rank = [value] * self.count
        if self._group is not None:
            dist.all_gather_object(by_rank, value, group=self._group)
        ranks = sorted(self._line)
        return [by_rank[ranks.index(rank)] for rank in self._line]

    def pass_on(self, giver: int, taker: int, values: list[Any]) -> list[Any]:
        """Return the values that the engine `giver` has passed to `taker`; an empty list on other engines.

        All engines go through the same calls in the same order, so that no two wait for each other.
        """
        if self.place == giver:
            dist.send_object_list([values], self._line[taker], group=self._group)
        if self.place != taker:
            return []
        received: list[Any] = [None]
        dist.recv_object_list(received, self._line[giver], group=self._group)
        return received[0]


def respond_together(engine: Engine, requests: Sequence[Request], peers: Peers) -> list[Response]:
    """Return the responses to this engine's requests, in order, which other engines may have drawn in part.

    Ids are unique among all engines. Collective over the engines.
    """
    ids = [request.request_id for request in requests]
    levelled = _Levelled(engine, peers)
    try:
        engine.add(requests)
        levelled.requests |= {request.request_id: (peers.place, request) for request in requests}
        may_wait = max(peers.gather(len(requests))) > engine.max_running
        if may_wait:
            levelled.draw_levelled()
        levelled.draw()
        ended = levelled.brought_home() if may_wait else levelled.ended
    finally:  # requests remain only after a failure or an interrupt
        engine.abort([response.request_id for response in engine.progress()])
    return [ended[request_id] for request_id in ids]


class _Levelled:
    """Requests of one engine, its own and those that it has taken."""

    def __init__(self, engine: Engine, peers: Peers) -> None:
        self._engine, self._peers = engine, peers
        self.requests: dict[str, tuple[int, Request]] = {}
        """Number of the engine whose row it is, and the request as that engine made it."""
        self._before: dict[str, Response] = {}
        """Tokens drawn by other engines."""
        self.ended: dict[str, Response] = {}

    def draw_levelled(self) -> None:
        """Draw, and level the queues, until no engine has a waiting request."""
        engine, peers = self._engine, self._peers
        while True:
            num_ended = self._advance(STEPS)
            num_waiting = len(engine.waiting)
            own = Queue(num_waiting, engine.num_unfinished - num_waiting, num_ended)
            queues: list[Queue] = peers.gather(own)
            if not any(queue.num_waiting for queue in queues):
                return
            for giver, taker, count in moves(queues):
                given = self._give(engine.waiting[-count:]) if peers.place == giver else []
                self._take(peers.pass_on(giver, taker, given))

    def draw(self) -> None:
        """Draw what this engine has."""
        while self._engine.num_unfinished:
            self._advance(STEPS)

    def _advance(self, num_steps: int) -> int:
        """Take engine steps; return the number of responses that have ended."""
        ended = self._engine.advance(num_steps)
        self.ended |= {response.request_id: self._whole(response) for response in ended}
        return len(ended)

    def _whole(self, response: Response) -> Response:
        """Return a response with the tokens that other engines have drawn for it."""
        before = self._before.pop(response.request_id, None)
        if before is None:
            return response
        names = ("token_ids", "log_probs", "versions")
        joined: dict[str, Any] = {name: getattr(before, name) + getattr(response, name) for name in names}
        if before.supports is not None and response.supports is not None:
            joined["supports"] = before.supports + response.supports
        if before.routes is not None and response.routes is not None:
            joined["routes"] = np.concatenate([before.routes, response.routes])
        return replace(response, **joined)

    def _give(self, request_ids: Iterable[str]) -> list[tuple[int, Request, Response]]:
        """Drop requests; return them with their tokens so far."""
        dropped = [self._whole(response) for response in self._engine.abort(request_ids)]
        return [(*self.requests.pop(response.request_id), response) for response in dropped]

    def _take(self, given: Iterable[tuple[int, Request, Response]]) -> None:
        """Continue requests after their tokens."""
        for home, request, response in given:
            self.requests[request.request_id] = home, request
            self._before[request.request_id] = response
            self._engine.add([continued(request, response)])

    def brought_home(self) -> dict[str, Response]:
        """Return the responses to this engine's own rows, after all engines have exchanged them."""
        peers = self._peers
        by_home: list[list[Response]] = [[] for _ in range(peers.count)]
        for request_id, response in self.ended.items():
            by_home[self.requests[request_id][0]].append(response)
        found = by_home[peers.place]
        homes: list[list[int]] = peers.gather(
            [home for home, responses in enumerate(by_home) if responses and home != peers.place]
        )
        for giver, takers in enumerate(homes):
            for home in takers:
                found += peers.pass_on(giver, home, by_home[home])
        return {response.request_id: response for response in found}


def continued(request: Request, response: Response) -> Request:
    """Return the request for the tokens that follow those of the response."""
    token_ids, routes = response.token_ids, response.routes
    return replace(
        request,
        prompt_token_ids=(*request.prompt_token_ids, *token_ids),
        sampling=replace(request.sampling, max_tokens=request.sampling.max_tokens - len(token_ids)),
        first_position=request.first_position + len(token_ids),
        num_routed=request.num_routed + (0 if routes is None else len(routes)),
    )

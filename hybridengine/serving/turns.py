"""Turns of models on the ranks: one model holds them, and the others wait until its client is gone."""

from __future__ import annotations

import time
from dataclasses import dataclass

from sqlalchemy import select

from hybridengine.errors import HybridEngineError, RequestError
from hybridengine.serving.results import Results
from hybridengine.serving.store import (
    ENDED,
    LIVE,
    POISONED,
    QUEUED,
    WAITING,
    ClientSession,
    Model,
    Request,
    Store,
)


@dataclass(frozen=True)
class Limits:
    """Limits on waits."""

    gap_s: float = 300.0
    """Longest wait for a request whose successors have arrived."""
    heartbeat_s: float = 60.0
    """Age of the last heartbeat after which another session may take the ranks; clients send one every 10 seconds."""
    turn_s: float = 600.0
    """Longest wait of a model for the ranks."""
    quiet_s: float = 0.05
    """Time without a new sampling request after which those that are there are carried out together."""
    collect_s: float = 1.0
    """Longest wait for more sampling requests."""
    keep_results_s: float = 3600.0
    """Time after which the result of a request is removed."""


class Turns:
    """The model that holds the ranks with its requests by ascending `seq_id`, and the models that wait for the ranks.

    For one thread at a time: the room's lock is held during all calls.
    """

    def __init__(self, store: Store, results: Results, limits: Limits) -> None:
        self.holder: str | None = None
        """Id of the model that holds the ranks."""
        self._store, self._results, self._limits = store, results, limits
        self._next_seq_id = 0
        self._arrivals: dict[int, float] = {}  # seq_id of the holder's requests -> time of arrival
        self._progress_s = 0.0

    def resume(self) -> None:
        """Take up the models that an earlier process has left; without it, their clients could send no heartbeats."""
        for model in (*self._store.models(LIVE), *self._store.models(WAITING)):
            self._store.update(ClientSession, model.session_id, heartbeat_s=time.time())
        if (model := self._store.live_model()) is not None:
            self._hold(model)

    # ---- models ----

    def begin(self, session_id: str, model_seq_id: int, base_model: str, kind: str, body: bytes) -> str:
        """Let a new model wait for the ranks, and return the id of its first request, which has the seq_id 0."""
        model_id = f"{session_id}:train:{model_seq_id}"
        request = Request(id=f"{model_id}:0", owner=model_id, seq_id=0, kind=kind, body=body)
        if not self._store.accepted(request):
            self._store.session(session_id)
            for other in (*self._store.models(LIVE), *self._store.models(WAITING)):
                if other.session_id == session_id:
                    does = "holds" if other.state == LIVE else "waits for"
                    raise RequestError(
                        f"model {other.id} of the same session {does} the ranks, which train one model at a time; close"
                        " that ServiceClient, and create the next model with another"
                    )
            model = Model(
                id=model_id,
                session_id=session_id,
                model_seq_id=model_seq_id,
                base_model=base_model,
                state=WAITING,
            )
            self._store.add(model, request)
            self.pass_on()
        return request.id

    def pass_on(self) -> None:
        """Give the ranks to the model that has waited longest if nobody uses them, and end waits that are too long."""
        for model in self._store.models(WAITING):
            if (silence := self._silence(model.id)) is not None:
                self.end(model.id, ENDED, f"its client {silence}")
                continue
            gone = None if self.holder is None else self._silence(self.holder)
            if self.holder is not None and gone is not None:
                self.end(self.holder, ENDED, f"its client {gone}, and another took the ranks")
            if self.holder is None:
                self._store.update(Model, model.id, state=LIVE)
                self._hold(model)
            elif time.time() - model.created_s > self._limits.turn_s:
                self.end(
                    model.id,
                    ENDED,
                    f"it waited {self._limits.turn_s:.0f} s (serve.wait_s), and {self.wait_reason(model.id)}",
                )

    def seen(self, session_id: str) -> None:
        """Take a request of a session for a sign of life, as a heartbeat is one."""
        age_s = time.time() - self._store.get(ClientSession, session_id).heartbeat_s
        if age_s > self._limits.heartbeat_s / 6:  # as often as clients send one
            self._store.update(ClientSession, session_id, heartbeat_s=time.time())

    def wait_reason(self, owner: str) -> str | None:
        """Return who holds the ranks if `owner` is a model that waits for them."""
        model = self._store.find(Model, owner)
        if model is None or model.state != WAITING or self.holder is None:
            return None
        session = self._store.get(ClientSession, self._store.get(Model, self.holder).session_id)
        return (
            f"model {self.holder} holds the ranks, which train one model at a time, and its client sent a heartbeat"
            f" {time.time() - session.heartbeat_s:.0f} s ago; close that ServiceClient, or stop it and wait"
            f" {self._limits.heartbeat_s:.0f} s"
        )

    def end_session(self, session_id: str) -> None:
        """End the models of a session that has ended, and give the ranks to the next one."""
        for model in (*self._store.models(LIVE), *self._store.models(WAITING)):
            if model.session_id == session_id:
                self.end(model.id, ENDED, f"session {session_id} has ended")
        self.pass_on()

    def end(self, model_id: str, state: str, reason: str, user: bool = True) -> None:
        """Take the ranks from a model, and fail its requests that are not done."""
        self._store.update(Model, model_id, state=state, reason=reason)
        pending = self._store.all(select(Request).where(Request.owner == model_id, Request.state == QUEUED))
        error = (RequestError if user else HybridEngineError)(self._store.get(Model, model_id).gone)
        self._results.finish({request.id: error for request in pending})
        if self.holder == model_id:
            self.holder = None
            self._arrivals.clear()

    def _hold(self, model: Model) -> None:
        queued = self._store.all(select(Request).where(Request.owner == model.id, Request.state == QUEUED))
        self.holder, self._next_seq_id = model.id, model.seq_id + 1
        self._arrivals = dict.fromkeys((request.seq_id for request in queued), time.monotonic())

    def _silence(self, model_id: str) -> str | None:
        """Return what the client of a model has done, if that means that it is gone."""
        session = self._store.get(ClientSession, self._store.get(Model, model_id).session_id)
        age_s = time.time() - session.heartbeat_s
        if session.ended:
            return "has closed its session"
        return f"sent no heartbeat for {age_s:.0f} s" if age_s >= self._limits.heartbeat_s else None

    # ---- requests of the holder ----

    @property
    def ready(self) -> str | None:
        """Id of the request that is next, if it is there."""
        return f"{self.holder}:{self._next_seq_id}" if self._next_seq_id in self._arrivals else None

    def check(self, model_id: str, seq_id: int) -> None:
        """Raise RequestError unless the model holds the ranks and has not carried a later request out."""
        model = self._store.get(Model, model_id)
        if model.state == WAITING:
            raise RequestError(
                f"model {model_id} waits for the ranks; wait for the result of its first request"
            )
        if model.state != LIVE:
            raise RequestError(model.gone)
        self._store.session(model.session_id)
        if seq_id < self._next_seq_id:
            raise RequestError(
                f"seq_id={seq_id} of model {model_id} goes backwards: seq_id={self._next_seq_id} is next; number requests"
                " as the SDK does"
            )

    def arrived(self, seq_id: int) -> None:
        """Note a request of the holder."""
        self._arrivals[seq_id] = time.monotonic()

    def advance(self, model_id: str, seq_id: int) -> None:
        """Let the request after `seq_id` be next, if the model still holds the ranks."""
        if self.holder == model_id:
            del self._arrivals[seq_id]
            self._next_seq_id = seq_id + 1
            self._progress_s = time.monotonic()

    def end_gap(self) -> None:
        """Stop the holder if its next request has not arrived for too long, while later ones wait."""
        if self.holder is None or not self._arrivals or self.ready:
            return
        if time.monotonic() - max(self._progress_s, min(self._arrivals.values())) > self._limits.gap_s:
            reason = (
                f"seq_id={min(self._arrivals)} waited {self._limits.gap_s:.0f} s for seq_id={self._next_seq_id}, which"
                " did not arrive"
            )
            self.end(self.holder, POISONED, reason)

"""Turns of models on the ranks: as many as train at a time hold them, and the others wait until a client is gone."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

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


@dataclass
class Place:
    """The requests of a model that holds the ranks."""

    next_seq_id: int
    arrivals: dict[int, float] = field(default_factory=dict)
    """seq_id -> time of arrival."""
    progress_s: float = 0.0
    """Time at which the last request was done."""

    @property
    def is_ready(self) -> bool:
        """True if the next request is there."""
        return self.next_seq_id in self.arrivals


class Turns:
    """The models that hold the ranks with their requests by ascending `seq_id`, and the models that wait for the ranks.

    For one thread at a time: the room's lock is held during all calls.

    Args:
        most: number of models that hold the ranks at most: 1 unless each has adapters of its own.
    """

    def __init__(self, store: Store, results: Results, limits: Limits, most: int = 1) -> None:
        self._store, self._results, self._limits, self._most = store, results, limits, most
        self._places: dict[str, Place] = {}

    @property
    def holders(self) -> tuple[str, ...]:
        """Ids of the models that hold the ranks."""
        return tuple(self._places)

    @property
    def holder(self) -> str | None:
        """Id of the model that holds the ranks, the first of several."""
        return next(iter(self._places), None)

    def resume(self) -> None:
        """Take up the models that an earlier process has left; without it, their clients could send no heartbeats."""
        for model in (*self._store.models(LIVE), *self._store.models(WAITING)):
            self._store.update(ClientSession, model.session_id, heartbeat_s=time.time())
        for model in self._store.models(LIVE):
            self._hold(model)

    # ---- models ----

    def begin(
        self, session_id: str, model_seq_id: int, base_model: str, kind: str, body: bytes, lora_rank: int = 0
    ) -> str:
        """Let a new model wait for the ranks, and return the id of its first request, which has the seq_id 0."""
        model_id = f"{session_id}:train:{model_seq_id}"
        request = Request(id=f"{model_id}:0", owner=model_id, seq_id=0, kind=kind, body=body)
        if not self._store.accepted(request):
            self._store.session(session_id)
            models = (*self._store.models(LIVE), *self._store.models(WAITING))
            others = [other for other in models if other.session_id == session_id]
            if len(others) >= self._most:
                does = "holds" if others[0].state == LIVE else "waits for"
                raise RequestError(
                    f"model {others[0].id} of the same session {does} the ranks, which train {self._number} at a time;"
                    " close that ServiceClient, and create the next model with another"
                )
            model = Model(
                id=model_id,
                session_id=session_id,
                model_seq_id=model_seq_id,
                base_model=base_model,
                lora_rank=lora_rank,
                state=WAITING,
            )
            self._store.add(model, request)
            self.pass_on()
        return request.id

    def pass_on(self) -> None:
        """Give places on the ranks that nobody uses to those who have waited longest, and end waits that are too long."""
        for model in self._store.models(WAITING):
            if (silence := self._silence(model.id)) is not None:
                self.end(model.id, ENDED, f"its client {silence}")
                continue
            silent = {holder: self._silence(holder) for holder in self._places}
            gone = next((holder for holder, silence in silent.items() if silence is not None), None)
            if self._is_full and gone is not None:
                self.end(gone, ENDED, f"its client {silent[gone]}, and another took the ranks")
            if not self._is_full:
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
        if model is None or model.state != WAITING or not self._is_full:
            return None
        sessions = {key: self._store.get(Model, key).session_id for key in self._places}
        ages_s = {
            key: time.time() - self._store.get(ClientSession, one).heartbeat_s
            for key, one in sessions.items()
        }
        oldest = max(ages_s, key=ages_s.__getitem__)
        return (
            f"model {oldest} holds the ranks, which train {self._number} at a time, and its client sent a heartbeat"
            f" {ages_s[oldest]:.0f} s ago; close that ServiceClient, or stop it and wait"
            f" {self._limits.heartbeat_s:.0f} s"
        )

    @property
    def _is_full(self) -> bool:
        return len(self._places) >= self._most

    @property
    def _number(self) -> str:
        return "one model" if self._most == 1 else f"{self._most} models (serve.max_adapters)"

    def end_session(self, session_id: str) -> None:
        """End the models of a session that has ended, and give the ranks to the next one."""
        for model in (*self._store.models(LIVE), *self._store.models(WAITING)):
            if model.session_id == session_id:
                self.end(model.id, ENDED, f"session {session_id} has ended")
        self.pass_on()

    def unload(self, model_id: str) -> None:
        """End a model that holds the ranks or waits for them, and give its place to the next one."""
        if self._store.get(Model, model_id).state in (LIVE, WAITING):
            self.end(model_id, ENDED, "its client has unloaded it")
            self.pass_on()

    def end(self, model_id: str, state: str, reason: str, user: bool = True) -> None:
        """Take the ranks from a model, and fail its requests that are not done."""
        self._store.update(Model, model_id, state=state, reason=reason)
        pending = self._store.all(select(Request).where(Request.owner == model_id, Request.state == QUEUED))
        error = (RequestError if user else HybridEngineError)(self._store.get(Model, model_id).gone)
        self._results.finish({request.id: error for request in pending})
        self._places.pop(model_id, None)

    def _hold(self, model: Model) -> None:
        queued = self._store.all(select(Request).where(Request.owner == model.id, Request.state == QUEUED))
        arrivals = dict.fromkeys((request.seq_id for request in queued), time.monotonic())
        self._places[model.id] = Place(model.seq_id + 1, arrivals)

    def _silence(self, model_id: str) -> str | None:
        """Return what the client of a model has done, if that means that it is gone."""
        session = self._store.get(ClientSession, self._store.get(Model, model_id).session_id)
        age_s = time.time() - session.heartbeat_s
        if session.ended:
            return "has closed its session"
        return f"sent no heartbeat for {age_s:.0f} s" if age_s >= self._limits.heartbeat_s else None

    # ---- requests of the holders ----

    @property
    def ready(self) -> str | None:
        """Id of the request that is next, if it is there: of several models', the one that came first."""
        found = [
            (place.arrivals[place.next_seq_id], f"{model_id}:{place.next_seq_id}")
            for model_id, place in self._places.items()
            if place.is_ready
        ]
        return min(found)[1] if found else None

    def check(self, model_id: str, seq_id: int) -> None:
        """Raise RequestError unless the model holds the ranks and has not had a later request carried out."""
        model = self._store.get(Model, model_id)
        if model.state == WAITING:
            raise RequestError(
                f"model {model_id} waits for the ranks; wait for the result of its first request"
            )
        if model.state != LIVE:
            raise RequestError(model.gone)
        self._store.session(model.session_id)
        following = self._places[model_id].next_seq_id
        if seq_id < following:
            raise RequestError(
                f"seq_id={seq_id} of model {model_id} goes backwards: seq_id={following} is next; number requests as the"
                " SDK does"
            )

    def arrived(self, model_id: str, seq_id: int) -> None:
        """Note a request of a model that holds the ranks."""
        self._places[model_id].arrivals[seq_id] = time.monotonic()

    def advance(self, model_id: str, seq_id: int) -> None:
        """Let the request after `seq_id` be next, if the model still holds the ranks."""
        if (place := self._places.get(model_id)) is not None:
            del place.arrivals[seq_id]
            place.next_seq_id = seq_id + 1
            place.progress_s = time.monotonic()

    def end_gap(self) -> None:
        """Stop models whose next request has not arrived for too long, while later ones wait."""
        for model_id, place in [*self._places.items()]:
            if not place.arrivals or place.is_ready:
                continue
            waited_s = time.monotonic() - max(place.progress_s, min(place.arrivals.values()))
            if waited_s > self._limits.gap_s:
                reason = (
                    f"seq_id={min(place.arrivals)} waited {self._limits.gap_s:.0f} s for seq_id={place.next_seq_id},"
                    " which did not arrive"
                )
                self.end(model_id, POISONED, reason)

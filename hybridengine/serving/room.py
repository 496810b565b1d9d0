"""Order of requests: one thread carries them out on the ranks, those of a model in the order of its client."""

from __future__ import annotations

import contextlib
import logging
import shutil
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import select
from tinker import types

from hybridengine.errors import HybridEngineError, RequestError
from hybridengine.serving.execution import PROMPT, PROMPTS, Execution, Outcome
from hybridengine.serving.ranks import Prompt, Ranks
from hybridengine.serving.results import Results, record
from hybridengine.serving.store import (
    CHANGES,
    ENDED,
    LIVE,
    POISONED,
    QUEUED,
    Checkpoint,
    ClientSession,
    Model,
    Request,
    Sampler,
    Store,
)

logger = logging.getLogger(__name__)

UPKEEP_S = 60.0
QUIET_GAPS = 4
"""Sampling requests that arrive together are complete after this many times the longest pause between two of them."""


@dataclass(frozen=True)
class Limits:
    """Limits on waits."""

    gap_s: float = 300.0
    """Longest wait for a request whose successors have arrived."""
    heartbeat_s: float = 60.0
    """Age of the last heartbeat after which another session may take the ranks; clients send one every 10 seconds."""
    quiet_s: float = 0.02
    """Time without a new sampling request after which those that are there are carried out together, at least."""
    collect_s: float = 1.0
    """Longest wait for more sampling requests."""
    keep_results_s: float = 3600.0
    """Time after which the result of a request is removed."""


class Room:
    """Accepts requests from any thread and carries them out on `ranks` in one.

    One model holds the ranks at a time. Its requests are carried out by ascending `seq_id` without gaps. Sampling
    requests are carried out between them, all that are there in one call. A request is known by its owner and
    `seq_id`: a retry gets the first one's result.

    With `newest`, a sampler of a model that has stepped since gets the newest weights and is not refused.
    """

    def __init__(
        self, ranks: Ranks, store: Store, folder: Path, limits: Limits | None = None, *, newest: bool = False
    ) -> None:
        self.ranks = ranks
        self.store = store
        self.failure: BaseException | None = None
        """Error that has ended the thread."""
        self._execution = Execution(ranks, store, folder)
        self.results = Results(store)
        self._limits = limits or Limits()
        self._newest = newest
        # guards what follows, and is not held during calls of the ranks
        self._changed = threading.Condition()
        self._closing = False
        self._holder: str | None = None
        self._next_seq_id = 0
        self._waiting: dict[int, float] = {}  # seq_id of the holder's requests -> time of arrival
        self._progress_s = 0.0
        self._samples: list[str] = []
        self._arriving = (
            0  # sampling requests that are being received; the connections' thread alone changes it
        )
        self._upkeep_s = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="room", daemon=True)

    def start(self) -> None:
        """Take up what an earlier process of this server has left in the store, and begin to carry requests out."""
        model = self.store.live_model()
        if model is not None:
            self._holder, self._next_seq_id = model.id, model.seq_id + 1
            self.store.update(ClientSession, model.session_id, heartbeat_s=time.time())
        for request in self.store.queued():
            if request.kind == "sample":
                self._samples.append(request.id)
            elif request.kind == PROMPT:  # the connection that waited for it is gone
                self.results.finish({request.id: HybridEngineError("the server restarted; send it again")})
            elif request.owner == self._holder:
                self._waiting[request.seq_id] = time.monotonic()
            else:
                self.results.finish({request.id: RequestError(self.store.get(Model, request.owner).gone)})
        self._thread.start()

    def close(self) -> None:
        """Stop after the request that is being carried out; the others stay in the store."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    # ---- what clients call ----

    def create_session(self, client: Mapping[str, Any]) -> str:
        """Return the id of a new session."""
        session_id = uuid.uuid4().hex
        self.store.add(ClientSession(id=session_id, client=dict(client)))
        return session_id

    def heartbeat(self, session_id: str) -> None:
        """Keep a session alive; raise RequestError if it has ended."""
        self.store.session(session_id)
        self.store.update(ClientSession, session_id, heartbeat_s=time.time())

    def finish(self, session_id: str) -> None:
        """End a session and its models."""
        self.store.get(ClientSession, session_id)
        with self._changed:
            self.store.update(ClientSession, session_id, ended=True)
            if self._holder is not None and self.store.get(Model, self._holder).session_id == session_id:
                self._end(self._holder, ENDED, f"session {session_id} has ended")

    def create_model(self, message: types.CreateModelRequest, body: bytes) -> str:
        """Return the id of the request that gives the ranks to a new model.

        Raises: RequestError for another model, optimizer or LoRA, or while another model holds the ranks.
        """
        self._execution.check_model(message.base_model, message.optimizer_config, message.lora_config)
        return self._begin(message.session_id, message.model_seq_id, "create_model", body)

    def load_model(self, message: types.LoadWeightsRequest, body: bytes) -> str:
        """Return the id of the request that gives the ranks to a model that begins at a checkpoint."""
        if message.model_id is not None:  # of a model that exists: what is wrong with it is found in its turn
            return self.submit(message.model_id, message.seq_id, "load_weights", body)
        if message.session_id is None or message.model_seq_id is None:
            raise RequestError("load_weights needs session_id and model_seq_id, or model_id and seq_id")
        self._execution.check_model(message.base_model, message.optimizer_config)
        self._execution.checkpoint(message.path)
        return self._begin(message.session_id, message.model_seq_id, "load_weights", body)

    def create_sampler(self, message: types.CreateSamplingSessionRequest) -> str:
        """Return the id of a sampling session from a checkpoint or from the base model."""
        with self._changed:
            return self._execution.create_sampler(message)

    def delete_checkpoint(self, path: str) -> None:
        """Remove a checkpoint and its files; raise RequestError if a restart needs it."""
        with self._changed:
            self._execution.delete_checkpoint(path, self._holder)

    def submit(self, owner: str, seq_id: int | None, kind: str, body: bytes) -> str:
        """Accept a request of a model or (`sample`) of a sampler, and return its id; a retry returns the first one's.

        Raises: RequestError if the owner is unknown or no longer served, or `seq_id` goes backwards.
        """
        if seq_id is None or seq_id < 0:
            raise RequestError(
                f"seq_id={seq_id} of {owner} must be 0 or greater; number requests as the SDK does"
            )
        request = Request(id=f"{owner}:{seq_id}", owner=owner, seq_id=seq_id, kind=kind, body=body)
        with self._changed:
            self._check_running()
            known = self.store.find(Request, request.id)
            if known is not None:
                if known.kind != kind:
                    raise RequestError(
                        f"seq_id={seq_id} of {owner} is a request of the kind {known.kind}, and now of {kind}; give each"
                        " request a seq_id of its own"
                    )
                return known.id
            if kind == "sample":
                self.store.session(self.store.get(Sampler, owner).session_id)
                self.store.add(request)
                self._samples.append(request.id)
            else:
                self._check_model(owner, seq_id)
                self.store.add(request)
                self._waiting[seq_id] = time.monotonic()
            self._changed.notify_all()
        return request.id

    @contextlib.contextmanager
    def arriving(self) -> Iterator[None]:
        """Let the sampling requests that are there wait for another one, which the body of the context submits."""
        self._arriving += 1
        try:
            yield
        finally:
            self._arriving -= 1

    def submit_prompts(self, prompts: Sequence[Prompt]) -> Sequence[str]:
        """Accept prompts for the weights that the ranks hold, of no session, and return the ids of their requests.

        These weights are those of the model in training when the prompts' turn comes, or else the base model's.
        """
        requests = [
            Request(id=key, owner=key, seq_id=0, kind=PROMPT, body=PROMPTS.dump_json(prompt))
            for prompt in prompts
            for key in [f"prompt:{uuid.uuid4().hex}"]
        ]
        with self._changed:
            self._check_running()
            self.store.add(*requests)
            self._samples += [request.id for request in requests]
            self._changed.notify_all()
        return [request.id for request in requests]

    def withdraw(self, request_ids: Sequence[str], reason: str) -> None:
        """Fail those of the prompts that are not being carried out yet."""
        with self._changed:
            pending = [request_id for request_id in self._samples if request_id in request_ids]
            self._samples = [request_id for request_id in self._samples if request_id not in pending]
            self.results.finish(dict.fromkeys(pending, RequestError(reason)))

    # ---- checks, with the lock held ----

    def _check_running(self) -> None:
        if self.failure is not None:
            raise RuntimeError(f"the server no longer carries out requests: {self.failure!r}; restart it")

    def _check_model(self, model_id: str, seq_id: int) -> None:
        model = self.store.get(Model, model_id)
        if model.state != LIVE:
            raise RequestError(model.gone)
        self.store.session(model.session_id)
        if seq_id < self._next_seq_id:
            raise RequestError(
                f"seq_id={seq_id} of model {model_id} goes backwards: seq_id={self._next_seq_id} is next; number requests"
                " as the SDK does"
            )

    def _begin(self, session_id: str, model_seq_id: int, kind: str, body: bytes) -> str:
        """Give the ranks to a new model, whose first request has the seq_id 0."""
        model_id = f"{session_id}:train:{model_seq_id}"
        request = Request(id=f"{model_id}:0", owner=model_id, seq_id=0, kind=kind, body=body)
        with self._changed:
            self._check_running()
            if self.store.find(Request, request.id) is None:
                self.store.session(session_id)
                self._take_ranks()
                model = Model(
                    id=model_id,
                    session_id=session_id,
                    model_seq_id=model_seq_id,
                    base_model=self.ranks.facts.name,
                )
                self.store.add(model, request)
                self._holder, self._next_seq_id = model_id, 0
                self._waiting[0] = time.monotonic()
                self._changed.notify_all()
        return request.id

    def _take_ranks(self) -> None:
        """End the model that holds the ranks if its client is gone; raise RequestError if it is not."""
        if self._holder is None:
            return
        model = self.store.get(Model, self._holder)
        session = self.store.get(ClientSession, model.session_id)
        age_s = time.time() - session.heartbeat_s
        if age_s < self._limits.heartbeat_s and not session.ended:
            raise RequestError(
                f"model {model.id} holds the ranks, which train one model at a time, and its client sent a heartbeat"
                f" {age_s:.0f} s ago; close that ServiceClient, or stop it and wait {self._limits.heartbeat_s:.0f} s"
            )
        self._end(
            model.id, ENDED, f"its client sent no heartbeat for {age_s:.0f} s and another took the ranks"
        )

    # ---- ends of requests and models, with the lock held ----

    def _end(self, model_id: str, state: str, reason: str, user: bool = True) -> None:
        """Take the ranks from a model, and fail its requests that are not done."""
        self.store.update(Model, model_id, state=state, reason=reason)
        pending = self.store.all(select(Request).where(Request.owner == model_id, Request.state == QUEUED))
        error = (RequestError if user else HybridEngineError)(self.store.get(Model, model_id).gone)
        self.results.finish({request.id: error for request in pending})
        if self._holder == model_id:
            self._holder = None
            self._waiting.clear()

    # ---- the thread ----

    def _run(self) -> None:
        try:
            self._restore()
            while not self._closing:
                with self._changed:
                    self._changed.wait_for(self._has_work, timeout=min(1.0, self._limits.gap_s))
                    samples = self._collect()
                    holder = self.store.get(Model, self._holder) if samples and self._holder else None
                if samples:
                    self._sample(samples, holder)
                with self._changed:
                    ready = self._next_seq_id in self._waiting and not self._closing
                    request_id = f"{self._holder}:{self._next_seq_id}"
                if ready:
                    self._carry_out(request_id)
                self._upkeep()
        except BaseException as error:
            self.failure = error
            logger.exception("the server no longer carries out requests")
            raise

    def _has_work(self) -> bool:
        return self._closing or bool(self._samples) or self._next_seq_id in self._waiting

    def _restore(self) -> None:
        model_id = self._holder
        if model_id is None:
            return
        try:
            self._execution.restore(model_id)
        except Exception as error:  # the server stays: other models can be created
            logger.exception("model %s cannot be resumed", model_id)
            with self._changed:
                self._end(
                    model_id, POISONED, f"it could not be resumed after a restart of the server: {error}"
                )

    def _collect(self) -> list[str]:
        """Return all sampling requests, after a wait for those that arrive at the same time."""
        end_s, quiet_s = time.monotonic() + self._limits.collect_s, self._limits.quiet_s
        while self._samples and not self._closing and (now_s := time.monotonic()) < end_s:
            number = len(self._samples)
            if self._changed.wait_for(lambda n=number: len(self._samples) > n, min(quiet_s, end_s - now_s)):
                # a busy machine sends them with pauses
                quiet_s = max(quiet_s, QUIET_GAPS * (time.monotonic() - now_s))
            elif not self._arriving:
                break
        if self._closing:
            return []
        collected, self._samples = self._samples, []
        return collected

    def _sample(self, request_ids: Sequence[str], holder: Model | None) -> None:
        requests = [self.store.get(Request, request_id) for request_id in request_ids]
        self.results.finish(self._execution.sample(requests, holder, self._newest))

    def _carry_out(self, request_id: str) -> None:
        request = self.store.get(Request, request_id)
        if request.state != QUEUED:  # its session has ended meanwhile
            return
        try:
            outcome = self._execution.carry_out(request)
        except Exception as error:  # the server stays; the client of this model learns of it
            user = isinstance(error, RequestError)
            if not user:
                logger.exception("%s of %s failed", request.kind, request.owner)
            with self._changed:
                self.results.finish({request.id: error})
                if request.kind in CHANGES:  # what follows relies on it
                    reason = f"{request.kind} with seq_id={request.seq_id} failed: {error}"
                    self._end(request.owner, POISONED, reason, user)
                else:
                    self._advance(request, None)
        else:
            with self._changed:
                self._advance(request, outcome)
                self.results.announce([request.id])

    def _advance(self, request: Request, outcome: Outcome | None) -> None:
        """Store an outcome, the rows that belong to it and the model's place in one transaction."""
        old_folder = None  # of a checkpoint that is replaced
        with self.store.transaction() as transaction:
            model = transaction.get_one(Model, request.owner)
            model.seq_id = request.seq_id
            if outcome is not None:
                for row in outcome.rows:
                    replaced = transaction.get(Checkpoint, row.path) if isinstance(row, Checkpoint) else None
                    old_folder = replaced.folder if replaced else old_folder
                    transaction.merge(row)
                if request.kind in ("optim_step", "load_weights"):
                    model.step += 1
                if request.kind in CHANGES:
                    model.gradients = request.kind == "forward_backward"
                record(transaction.get_one(Request, request.id), outcome.result)
        if old_folder is not None:
            shutil.rmtree(old_folder, ignore_errors=True)
        if self._holder == request.owner:
            del self._waiting[request.seq_id]
            self._next_seq_id = request.seq_id + 1
            self._progress_s = time.monotonic()

    def _upkeep(self) -> None:
        now_s = time.monotonic()
        with self._changed:
            if self._holder is not None and self._waiting and self._next_seq_id not in self._waiting:
                waited_s = now_s - max(self._progress_s, min(self._waiting.values()))
                if waited_s > self._limits.gap_s:
                    reason = (
                        f"seq_id={min(self._waiting)} waited {self._limits.gap_s:.0f} s for"
                        f" seq_id={self._next_seq_id}, which did not arrive"
                    )
                    self._end(self._holder, POISONED, reason)
        if now_s - self._upkeep_s > UPKEEP_S:
            self._upkeep_s = now_s
            for checkpoint in self.store.prune(time.time() - self._limits.keep_results_s):
                shutil.rmtree(checkpoint.folder, ignore_errors=True)

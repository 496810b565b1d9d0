"""Order of requests: those of a model in the order of its client, and samples between them or at the same time."""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tinker import types

from hybridengine.errors import HybridEngineError, RequestError
from hybridengine.serving.admission import check_lora, check_model, check_rank
from hybridengine.serving.execution import Execution
from hybridengine.serving.fair_lock import FairLock
from hybridengine.serving.model_requests import ModelRequests
from hybridengine.serving.ranks import Prompt, Ranks
from hybridengine.serving.restarts import cause_of
from hybridengine.serving.results import Results
from hybridengine.serving.sampling import PROMPT, PROMPTS, Sampling
from hybridengine.serving.store import (
    DONE,
    WAITING,
    Checkpoint,
    ClientSession,
    Model,
    Request,
    Sampler,
    Store,
    hide,
)
from hybridengine.serving.turns import Limits, Turns
from hybridengine.serving.waiting_samples import WaitingSamples

logger = logging.getLogger(__name__)

UPKEEP_S = 60.0


class Room:
    """Accepts requests from any thread and carries them out on `ranks`.

    `places` models hold the ranks at a time, one unless each has adapters of its own, and others wait for them (`Turns`).
    A model's requests are carried out by ascending `seq_id` without gaps. Sampling requests are carried out between them,
    all that are there in one call, or by a thread of their own if there are engines on other ranks (`Sampling`). A
    request is known by its owner and `seq_id`: a retry gets the first one's result. Ranks that are lost are started
    again (`Restarts`), and the request in which they were is carried out again, unless it may be the cause itself.

    A sampler keeps to the step at which it was made: before weights change, those that a sampler means are saved, and
    those of the `kept_steps` newest steps kept. Older ones are refused, or, with `newest`, get the newest weights.
    """

    def __init__(
        self,
        ranks: Ranks,
        store: Store,
        folder: Path,
        limits: Limits | None = None,
        *,
        places: int = 1,
        kept_steps: int = 0,
        newest: bool = False,
        max_restarts: int = 0,
    ) -> None:
        self.ranks = ranks
        self.store = store
        self.failure: BaseException | None = None
        """Error that has ended the thread; no request is accepted, carried out or answered in the store any more."""
        self.at_failure: Callable[[], object] = lambda: None
        """Called once there is a `failure`."""
        self.results = Results(store)
        self._execution = Execution(ranks, store, folder, kept_steps)
        self._limits = limits or Limits()
        self._actor = FairLock()
        """Held by the thread that uses the actor, changes files of saved weights or starts ranks again; taken before
        `changed`, never while that is held."""
        # guards what follows, and is not held during calls of the ranks
        self._changed = threading.Condition()
        self._closing = False
        self._turns = Turns(store, self.results, self._limits, places)
        self._samples = WaitingSamples(self._changed, self._limits)
        shared = self._execution, self._turns, self.results, self._changed
        self._requests = ModelRequests(*shared, max_restarts=max_restarts)
        self._restarts = self._requests.restarts
        self._sampling = Sampling(*shared, self._samples, self._restarts, self._actor, newest=newest)
        self._upkeep_s = time.monotonic()
        self._in_place = ranks.engines is None
        """True if samples are drawn between a model's requests, and not in a thread of their own."""
        self._thread = threading.Thread(target=self._run, name="room", daemon=True)
        self._sampler = threading.Thread(target=self._run_samples, name="samples", daemon=True)

    def start(self) -> None:
        """Take up what an earlier process of this server has left in the store, and begin to carry requests out."""
        self._turns.resume()
        waiting = {*self._turns.holders, *(model.id for model in self.store.models(WAITING))}
        for request in self.store.queued():
            if request.kind == "sample":
                self._samples.add(request.id)
            elif request.kind == PROMPT:  # the connection that waited for it is gone
                self.results.finish({request.id: HybridEngineError("the server restarted; send it again")})
            elif request.owner not in waiting:
                self.results.finish({request.id: RequestError(self.store.get(Model, request.owner).gone)})
        self._thread.start()

    def fail(self, error: BaseException) -> None:
        """Answer every request with `error` from now on; what has been accepted stays in the store.

        The result of the request that is being carried out is not stored: another server may own the store by now.
        """
        with self._changed:
            if self.failure is not None:
                return
            self.failure = error
            self.results.give_up()
            self._changed.notify_all()
        self.at_failure()

    @property
    def _is_ending(self) -> bool:
        return self._closing or self.failure is not None

    @property
    def trouble(self) -> str | None:
        """Why no requests are carried out now; None while they are."""
        if self.failure is not None:
            return f"the server ends, and can be started again: {cause_of(self.failure)}"
        return self._restarts.notice or self.store.trouble

    def wait_reason(self, request: Request) -> str | None:
        """Return what a request waits for besides its turn among the others: the ranks' restart, or another model."""
        with self._changed:
            return self._restarts.notice or self._turns.wait_reason(request.owner)

    def close(self) -> None:
        """Stop after the request that is being carried out; the others stay in the store."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        if self._sampler.is_alive():
            self._sampler.join()

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
            self._turns.end_session(session_id)
            self._changed.notify_all()

    def create_model(self, message: types.CreateModelRequest, body: bytes) -> str:
        """Return the id of the request that creates a model once its turn on the ranks has come.

        Raises: RequestError for another model, optimizer or LoRA, or if the session has a model.
        """
        lora = message.lora_config
        check_model(self.ranks.facts, message.base_model, message.optimizer_config)
        check_lora(self.ranks.facts, lora)
        return self._begin(
            message.session_id, message.model_seq_id, "create_model", body, lora.rank if lora else 0
        )

    def load_model(self, message: types.LoadWeightsRequest, body: bytes) -> str:
        """Return the id of the request that creates a model from a checkpoint once its turn has come."""
        if message.model_id is not None:  # of a model that exists: what is wrong with it is found in its turn
            return self.submit(message.model_id, message.seq_id, "load_weights", body)
        if message.session_id is None or message.model_seq_id is None:
            raise RequestError("load_weights needs session_id and model_seq_id, or model_id and seq_id")
        check_model(self.ranks.facts, message.base_model, message.optimizer_config)
        checkpoint = self._execution.checkpoint(message.path)
        check_rank(self.ranks.facts, checkpoint)
        return self._begin(
            message.session_id, message.model_seq_id, "load_weights", body, checkpoint.lora_rank
        )

    def create_sampler(self, message: types.CreateSamplingSessionRequest) -> str:
        """Return the id of a sampling session from a checkpoint or from the base model."""
        with self._changed:
            return self._execution.create_sampler(message)

    def checkpoint(self, path: str) -> Checkpoint:
        """Return the checkpoint at a tinker:// path; raise RequestError if there is none."""
        return self._execution.checkpoint(path)

    def adapter_of(self, model: str | None) -> str | None:
        """Return the folder of the adapters of a model that an OpenAI client names; None if there is no such model.

        It is empty for the served model itself. Others are, if clients train adapters, paths that
        save_weights_for_sampler has returned; raises RequestError if one does not exist.
        """
        if model in (None, self.ranks.facts.name):
            return ""
        is_path = self._execution.has_adapters and model is not None and model.startswith("tinker://")
        checkpoint = self.checkpoint(model) if is_path and model is not None else None
        return checkpoint.folder if checkpoint is not None and checkpoint.kind == "sampler" else None

    def delete_checkpoint(self, path: str) -> None:
        """Remove a checkpoint; its files stay until no restart needs them."""
        self.checkpoint(path)
        with self.store.transaction() as transaction:
            transaction.execute(hide(path))
        self._requests.frees_folders = True

    def submit(self, owner: str, seq_id: int | None, kind: str, body: bytes) -> str:
        """Accept a request of a model or (`sample`) of a sampler, and return its id; a retry returns the first one's.

        Raises: RequestError if the owner is unknown or not served now, or `seq_id` is taken or goes backwards.
        """
        seq_id = _checked_number("seq_id", seq_id, owner)
        request = Request(id=f"{owner}:{seq_id}", owner=owner, seq_id=seq_id, kind=kind, body=body)
        with self._changed:
            if self.store.accepted(request):
                return request.id
            if self.failure is not None:
                return request.id
            session_id = self.store.get(Sampler if kind == "sample" else Model, owner).session_id
            self._turns.seen(session_id)
            if kind == "sample":
                self.store.session(session_id)
                self._add_samples(request)
            else:
                self._turns.check(owner, seq_id)
                self.store.add(request)
                self._turns.arrived(owner, seq_id)
            self._changed.notify_all()
        return request.id

    def arriving(self) -> contextlib.AbstractContextManager[None]:
        """Let the sampling requests that are there wait for another one, which the body of the context submits."""
        return self._samples.arriving()

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
            self._add_samples(*requests)
            self._changed.notify_all()
        return [request.id for request in requests]

    def _add_samples(self, *requests: Request) -> None:
        self.store.add(*requests)
        self._samples.add(*(request.id for request in requests))

    def withdraw(self, request_ids: Sequence[str], reason: str) -> None:
        """Fail those of the prompts that are not being carried out yet."""
        with self._changed:
            self.results.finish(dict.fromkeys(self._samples.withdraw(request_ids), RequestError(reason)))

    def unload(self, model_id: str) -> str:
        """End a model, whose checkpoints stay; return the id of a request that is done."""
        key, result = f"{model_id}:unload", {"type": "unload_model", "model_id": model_id}
        done = Request(id=key, owner=key, seq_id=0, kind="unload_model", body=b"", state=DONE)
        done.result, done.done_s = json.dumps(result).encode(), time.time()
        with self._changed:
            self._turns.unload(model_id)
            if self.store.find(Request, key) is None:
                self.store.add(done)
            self._changed.notify_all()
        return key

    def _begin(self, session_id: str, model_seq_id: int, kind: str, body: bytes, lora_rank: int) -> str:
        model_seq_id = _checked_number("model_seq_id", model_seq_id, session_id)
        with self._changed:
            if self.failure is not None:
                return f"{session_id}:train:{model_seq_id}:0"
            base = self.ranks.facts.name
            key = self._turns.begin(session_id, model_seq_id, base, kind, body, lora_rank)
            self._changed.notify_all()
        return key

    # ---- the thread ----

    def _run(self) -> None:
        with self._ends_the_room():
            with self._actor:
                self._requests.begin()
            if not self._in_place:
                self._sampler.start()
            while not self._is_ending:
                with self._changed:
                    self._changed.wait_for(self._has_work, timeout=min(1.0, self._limits.gap_s))
                if self._in_place:
                    self._sample()
                with self._actor:
                    with self._changed:
                        ready = None if self._is_ending else self._turns.ready
                    if ready is not None:
                        self._requests.carry_out(ready)
                    self._upkeep()

    def _run_samples(self) -> None:
        with self._ends_the_room():
            while not self._is_ending:
                with self._changed:
                    self._changed.wait_for(lambda: self._is_ending or bool(self._samples))
                self._sample()

    @contextlib.contextmanager
    def _ends_the_room(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            logger.exception("the server no longer carries out requests")
            self.fail(error)

    def _sample(self) -> None:
        with self._changed:
            collected = self._samples.collect(lambda: self._is_ending)
        if collected:
            self._sampling.carry_out(collected)

    def _has_work(self) -> bool:
        return self._is_ending or (self._in_place and bool(self._samples)) or self._turns.ready is not None

    def _upkeep(self) -> None:
        now_s = time.monotonic()
        with self._changed:
            if self.failure is not None:
                return
            self._turns.end_gap()
            self._turns.pass_on()
        if now_s - self._upkeep_s > UPKEEP_S or self._requests.frees_folders:
            self._upkeep_s, self._requests.frees_folders = now_s, False
            for checkpoint in self.store.prune(time.time() - self._limits.keep_results_s):
                shutil.rmtree(checkpoint.folder, ignore_errors=True)


def _checked_number(name: str, number: int | None, owner: str) -> int:
    if number is None or not 0 <= number < 2**63:
        raise RequestError(
            f"{name}={number} of {owner} must be 0 to {2**63 - 1}; number requests as the SDK does"
        )
    return number

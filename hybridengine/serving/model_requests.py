"""Carrying out of a model's requests: one after another, each with what has to be stored with its result."""

from __future__ import annotations

import logging
import threading

from hybridengine.errors import RanksLostError, RequestError
from hybridengine.serving.execution import Execution, Outcome
from hybridengine.serving.restarts import Restarts, cause_of
from hybridengine.serving.results import Results, record
from hybridengine.serving.store import (
    CHANGES,
    NEW_WEIGHTS,
    POISONED,
    QUEUED,
    STEPS,
    Checkpoint,
    Model,
    Request,
    hide,
)
from hybridengine.serving.turns import Turns

logger = logging.getLogger(__name__)


class ModelRequests:
    """Carries the requests of models out on the actor, whose ranks are started again when they are lost.

    Before weights change, those that a sampler means are saved. The thread that calls it has the actor for itself.
    """

    def __init__(
        self,
        execution: Execution,
        turns: Turns,
        results: Results,
        changed: threading.Condition,
        *,
        max_restarts: int,
    ) -> None:
        self.restarts = Restarts(execution.ranks, max_restarts, self.restore)
        self.frees_folders = False
        """True if folders of checkpoints may have become superfluous."""
        self._execution, self._store = execution, execution.store
        self._turns, self._results, self._changed = turns, results, changed

    def begin(self) -> None:
        """Give the ranks what the models in training had when an earlier process ended."""
        try:
            self.restore()
        except RanksLostError as error:
            self.restarts.recover(error)

    def restore(self) -> None:
        """Give new ranks what the models in training had; stop a model if this fails, or fails again."""
        self._execution.forget()
        for model_id in self._turns.holders:
            self._restore(model_id)

    def _restore(self, model_id: str) -> None:
        try:
            self._execution.restore(model_id)
        except Exception as error:  # the server stays: other models can be created
            if self.restarts.is_first(f"restore {model_id}", error):
                raise
            logger.exception("model %s cannot be resumed", model_id)
            with self._changed:
                self._turns.end(model_id, POISONED, f"it could not be resumed after a restart: {error}")
            if isinstance(error, RanksLostError):
                raise

    def carry_out(self, request_id: str) -> None:
        """Carry a request out, unless its session has ended; its result or error is stored."""
        request = self._store.get(Request, request_id)
        if request.state != QUEUED:
            return
        if request.kind in NEW_WEIGHTS and not self._keep_weights(request_id):
            return
        try:
            outcome = self._execution.carry_out(request)
        except Exception as error:  # the server stays; the client of this model learns of it
            if not self.restarts.is_first(request_id, error):
                self._fail(request, error)
            if isinstance(error, RanksLostError):
                self.restarts.recover(error)
        else:
            with self._changed:
                if not self._results.given_up:
                    self._advance(request, outcome)
                    self._results.announce([request.id])

    def _keep_weights(self, request_id: str) -> bool:
        """Keep the weights that a request will change; return False if it has failed during a restart of the ranks.

        The ranks' loss is not the request's fault, so it is then carried out on new ones, without another try to keep.
        """
        try:
            if self._execution.keep_weights():
                self.frees_folders = True  # an older folder may go
            return True
        except RanksLostError as error:
            logger.warning("the weights before %s are not kept: %s", request_id, cause_of(error))
            self.restarts.recover(error)
            return self._store.get(Request, request_id).state == QUEUED

    def _fail(self, request: Request, error: Exception) -> None:
        """Store the error of a request, and stop its model if what follows relies on it."""
        user = isinstance(error, RequestError)
        if not user:
            logger.error("%s of %s failed", request.kind, request.owner, exc_info=error)
        with self._changed:
            if self._results.given_up:
                return
            self._results.finish({request.id: error})
            if request.kind in CHANGES:
                reason = f"{request.kind} with seq_id={request.seq_id} failed: {error}"
                self._turns.end(request.owner, POISONED, reason, user)
            else:
                self._advance(request, None)

    def _advance(self, request: Request, outcome: Outcome | None) -> None:
        """Store an outcome, the rows that belong to it and the model's place in one transaction."""
        with self._store.transaction() as transaction:
            model = transaction.get_one(Model, request.owner)
            model.seq_id = request.seq_id
            if outcome is not None:
                for row in outcome.rows:
                    if isinstance(row, Checkpoint):
                        transaction.execute(hide(row.path))
                        self.frees_folders = True  # a restart may need fewer folders now
                    transaction.merge(row)
                if request.kind in STEPS:
                    model.step += 1
                if request.kind in CHANGES:
                    model.gradients = request.kind == "forward_backward"
                record(transaction.get_one(Request, request.id), outcome.result)
        self._turns.advance(request.owner, request.seq_id)

"""Carrying out of sampling requests: those that mean the same weights in one call."""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import accumulate, islice
from typing import NamedTuple, TypeVar

from pydantic import TypeAdapter
from tinker import types

from hybridengine.errors import RanksLostError, RequestError
from hybridengine.serving.execution import Execution
from hybridengine.serving.fair_lock import FairLock
from hybridengine.serving.ranks import Prompt, Sampled
from hybridengine.serving.restarts import Restarts
from hybridengine.serving.results import Results
from hybridengine.serving.samplers import Source, check_named, saved_folder, source_of, weights_name
from hybridengine.serving.scored_prompts import needs_logits
from hybridengine.serving.store import Model, Request, Sampler
from hybridengine.serving.tinker_wire import decode_prompt, encode_sampled, parse
from hybridengine.serving.turns import Turns
from hybridengine.serving.waiting_samples import WaitingSamples

logger = logging.getLogger(__name__)
T = TypeVar("T")

BASE = Source("base", "base")
PROMPT = "prompt"
"""Kind of a request whose body is a `Prompt`, for the weights that the ranks hold."""
PROMPTS = TypeAdapter(Prompt)
MOST_RESPONSES = 4096
"""Number of responses that a draw has at most, unless one request alone asks for more: a draw has to end in time."""


class Asked(NamedTuple):
    """A sampling request, decoded."""

    prompt: Prompt
    sampler: str | None
    """Id of its sampler; None for the weights that the ranks hold."""


class Sampling:
    """Carries sampling requests out, in place on the actor or on engines that have got its weights.

    Engines draw without `actor`, the lock of whoever uses the actor or starts ranks again. Of requests that mean
    different weights, those of the one that came first are drawn; the others wait on. Prompts whose own log-probs or
    most likely tokens are wanted need the actor's forward pass, and are drawn in place.

    Args:
        newest: sample from the newest weights of a model if those that a sampler means are not kept.
    """

    def __init__(
        self,
        execution: Execution,
        turns: Turns,
        results: Results,
        changed: threading.Condition,
        waiting: WaitingSamples,
        restarts: Restarts,
        actor: FairLock,
        *,
        newest: bool,
    ) -> None:
        self._execution, self._store = execution, execution.store
        self._ranks, self._engines = execution.ranks, execution.ranks.engines
        self._turns, self._results, self._changed = turns, results, changed
        self._waiting, self._restarts, self._actor, self._newest = waiting, restarts, actor, newest
        self._parts: list[Sequence[str]] = []
        """Requests that are carried out next, those of each part apart from the others."""
        self._starts = 0
        """Number of times that the ranks had been started again when the present part was begun."""

    def carry_out(self, request_ids: Sequence[str]) -> None:
        """Carry requests out, or put them back among those that wait."""
        self._parts = [request_ids]
        while self._parts:
            self._starts = self._restarts.starts
            asked = self._asked(self._parts.pop(0))
            if not asked:
                continue
            asked = self._some(asked)
            prompts = self._held(asked)
            if prompts is None:
                with self._actor:
                    self._starts = self._restarts.starts
                    prompts = self._prepared(asked)
            if prompts and self._engines is not None:
                self._draw(prompts, self._engines.sample, self._actor)

    def _asked(self, request_ids: Iterable[str]) -> Mapping[str, Asked]:
        """Return the requests, decoded; refuse those that cannot be."""
        asked, refused = dict[str, Asked](), dict[str, bytes | Exception]()
        for request in (self._store.get(Request, request_id) for request_id in request_ids):
            try:
                if request.kind == PROMPT:
                    asked[request.id] = Asked(PROMPTS.validate_json(request.body), None)
                else:
                    message = parse(types.SampleRequest, request.body)
                    check_named(message, self._store.get(Sampler, request.owner))
                    prompt = decode_prompt(message, self._ranks.facts, request.id)
                    asked[request.id] = Asked(prompt, request.owner)
            except RequestError as error:
                refused[request.id] = error
        self._finish(refused)
        return asked

    def _some(self, asked: Mapping[str, Asked]) -> Mapping[str, Asked]:
        """Return the first requests, with at most `MOST_RESPONSES` responses; put the others back."""
        totals = accumulate(one.prompt.num_samples for one in asked.values())
        num_drawn = max(1, sum(total <= MOST_RESPONSES for total in totals))
        self._put_back([*asked][num_drawn:])
        return dict(islice(asked.items(), num_drawn))

    def _held(self, asked: Mapping[str, Asked]) -> Mapping[str, Prompt] | None:
        """Return the prompts for the weights that engines hold, if the first one is among them; put the others back."""
        held = None if self._engines is None else self._engines.held
        if held is None:
            return None
        model, prompts = self._model(), dict[str, Prompt]()
        for key, (prompt, sampler_id) in asked.items():
            if needs_logits(prompt):
                continue
            if not self._execution.has_adapters:
                if self._means(sampler_id, model, held):
                    prompts[key] = prompt
            elif (adapter := self._saved_adapter(prompt, self._sampler(sampler_id))) is not None:
                prompts[key] = replace(prompt, adapter=adapter)
        if next(iter(asked)) not in prompts:
            return None
        self._put_back([key for key in asked if key not in prompts])
        return prompts

    def _means(self, sampler_id: str | None, model: Model | None, name: str) -> bool:
        """Return True if a sampler means the weights of this name, unless its checkpoint is gone."""
        sampler = self._sampler(sampler_id)
        if sampler is not None and sampler.checkpoint is not None and not saved_folder(self._store, sampler):
            return False
        return weights_name(self._store, sampler, model, self._newest) == name

    def _sampler(self, sampler_id: str | None) -> Sampler | None:
        return None if sampler_id is None else self._store.get(Sampler, sampler_id)

    def _prepared(self, asked: Mapping[str, Asked]) -> Mapping[str, Prompt]:
        """Draw in place, and return prompts whose weights engines have got for them; put the rest back.

        After a loss of the ranks, no prompts are returned: new engines hold no weights.
        """
        rest, chosen, is_lost = list[str](), dict[str, Prompt](), False
        groups = self._tried(asked, partial(self._groups, asked))
        for (source, in_place), prompts in (groups or {}).items():
            if is_lost or (chosen and not in_place):
                rest += prompts
            elif in_place:
                is_lost = not self._draw(prompts, partial(self._ranks.sample, weights=source.weights))
            elif self._engines is not None:
                is_lost = not self._tried(prompts, partial(self._push, source, prompts))
                if self._engines.held == source.name:  # else they have been told why not
                    chosen = prompts
        if is_lost:
            rest, chosen = [*chosen, *rest], {}
        self._put_back(rest)
        return chosen

    def _groups(self, asked: Mapping[str, Asked]) -> Mapping[tuple[Source, bool], dict[str, Prompt]]:
        """Return prompts by the weights that they mean, and whether they are drawn in place; refuse the others.

        Raises RanksLostError if the ranks were lost while they saved a model's newest adapters.
        """
        groups, refused = defaultdict[tuple[Source, bool], dict[str, Prompt]](dict), dict[str, Exception]()
        model = self._model()
        for key, (prompt, sampler_id) in asked.items():
            try:
                # read here: the weights that it means may have been kept a moment ago
                sampler = self._sampler(sampler_id)
                if self._execution.has_adapters:  # which the prompts name: one draw has those of many
                    prompt, source = replace(prompt, adapter=self._adapter(prompt, sampler)), BASE
                else:
                    source = source_of(self._store, sampler, model, self._execution.held, self._newest)
                groups[source, self._engines is None or needs_logits(prompt)][key] = prompt
            except RanksLostError:
                raise
            except Exception as error:  # the server stays: only this client's adapters cannot be saved
                if not isinstance(error, RequestError):
                    logger.exception("the weights that %s means cannot be saved", key)
                refused[key] = error
        self._finish(refused)
        return groups

    def _saved_adapter(self, prompt: Prompt, sampler: Sampler | None) -> str | None:
        """Return the folder of the adapters that a prompt means, empty for the base model; None if it is not there."""
        if sampler is None or sampler.model_id is None:
            return prompt.adapter
        folder = saved_folder(self._store, sampler)
        return None if folder is None else str(folder)

    def _adapter(self, prompt: Prompt, sampler: Sampler | None) -> str:
        """Return the folder of the adapters that a prompt means, which are saved now if they are a model's newest.

        Raises RequestError if they are neither saved nor the newest.
        """
        saved = self._saved_adapter(prompt, sampler)
        if saved is not None:
            return saved
        assert sampler is not None and sampler.model_id is not None, "the base model needs no folder"
        model = self._store.get(Model, sampler.model_id)
        holder = model if model.id in self._turns.holders and model.seq_id >= 0 else None
        source_of(self._store, sampler, holder, holder and holder.id, self._newest)
        return self._execution.newest_adapter(model)

    def _model(self) -> Model | None:
        """Return the model that holds the ranks, if only one can."""
        holder = self._turns.holder
        return None if holder is None or self._execution.has_adapters else self._store.get(Model, holder)

    def _push(self, source: Source, request_ids: Iterable[str]) -> bool:
        """Give engines weights that they do not hold; tell those who wait for them if that fails."""
        assert self._engines is not None, "only called with engines"
        try:
            if self._engines.held != source.name:
                self._engines.push(source.weights, source.name)
        except RanksLostError:
            raise
        except Exception as error:  # the server stays
            logger.exception("%s cannot be given to engines", source.name)
            self._finish(dict.fromkeys(request_ids, error))
        return True

    def _draw(
        self,
        prompts: Mapping[str, Prompt],
        sample: Callable[[Sequence[Prompt]], Sequence[Sampled]],
        lock: AbstractContextManager[None] | None = None,
    ) -> bool:
        """Finish prompts with what `sample` returns, each with its own error; True unless the ranks were lost."""
        results = self._tried(prompts, lambda: _drawn(prompts, sample), lock)
        if results is not None:
            self._finish(results)
        return results is not None

    def _tried(
        self,
        request_ids: Iterable[str],
        call: Callable[[], T],
        lock: AbstractContextManager[None] | None = None,
    ) -> T | None:
        """Return what `call` returns; None if the ranks were lost in it, after they have been started again.

        `lock` is the actor's if this thread does not hold it.
        """
        try:
            return call()
        except RanksLostError as error:
            with lock or nullcontext():
                self._go_on_after(error, [*request_ids])
            return None

    def _go_on_after(self, error: RanksLostError, request_ids: Sequence[str]) -> None:
        """Start lost ranks again, unless another thread has done so; carry requests out again, or fail them."""
        if self._results.given_up:
            return
        if self._restarts.starts != self._starts:
            self._put_back(request_ids)
            return
        requests = [self._store.get(Request, request_id) for request_id in request_ids]
        callers = defaultdict[str, list[str]](list)
        for request in requests:
            callers["" if request.kind == PROMPT else request.owner].append(request.id)
        if self._restarts.is_first(f"sample {request_ids[0]}", error):
            self._put_back(request_ids)
        elif len(callers) > 1:  # one of them is the cause: the others are not to blame
            self._parts += callers.values()
        else:
            self._finish(dict.fromkeys(request_ids, error))
        self._restarts.recover(error)

    def _put_back(self, request_ids: Sequence[str]) -> None:
        with self._changed:
            self._waiting.put_back(request_ids)

    def _finish(self, results: Mapping[str, bytes | Exception]) -> None:
        if results:
            with self._changed:
                self._results.finish(results)


def _drawn(
    prompts: Mapping[str, Prompt], sample: Callable[[Sequence[Prompt]], Sequence[Sampled]]
) -> Mapping[str, bytes | Exception]:
    """Return the result or the error of each prompt; raise RanksLostError."""
    try:
        drawn = [encode_sampled(sampled) for sampled in sample([*prompts.values()])]
        return dict(zip(prompts, drawn, strict=True))
    except RanksLostError:
        raise
    except Exception as error:  # the server stays, and each client learns of it
        if len(prompts) == 1:
            if not isinstance(error, RequestError):
                logger.exception("sampling failed")
            return dict.fromkeys(prompts, error)
    # the ranks refuse one of them: the others are not to blame
    return {key: result for each in prompts.items() for key, result in _drawn(dict([each]), sample).items()}

"""Execution of each kind of request on the ranks, and the rows to store with its result."""

from __future__ import annotations

import json
import logging
import math
import re
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tinker import types

from hybridengine.errors import HybridEngineError, RanksLostError, RequestError
from hybridengine.serving.admission import check_adam, check_lora, check_model, check_rank
from hybridengine.serving.ranks import Ranks
from hybridengine.serving.samplers import sampler_id
from hybridengine.serving.store import (
    KEPT,
    LIVE,
    NEW_WEIGHTS,
    Base,
    Checkpoint,
    Model,
    Request,
    Sampler,
    Store,
)
from hybridengine.serving.tinker_wire import (
    decode_forward_backward,
    encode_passed,
    parse,
)

logger = logging.getLogger(__name__)

MOST_TTL_S = 10 * 365 * 24 * 3600
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class Outcome(NamedTuple):
    """Result of a request, and the rows to store together with it."""

    result: bytes
    rows: tuple[Base, ...] = ()


class Execution:
    """Carries requests of models out on the ranks, and keeps saved weights under `folder`.

    Weights that samplers mean are kept for the `kept_steps` newest steps of each model.
    """

    def __init__(self, ranks: Ranks, store: Store, folder: Path, kept_steps: int = 0) -> None:
        self.ranks = ranks
        self.store = store
        self.folder = folder
        for remains in folder.glob("*/*/.*.partial"):  # of a save in which the server was killed
            shutil.rmtree(remains, ignore_errors=True)
        self._kept_steps = kept_steps
        self._with_gradients = set[str]()
        """Models whose gradients wait on the ranks for their optimizer step."""
        self._present = ""
        """Model whose adapters the ranks train now."""
        self.held: str | None = None
        """Model whose weights the ranks hold, as they are at its step in the store."""
        self._methods = {
            "create_model": self._create_model,
            "forward": self._forward_backward,
            "forward_backward": self._forward_backward,
            "optim_step": self._optim_step,
            "save_weights": self._save_weights,
            "save_weights_for_sampler": self._save_weights_for_sampler,
            "load_weights": self._load_weights,
        }

    def carry_out(self, request: Request) -> Outcome:
        """Carry a request of a model out; raise RequestError if the client has to change it."""
        if request.kind not in self._methods:
            raise RequestError(f"{request.kind} is not served; served are {', '.join(self._methods)}")
        self._hold(request.owner)
        if request.kind in NEW_WEIGHTS:
            self.held = None
        outcome = self._methods[request.kind](request)
        self.held = request.owner
        return outcome

    @property
    def has_adapters(self) -> bool:
        """True if each model has adapters of its own on the base model."""
        return self.ranks.facts.max_lora_rank > 0

    def _hold(self, model_id: str) -> None:
        """Have the ranks train a model's adapters, if models have any of their own; those of the others wait."""
        if not self.has_adapters or model_id == self._present:
            return
        self._present, self.held = "", None
        others = [model.id for model in self.store.models(LIVE) if model.id != model_id]
        self.ranks.hold(model_id, others)
        self._present = model_id

    def checkpoint(self, path: str) -> Checkpoint:
        """Return the checkpoint at a tinker:// path; raise RequestError if there is none."""
        found = self.store.checkpoint(path)
        if found is None:
            raise RequestError(
                f"checkpoint {path!r} does not exist or has expired; give the path that a save returned"
            )
        return found

    def create_sampler(self, message: types.CreateSamplingSessionRequest) -> str:
        """Return the id of a sampling session from a checkpoint or from the base model; a retry finds the first one."""
        key = sampler_id(message.session_id, message.sampling_session_seq_id)
        known = self.store.find(Sampler, key)
        if known is not None and known.checkpoint != message.model_path:
            raise RequestError(
                f"sampling_session_seq_id={message.sampling_session_seq_id} is that of another sampler; number samplers"
                " as the SDK does"
            )
        if known is None:
            self.store.session(message.session_id)
            check_model(self.ranks.facts, message.base_model)
            if message.base_model is None and message.model_path is None:
                raise RequestError("create_sampling_session has neither model_path nor base_model; give one")
            sampler = Sampler(id=key, session_id=message.session_id, base_model=self.ranks.facts.name)
            if message.model_path is not None:
                checkpoint = self.checkpoint(message.model_path)
                check_rank(self.ranks.facts, checkpoint)
                if checkpoint.kind != "sampler":
                    raise RequestError(
                        f"{checkpoint.path} has weights for training, which cannot be sampled from; give the path that"
                        " save_weights_for_sampler returned"
                    )
                sampler.model_id, sampler.step = checkpoint.model_id, checkpoint.step
                sampler.checkpoint, sampler.folder = checkpoint.path, checkpoint.folder
            self.store.add(sampler)
        return key

    def keep_weights(self) -> bool:
        """Save the weights on the ranks, which are about to change, if a sampler is frozen at them; return whether.

        Its client may sample from them while it trains. Adapters have been saved when the sampler was made. Raises
        RanksLostError; the next call then saves nothing.
        """
        if self.has_adapters:
            return False
        model_id, self.held = self.held, None
        if model_id is None or not self._kept_steps:
            return False
        model = self.store.get(Model, model_id)
        if not self.store.has_samplers(model):
            return False
        try:
            self._keep(model)
        except RanksLostError:
            raise
        except Exception:  # samplers are refused by name if they are used after all
            logger.warning(
                "the weights of step %d of model %s are not kept", model.step, model_id, exc_info=True
            )
            return False
        return True

    def _keep(self, model: Model) -> str:
        """Save the weights of the model that the ranks hold for its samplers; return their folder."""
        folder = self._folder(model.id, KEPT, f"step-{model.step:06d}")
        if not folder.is_dir():
            self._write(folder, self.ranks.save_sampler)
        kept = self._saved(folder, KEPT, f"tinker://{model.id}/{KEPT}/{folder.name}", model)
        self.store.keep(kept, max(1, self._kept_steps))
        return kept.folder

    def newest_adapter(self, model: Model) -> str:
        """Return a folder of a model's adapters as they are now."""
        self._hold(model.id)
        return self._keep(model)

    def forget(self) -> None:
        """Take note of new ranks, which hold no model's weights."""
        self._with_gradients.clear()
        self._present, self.held = "", None

    def restore(self, model_id: str) -> None:
        """Give new ranks what a model had after its last request that was done: its checkpoint, and all changes since."""
        self._hold(model_id)
        replay = self.store.replay(model_id)
        if replay.checkpoint is not None:
            self.ranks.load(Path(replay.checkpoint.folder), True)
        for request in replay.again:
            self.carry_out(request)
        self.held = model_id

    def _create_model(self, request: Request) -> Outcome:
        lora = parse(types.CreateModelRequest, request.body).lora_config if self.has_adapters else None
        if self.has_adapters:
            check_lora(self.ranks.facts, lora)  # of a server that has been started with another rank
        self.ranks.begin_model(lora)
        self._with_gradients.discard(request.owner)
        return _json({"type": "create_model", "model_id": request.owner})

    def _forward_backward(self, request: Request) -> Outcome:
        decoded = decode_forward_backward(request.body, self.ranks.facts)
        passed = self.ranks.forward_backward(decoded.rows, decoded.loss, decoded.settings, decoded.backward)
        if decoded.backward:
            self._with_gradients.add(request.owner)
        return Outcome(encode_passed(passed))

    def _optim_step(self, request: Request) -> Outcome:
        adam = parse(types.OptimStepRequest, request.body).optim_params
        if not isinstance(adam, types.AdamParams):
            raise RequestError(
                f"optim_params of the type {adam.type!r} are not served; send those of Adam, which have no type"
            )
        check_adam(adam)
        if request.owner not in self._with_gradients:
            raise RequestError("no gradients wait for an optim_step; send forward_backward before it")
        metrics = self.ranks.optim_step(adam)
        self._with_gradients.discard(request.owner)
        # a skipped step has no norm of gradients, and JSON no NaN
        return _json(
            {"metrics": {name: float(value) for name, value in metrics.items() if math.isfinite(value)}}
        )

    def _load_weights(self, request: Request) -> Outcome:
        message = parse(types.LoadWeightsRequest, request.body)
        if request.folder is None:  # else a restart carries it out again
            checkpoint = self.checkpoint(message.path)
            if checkpoint.kind != "training":
                raise RequestError(
                    f"{message.path} has weights for sampling only; load what save_weights (save_state) wrote"
                )
            check_rank(self.ranks.facts, checkpoint, self.store.get(Model, request.owner))
            request.folder = checkpoint.folder
        self.ranks.load(Path(request.folder), message.optimizer)
        self._with_gradients.discard(request.owner)
        return _json({"type": "load_weights", "path": message.path, "model_id": request.owner}, request)

    def _save_weights(self, request: Request) -> Outcome:
        message = parse(types.SaveWeightsRequest, request.body)
        saved = self._save(request, "training", message.path, message.ttl_seconds, message.overwrite)
        return _json({"type": "save_weights", "path": saved.path}, saved)

    def _save_weights_for_sampler(self, request: Request) -> Outcome:
        message = parse(types.SaveWeightsForSamplerRequest, request.body)
        if message.sampling_session_seq_id is None:
            saved = self._save(request, "sampler", message.path, message.ttl_seconds, overwrite=False)
            return _json({"type": "save_weights_for_sampler", "path": saved.path}, saved)
        model = self.store.get(Model, request.owner)
        key = sampler_id(model.session_id, message.sampling_session_seq_id)
        if self.store.find(Sampler, key) is not None:
            raise RequestError(
                f"sampling_session_seq_id={message.sampling_session_seq_id} is that of a sampler that exists; number"
                " samplers as the SDK does"
            )
        sampler = Sampler(
            id=key,
            session_id=model.session_id,
            base_model=model.base_model,
            model_id=model.id,
            step=model.step if message.kind == "snapshot" else None,
        )
        if self.has_adapters and sampler.step is not None:
            sampler.folder = self._keep(model)
        return _json({"type": "save_weights_for_sampler", "sampling_session_id": sampler.id}, sampler)

    def _save(
        self, request: Request, kind: str, name: str | None, ttl_s: int | None, overwrite: bool
    ) -> Checkpoint:
        """Save under a folder of this request's own, so that a crash leaves earlier checkpoints as they were."""
        if ttl_s is not None and not 1 <= ttl_s <= MOST_TTL_S:
            raise RequestError(f"ttl_seconds={ttl_s} must be 1 to {MOST_TTL_S} (ten years), or be left out")
        name = name or f"{request.seq_id:06d}"
        if not _NAME.fullmatch(name):
            raise RequestError(
                f"path={name!r} must be a name of at most 128 letters, digits, '.', '_' and '-' that begins with a letter"
                " or digit"
            )
        part = {"training": "weights", "sampler": "sampler_weights"}[kind]
        path = f"tinker://{request.owner}/{part}/{name}"
        if not overwrite and self.store.checkpoint(path) is not None:
            remedy = "delete it first" if kind == "sampler" else "save with overwrite=true"
            raise RequestError(f"checkpoint {path} exists; choose another name, or {remedy}")
        folder = self._folder(request.owner, part, f"{name}-seq{request.seq_id:06d}")
        self._write(folder, self.ranks.save if kind == "training" else self.ranks.save_sampler)
        saved = self._saved(folder, kind, path, self.store.get(Model, request.owner))
        saved.seq_id = request.seq_id
        saved.expires_s = None if ttl_s is None else time.time() + ttl_s
        return saved

    def _folder(self, model_id: str, part: str, name: str) -> Path:
        return self.folder / model_id.replace(":", "-") / part / name

    def _write(self, folder: Path, write: Callable[[Path], None]) -> None:
        """Have the ranks write `folder`, which is complete once it exists."""
        partial = folder.with_name(f".{folder.name}.partial")
        for remains in (partial, folder):
            shutil.rmtree(remains, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            write(partial)
        except Exception:
            shutil.rmtree(partial, ignore_errors=True)  # a full disk would stay full
            raise
        partial.rename(folder)

    def _saved(self, folder: Path, kind: str, path: str, model: Model) -> Checkpoint:
        """Return the row of what has been saved of a model after its last request."""
        return Checkpoint(
            path=path,
            folder=str(folder),
            kind=kind,
            model_id=model.id,
            base_model=model.base_model,
            lora_rank=model.lora_rank,
            seq_id=model.seq_id,
            step=model.step,
            resumable=not model.gradients,
            created_s=time.time(),
        )


def _json(result: Mapping[str, Any], *rows: Base) -> Outcome:
    try:
        return Outcome(json.dumps(result, allow_nan=False).encode(), rows)
    except ValueError:
        raise HybridEngineError(
            f"the result {result} has a number that is not finite, which JSON cannot hold; report this as a bug"
        ) from None

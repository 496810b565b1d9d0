"""Which weights a sampling session means, and whether they are still there."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from tinker import types

from hybridengine.errors import RequestError
from hybridengine.serving.ranks import Weights
from hybridengine.serving.store import Checkpoint, Model, Sampler, Store


class Source(NamedTuple):
    """Weights to sample from, and the name of what they are: MODEL:STEP, or base."""

    weights: Weights
    name: str


def weights_name(store: Store, sampler: Sampler | None, holder: Model | None, newest: bool) -> str:
    """Return the name of the weights that a sampler means now, whether they are there or not.

    Args:
        sampler: None for the weights that the ranks hold.
        holder: the model that is trained, if there is one.
        newest: True if a sampler means the newest weights of its model once its own are not kept.
    """
    if sampler is None:
        # until its first request is done, the ranks hold what an earlier model has left
        return "base" if holder is None or holder.seq_id < 0 else _name(holder)
    if sampler.model_id is None:
        return "base"
    if sampler.step is None or (newest and saved_folder(store, sampler) is None):
        return _name(store.get(Model, sampler.model_id))
    return f"{sampler.model_id}:{sampler.step}"


def source_of(
    store: Store, sampler: Sampler | None, holder: Model | None, held: str | None, newest: bool
) -> Source:
    """Return the weights that a sampler means; raise RequestError if they are neither on the ranks nor saved.

    Args:
        sampler, holder, newest: see `weights_name`.
        held: id of the model whose weights the ranks hold, as they are at its step; it may have ended.
    """
    name = weights_name(store, sampler, holder, newest)
    if name == "base":
        return Source("base", name)
    if sampler is None or sampler.model_id is None:
        return Source("live", name)
    saved = saved_folder(store, sampler)
    if sampler.checkpoint is not None and saved is None:
        raise RequestError(
            f"sampler {sampler.id} holds weights of {sampler.checkpoint} that have been deleted or have expired;"
            " create a sampling client from another checkpoint"
        )
    if sampler.model_id == held and name == _name(store.get(Model, sampler.model_id)):
        return Source("live", name)
    if saved is not None:
        return Source(saved, name)
    wanted = "newest weights" if sampler.step is None else f"weights of step {sampler.step}"
    if holder is None or holder.id != sampler.model_id:
        raise RequestError(
            f"sampler {sampler.id} holds the {wanted} of the model {sampler.model_id}, which no longer holds the"
            " ranks, and they are not kept; sample from a checkpoint that was saved under a name"
        )
    raise RequestError(
        f"sampler {sampler.id} holds the {wanted}, which are no longer kept: the model is at step {holder.step}; save"
        " a new sampler, save weights under a name and sample from that checkpoint, or raise the server's"
        " serve.kept_steps"
    )


def _name(model: Model) -> str:
    return f"{model.id}:{model.step}"


def saved_folder(store: Store, sampler: Sampler) -> Path | None:
    """Return the folder of a sampler's weights if it is there."""
    saved = store.find(Checkpoint, sampler.folder) if sampler.folder is not None else None
    is_there = saved is not None and not saved.gone and Path(saved.folder).is_dir()
    return Path(saved.folder) if saved is not None and is_there else None


def check_named(message: types.SampleRequest, sampler: Sampler) -> None:
    """Raise RequestError if a request names other weights than those of its sampler."""
    for name, own in (("base_model", sampler.base_model), ("model_path", sampler.checkpoint)):
        if (value := getattr(message, name)) not in (None, own):
            raise RequestError(
                f"{name}={value!r} is not that of sampler {sampler.id} ({own!r}); leave it out, or create another sampler"
            )


def sampler_id(session_id: str, seq_id: int) -> str:
    """Return the id of a sampling session, which a client and a training client of the same session count together."""
    return f"{session_id}:sample:{seq_id}"

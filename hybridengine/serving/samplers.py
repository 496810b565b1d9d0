"""Which weights a sampling session means, and whether they are still there."""

from __future__ import annotations

from pathlib import Path

from tinker import types

from hybridengine.errors import RequestError
from hybridengine.serving.ranks import Weights
from hybridengine.serving.store import Checkpoint, Model, Sampler, Store


def weights_of(
    store: Store, sampler: Sampler, holder: Model | None, held: str | None, newest: bool
) -> Weights:
    """Return the weights that a sampler means; raise RequestError if they are neither on the ranks nor saved.

    Args:
        holder: the model that is trained, if there is one.
        held: id of the model whose weights the ranks hold, as they are at its step; it may have ended.
        newest: sample from the newest weights of the model if the meant ones are not kept.
    """
    if sampler.model_id is None:
        return "base"
    saved = store.find(Checkpoint, sampler.folder) if sampler.folder is not None else None
    is_saved = saved is not None and not saved.gone and Path(saved.folder).is_dir()
    if sampler.checkpoint is not None and not is_saved:
        raise RequestError(
            f"sampler {sampler.id} holds weights of {sampler.checkpoint} that have been deleted or have expired;"
            " create a sampling client from another checkpoint"
        )
    model = store.get(Model, sampler.model_id) if sampler.model_id == held else None
    if model is not None and sampler.step in (None, model.step):
        return "live"
    if saved is not None and is_saved:
        return Path(saved.folder)
    if model is not None and newest:
        return "live"
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

"""Checks of a client's wishes: the model, the rank of its adapters, and the settings of its optimizer."""

from __future__ import annotations

import math

from tinker import types

from hybridengine.algorithms.losses.client_inputs import FLOAT32_MAX, FLOAT32_TINY
from hybridengine.errors import RequestError
from hybridengine.serving.ranks import ModelFacts
from hybridengine.serving.store import Checkpoint, Model

_BETA = (0.0, math.nextafter(1, 0), "at least 0 and below 1")
_NUMBER = (0.0, FLOAT32_MAX, f"0 to {FLOAT32_MAX:.7g}, the largest float32")
_ADAM_RULES = {
    "learning_rate": (0.0, 1.0, "0 to 1: a step of Adam moves each weight by about as much"),
    "beta1": _BETA,
    "beta2": _BETA,
    "eps": (
        FLOAT32_TINY,
        FLOAT32_MAX,
        f"{FLOAT32_TINY:.7g} to {FLOAT32_MAX:.7g}, float32's range: with 0, weights without gradients would be NaN",
    ),
    "weight_decay": _NUMBER,
    "grad_clip_norm": _NUMBER,
}
"""Setting -> smallest value, largest value, and both in words."""


def check_model(
    facts: ModelFacts, base_model: str | None, optimizer: types.OptimizerConfig | None = None
) -> None:
    """Raise RequestError unless the server has that model and optimizer."""
    if base_model is not None and base_model != facts.name:
        raise RequestError(f"base_model={base_model!r} is not served; this server has {facts.name!r}")
    if optimizer is not None and optimizer.type != "adamw":
        raise RequestError(f"optimizer type={optimizer.type!r} is not served; choose adamw")


def check_lora(facts: ModelFacts, lora: types.LoraConfig | None) -> None:
    """Raise RequestError unless the ranks train what a new model wants: adapters of that rank, or all weights."""
    if facts.max_lora_rank:
        _check_adapters(facts, lora)
        return
    if lora is not None and lora.rank != 0:
        raise RequestError(
            f"lora_config.rank={lora.rank} is not served: all weights are trained; use lora_rank=0 for full"
            " fine-tuning, or start the server with actor.lora.rank"
        )
    for part in ("train_unembed", "train_mlp", "train_attn"):
        if lora is not None and not getattr(lora, part):
            raise RequestError(
                f"lora_config.{part}=false is not served: all weights are trained; leave it out"
            )


def _check_adapters(facts: ModelFacts, lora: types.LoraConfig | None) -> None:
    rank = lora.rank if lora is not None else 0
    if lora is None or not 1 <= rank <= facts.max_lora_rank:
        raise RequestError(
            f"lora_config.rank={rank} must be 1 to {facts.max_lora_rank}: this server trains adapters of at most its"
            f" actor.lora.rank={facts.max_lora_rank} on frozen weights; choose a rank in this range, or start the server"
            " with another one"
        )
    chosen = [part for part in ("attn", "mlp") if getattr(lora, f"train_{part}")]
    if not chosen:
        raise RequestError(
            "lora_config.train_attn=false and train_mlp=false leave nothing to train: there are adapters of these parts"
            " alone; leave one of them out"
        )
    for part in chosen:
        if part not in facts.lora_parts:
            raise RequestError(
                f"lora_config.train_{part}=true is not served: the server's actor.lora.modules have none of its layers;"
                f" set train_{part}=false, or start the server with other modules"
            )


def check_rank(facts: ModelFacts, checkpoint: Checkpoint, model: Model | None = None) -> None:
    """Raise RequestError unless the ranks, or a model, can have what a checkpoint has: adapters, or all weights."""
    own, most = checkpoint.lora_rank, facts.max_lora_rank
    if model is not None and own != model.lora_rank:
        raise RequestError(
            f"{checkpoint.path} has weights of lora_rank={own} (0: all weights), and the model has"
            f" lora_rank={model.lora_rank}; create a training client from this state instead of loading it"
        )
    if (own > 0) != (most > 0) or own > most:
        raise RequestError(
            f"{checkpoint.path} has weights of lora_rank={own} (0: all weights), and the server's"
            f" actor.lora.rank={most}; load it on a server that has its rank"
        )


def check_adam(adam: types.AdamParams) -> None:
    """Raise RequestError for settings with which a step makes weights that are not numbers, or no longer a model's."""
    for name, (low, high, rule) in _ADAM_RULES.items():
        if not low <= (value := getattr(adam, name)) <= high:
            raise RequestError(f"adam_params.{name}={value} must be {rule}")
    if adam.learning_rate * adam.weight_decay > 1:
        raise RequestError(
            f"adam_params.learning_rate={adam.learning_rate} times weight_decay={adam.weight_decay} must be at most 1:"
            " more would turn the sign of weights; lower one of them"
        )

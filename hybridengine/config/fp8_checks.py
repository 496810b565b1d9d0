"""Rules of 8 bits: matrix products of training, and engines whose matrices have a scale for each block."""

from __future__ import annotations

from collections.abc import Iterator

from hybridengine.config.algorithm import Conflict, ServedAlgorithm
from hybridengine.config.run_config import ModelHolder, RunConfig
from hybridengine.models.shapes import FP8_BLOCK, ModelShape


def product_conflicts(config: RunConfig, holder: ModelHolder) -> Iterator[Conflict]:
    """Yield conflicts between matrix products in 8 bits, and the device or the type of weights."""
    key, fp8 = f"{holder.name}.fp8", getattr(holder.section, "fp8", "none")
    if fp8 == "none":
        return
    if config.cluster.device == "cpu":
        yield Conflict(
            f"{key}={fp8} needs GPUs, and cluster.device=cpu; set {key}=none", (key, "cluster.device")
        )
    if config.model.dtype != "bfloat16":
        yield Conflict(
            f"{key}={fp8} needs weights in bfloat16, and model.dtype={config.model.dtype}; set model.dtype=bfloat16, or"
            f" {key}=none",
            (key, "model.dtype"),
        )


def engine_conflicts(config: RunConfig, shape: ModelShape) -> Iterator[Conflict]:
    """Yield the violated rules of engines in FP8."""
    rollout, key = config.rollout, "rollout.quantization"
    if rollout.quantization == "none":
        if rollout.training_weights != "kept":
            yield Conflict(
                f"rollout.training_weights={rollout.training_weights} is not read with {key}=none, which cuts training"
                " weights out of the engine's; leave it out, or choose a quantization",
                ("rollout.training_weights", key),
            )
        return
    if shape.experts:
        yield Conflict(
            f"{key}={rollout.quantization} is for dense models, and {shape.family} has experts; set {key}=none",
            (key,),
        )
        return
    if config.actor.lora.rank:
        yield Conflict(
            f"{key}={rollout.quantization} with actor.lora.rank={config.actor.lora.rank} is not supported; set"
            f" {key}=none, or actor.lora.rank=0",
            (key, "actor.lora.rank"),
        )
    if config.model.dtype != "bfloat16":
        yield Conflict(
            f"{key}={rollout.quantization} needs a model in bfloat16, and model.dtype={config.model.dtype}; set"
            f" model.dtype=bfloat16, or {key}=none",
            (key, "model.dtype"),
        )
    if rollout.training_weights != "kept" and isinstance(config.algorithm, ServedAlgorithm):
        yield Conflict(
            f"rollout.training_weights={rollout.training_weights} needs an optimizer's master weights, and a server"
            " samples before it has one; leave it out",
            ("rollout.training_weights",),
        )
    for sizes_key, sizes in config.engine_sizes.items():
        t_g = sizes.tp_size
        rows = {
            "num_heads·head_dim": shape.q_size // t_g,
            "num_kv_heads·head_dim": max(shape.kv_size // t_g, shape.head_dim),
            "ffn_hidden_size": shape.ffn_hidden_size // t_g,
        }
        for name, count in rows.items():
            if count % FP8_BLOCK:
                yield Conflict(
                    f"{key}={rollout.quantization} has a scale for each block of {FP8_BLOCK} rows, and {sizes_key} with"
                    f" t_g={t_g} leaves {count} of {name} on a rank; choose another t_g, or {key}=none",
                    (key, sizes_key),
                )

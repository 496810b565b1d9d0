"""Rules of models: checkpoints and descriptions, sizes against shapes, widths against positions and the KV cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from hybridengine.checkpoint_files import checkpoint_problems
from hybridengine.config.algorithm import Conflict
from hybridengine.config.holders import ModelHolder, model_holders
from hybridengine.config.run_config import SCORERS, RunConfig
from hybridengine.config.sections import BUILT_TOKENS
from hybridengine.errors import CheckpointError, ConfigError
from hybridengine.model_presets import resolve_model
from hybridengine.model_shapes import DTYPE_BYTES, ModelShape

WIDTHS = ("rollout.max_prompt_tokens", "rollout.max_response_tokens")


def model_conflicts(config: RunConfig, dry_run: bool) -> Iterator[Conflict]:
    """Yield the broken rules of every model."""
    yield from _checkpoints(config, dry_run)
    for holder in model_holders(config):
        shape = _shape_or_none(config, holder.path, holder.hf_config)
        if shape is not None:
            yield from _sharding(holder, shape)
            yield from _positions(config, holder, shape)
    shape = _shape_or_none(config)
    yield from _engines(config, shape)
    if shape is not None:
        yield from _generation(config, shape)


def model_shape(config: RunConfig, path: str | None = None, hf_config: str | None = None) -> ModelShape:
    """Return the shape of the checkpoint at `path`, which `hf_config` describes where it is elsewhere.

    Without a path, return the shape of the actor's model: of its checkpoint, of the model to build, or of
    `model.hf_config`.

    Raises:
        ConfigError, CheckpointError: the model is not described, or cannot be used.
    """
    if path is None and config.model.build is not None:
        return config.model.build.shape()
    folder = path or config.model.path
    if folder is not None and (Path(folder) / "config.json").exists():
        return ModelShape.from_folder(folder)
    described = config.model.hf_config if path is None else hf_config
    if described is not None:
        return resolve_model(described)
    if folder is None:
        raise ConfigError("model is given by none of path, gguf and build; add one")
    return ModelShape.from_folder(folder)


def holder_shape(config: RunConfig, holder: ModelHolder) -> ModelShape:
    """Return the shape of a holder's model, with a score head where it has one."""
    shape = model_shape(config, holder.path, holder.hf_config)
    return replace(shape, num_labels=1, tied_embeddings=False) if holder.has_score_head else shape


def _shape_or_none(
    config: RunConfig, path: str | None = None, hf_config: str | None = None
) -> ModelShape | None:
    """Return the shape, or None where there is none to check, which `_checkpoints` reports."""
    try:
        return model_shape(config, path, hf_config)
    except (ConfigError, CheckpointError):
        return None


def _checkpoints(config: RunConfig, dry_run: bool) -> Iterator[Conflict]:
    """Every checkpoint, and every description of a model, that the configuration names."""
    model = config.model
    found = list(_checkpoint("model", model.path, model.hf_config, dry_run))
    yield from found
    if (
        not found
        and model.hf_config
        and model.path
        and Path(model.path).is_dir()
        and resolve_model(model.hf_config) != ModelShape.from_folder(model.path)
    ):
        yield Conflict(
            f"model.hf_config={model.hf_config} describes another model than {model.path}/config.json;"
            " leave hf_config out, or name the checkpoint's own config.json",
            ("model.hf_config", "model.path"),
        )
    try:
        if model.build is not None:
            model.build.shape()
    except ConfigError as error:
        yield Conflict(f"model.build: {error}", ("model.build",))
    if model.build is not None and model.tokenizer is None and model.build.vocab_size < BUILT_TOKENS:
        yield Conflict(
            f"model.build.vocab_size={model.build.vocab_size} must be at least the {BUILT_TOKENS} tokens of the tokenizer"
            " that is built with the model; raise it, or name a model.tokenizer",
            ("model.build.vocab_size",),
        )
    for holder in model_holders(config):
        key, path, hf_config = holder.key, holder.path, holder.hf_config
        if path is None and hf_config is not None and holder.role not in SCORERS:
            yield Conflict(
                f"{key}.hf_config={hf_config} describes the checkpoint {key}.path, which is not given; give it, or leave"
                " hf_config out",
                (f"{key}.hf_config", f"{key}.path"),
            )
        yield from _checkpoint(key, path, hf_config, dry_run)
        if path is not None and holder.role in SCORERS:
            yield from _head(f"{key}.path", path)


def _checkpoint(section: str, path: str | None, hf_config: str | None, dry_run: bool) -> Iterator[Conflict]:
    """Problems of a description and of a checkpoint; where nothing is started, the first stands for the second."""
    described, key = None, f"{section}.path"
    try:
        described = hf_config and resolve_model(hf_config)
    except ConfigError as error:
        yield Conflict(f"{section}.hf_config: {error}", (f"{section}.hf_config",))
    if path is not None and Path(path).is_dir():
        for problem in checkpoint_problems(path):
            yield Conflict(f"{key}: {problem}", (key,))
    elif path is not None and not (dry_run and described):
        hint = f", or give {section}.hf_config" if dry_run else ""
        yield Conflict(f"{key}={path} is not a folder; {paths_hint(path)}{hint}", (key,))


def _head(key: str, path: str) -> Iterator[Conflict]:
    try:
        shape = ModelShape.from_folder(path)
    except (ConfigError, CheckpointError):
        return
    if shape.num_labels != 1:
        found = f"{shape.num_labels} labels" if shape.num_labels else "no score head"
        yield Conflict(
            f"{key}={path} has {found}, a reward model gives one score; use a ...ForSequenceClassification checkpoint"
            " with num_labels=1",
            (key,),
        )


def _sharding(holder: ModelHolder, shape: ModelShape) -> Iterator[Conflict]:
    """Tensor-parallel size against heads and MLP width, pipeline size against layers."""
    key, sizes, keys = holder.sizes_key, holder.sizes, (holder.sizes_key, "model", f"{holder.key}.path")
    for problem in shape.tp_problems(sizes.tp_size):
        yield Conflict(f"{key}={sizes}: {problem}", keys)
    try:
        shape.split_layers(sizes.pp_size)
    except ConfigError as error:
        yield Conflict(f"{key}={sizes}: {error}", keys)


def _positions(config: RunConfig, holder: ModelHolder, shape: ModelShape) -> Iterator[Conflict]:
    """The longest row against what a model has positions for; without a checkpoint of its own, it is the actor's."""
    rollout, width = config.rollout, config.max_tokens
    if width > shape.max_positions and (holder.path or holder.role == "actor"):
        whose = f"those of {holder.key}.path={holder.path}," if holder.path else "the model's"
        yield Conflict(
            f"rollout.max_prompt_tokens={rollout.max_prompt_tokens} + max_response_tokens="
            f"{rollout.max_response_tokens} = {width} tokens exceed {whose}"
            f" max_positions={shape.max_positions}; lower them by {width - shape.max_positions}",
            (*WIDTHS, f"{holder.key}.path" if holder.path else "model"),
        )


def _engines(config: RunConfig, shape: ModelShape | None) -> Iterator[Conflict]:
    """Sizes (p_g, t_g) against the ranks and the model."""
    gen, train = config.actor.gen_sizes, config.actor.train_sizes
    for problem in gen.problems_over(train):
        yield Conflict(f"actor.generate={gen}: {problem}", ("actor.generate", "actor.parallel"))
    if shape is not None:
        for problem in [
            *shape.gen_pp_problems(gen.pp_size),
            *shape.gen_tp_problems(gen.tp_size, train.tp_size),
        ]:
            yield Conflict(f"actor.generate={gen}: {problem}", ("actor.generate", "model"))


def _generation(config: RunConfig, shape: ModelShape) -> Iterator[Conflict]:
    """One sequence against the KV cache, and requirements of vLLM on a CPU."""
    rollout, width = config.rollout, config.max_tokens
    gen, train = config.actor.gen_sizes, config.actor.train_sizes
    stages = (
        ()
        if max(gen.pp_size, train.pp_size) > shape.num_layers
        else shape.gen_stage_layers(train.pp_size, gen.pp_size)
    )
    layers, kv_heads = max(map(len, stages), default=0), max(1, shape.num_kv_heads // gen.tp_size)
    needed = 2 * layers * kv_heads * shape.head_dim * DTYPE_BYTES[config.model.dtype] * width
    if needed > rollout.kv_cache_bytes:
        yield Conflict(
            f"rollout.kv_cache_bytes={rollout.kv_cache_bytes} must hold one sequence of {width} tokens, which takes"
            f" {needed} bytes at p_g-t_g = {gen}; raise it to a multiple of {needed}",
            ("rollout.kv_cache_bytes", *WIDTHS, "actor.generate", "model"),
        )
    if config.cluster.device == "cpu" and rollout.cuda_graphs:
        yield Conflict(
            "rollout.cuda_graphs=true needs cluster.device=cuda, found cpu; leave it false",
            ("rollout.cuda_graphs", "cluster.device"),
        )
    if config.cluster.device == "cpu" and shape.head_dim % 32:
        yield Conflict(
            f"head_dim={shape.head_dim} is not a multiple of 32, which vLLM needs on a CPU; use another model, or"
            " cluster.device=cuda",
            ("cluster.device", "model"),
        )


def paths_hint(path: str) -> str:
    """Return the remedy for a path that does not exist."""
    if Path(path).is_absolute():
        return "name one that exists"
    return f"name one that exists, relative paths start at {Path.cwd()}"

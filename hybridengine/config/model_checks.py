"""Rules of models: checkpoints and descriptions, sizes against shapes, row widths against positions and KV cache."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from hybridengine.config.algorithm import Conflict, ServedAlgorithm
from hybridengine.config.build_section import BUILT_TOKENS
from hybridengine.config.fp8_checks import engine_conflicts, product_conflicts
from hybridengine.config.run_config import SCORERS, TRAINED, ModelHolder, RunConfig, model_holders
from hybridengine.errors import CheckpointError, ConfigError
from hybridengine.models.checkpoint_files import adapter_problems, checkpoint_problems
from hybridengine.models.presets import resolve_model
from hybridengine.models.shapes import ModelShape
from hybridengine.topology.fitting import gen_problems, train_problems
from hybridengine.topology.sizes import GenSizes

WIDTHS = ("rollout.max_prompt_tokens", "rollout.max_response_tokens")


def model_conflicts(config: RunConfig, dry_run: bool) -> Iterator[Conflict]:
    """Yield the violated rules of all models."""
    yield from _checkpoints(config, dry_run)
    actor = None
    for holder in model_holders(config):
        yield from product_conflicts(config, holder)
        with suppress(ConfigError, CheckpointError):  # `_checkpoints` reports the missing shape
            shape = _shape_without_head(config, holder)
            if holder.has_score_head and (problems := shape.score_problems()):
                yield from (Conflict(f"{holder.name}: {one}", ("model", holder.key)) for one in problems)
                continue
            shape = holder_shape(config, holder)
            actor = shape if holder.role == "actor" else actor
            yield from _sharding(holder, shape)
            yield from _positions(config, holder, shape)
            yield from _router_losses(holder, shape)
    if actor is not None:
        yield from _lora(config, actor, dry_run)
        yield from _vision(config, actor)
    if not config.algorithm.generates:
        return
    gen, train = config.actor.generate, config.actor.parallel
    for problem in gen.problems_over(train):
        yield Conflict(f"actor.generate={gen}: {problem}", ("actor.generate", "actor.parallel"))
    if actor is not None:
        yield from _engines(config, actor, "actor.generate", gen, train.tp_size, train.pp_size)
        if "generation" in config.algorithm.roles:
            own = config.generation.parallel
            yield from _engines(config, actor, "generation.parallel", own, own.tp_size, own.pp_size)
        yield from _cpu_engines(config, actor)
        yield from engine_conflicts(config, actor)
        yield from _routing_replay(config, actor)


def _vision(config: RunConfig, shape: ModelShape) -> Iterator[Conflict]:
    """Yield what is not there for models that read images."""
    if shape.vision is None:
        return
    unsupported = {
        "actor.lora.rank": (config.actor.lora.rank, 0),
        "rollout.quantization": (config.rollout.quantization, "none"),
    }
    for key, (value, needed) in unsupported.items():
        if value != needed:
            yield Conflict(
                f"{key}={value} is not supported for {shape.family}, which reads images; set {key}={needed}",
                (key,),
            )


def _lora(config: RunConfig, shape: ModelShape, dry_run: bool) -> Iterator[Conflict]:
    """Yield conflicts between the actor's adapters, its features, and the run's other parts."""
    actor, key = config.actor, "actor.lora.rank"
    if not actor.lora.rank:
        if actor.lora.path is not None:
            yield Conflict(
                f"actor.lora.path={actor.lora.path} is not read with {key}=0, which trains all weights; set {key} to the"
                " adapters' rank, or leave the path out",
                (key, "actor.lora.path"),
            )
        return
    modules = actor.lora.modules
    if not modules or len({*modules}) < len(modules):
        yield Conflict(
            f"actor.lora.modules=[{', '.join(modules)}] must name at least one layer, and each once; correct it, or"
            " leave it out",
            ("actor.lora.modules",),
        )
    if actor.lora.path is not None and config.warmup is not None:
        yield Conflict(
            f"actor.lora.path={actor.lora.path} has adapters of weights that warmup would change; leave one of them out",
            ("actor.lora.path", "warmup.steps"),
        )
    if actor.lora.path is not None and not dry_run:
        for problem in adapter_problems(actor.lora.path):
            yield Conflict(f"actor.lora.path: {problem}", ("actor.lora.path",))
    named = f"{key}={actor.lora.rank}"
    if actor.fp8 != "none":
        yield Conflict(
            f"{named} with actor.fp8={actor.fp8} is not supported; set actor.fp8=none", (key, "actor.fp8")
        )
    if isinstance(config.algorithm, ServedAlgorithm):
        yield from _served_lora(config, shape, named)
    for name, pool in config.cluster.pools.items():
        if "reference" in pool.roles:
            yield Conflict(
                f"cluster.pools.{name}.roles names reference, which with {named} is the actor without its adapters; leave"
                " it out",
                (key, f"cluster.pools.{name}.roles"),
            )
    if shape.experts is None:
        return
    adapts_experts = bool({"linear_fc1", "linear_fc2"} & set(actor.lora.modules))
    if adapts_experts and config.cluster.device == "cuda":
        yield Conflict(
            f"{named} adapts experts, which Transformer Engine groups on GPUs, where they cannot have adapters; set"
            " actor.lora.modules=[linear_qkv, linear_proj]",
            (key, "actor.lora.modules", "cluster.device"),
        )
    if adapts_experts and actor.parallel.expert_shards > 1:
        yield Conflict(
            f"{named} adapts experts, and actor.parallel={actor.parallel} shards them; set etp=1, or"
            " actor.lora.modules=[linear_qkv, linear_proj]",
            (key, "actor.lora.modules", "actor.parallel"),
        )
    if "generation" in config.algorithm.roles:
        yield Conflict(
            f"{named}: engines of the role generation cannot have the adapters of a mixture of experts; choose an"
            " algorithm without that role",
            (key, "algorithm.name"),
        )


def _served_lora(config: RunConfig, shape: ModelShape, named: str) -> Iterator[Conflict]:
    """Yield what a server whose clients train adapters of their own does not have."""
    key = "actor.lora.rank"
    if shape.experts is not None:
        yield Conflict(
            f"{named} is not supported by a server of a mixture of experts ({shape.family}), whose engine can have one"
            f" client's adapters alone; set {key}=0, or serve a dense model",
            (key,),
        )
    if config.actor.lora.path is not None:
        yield Conflict(
            f"actor.lora.path={config.actor.lora.path} is not read by a server, where each client has adapters of its"
            " own; leave it out",
            ("actor.lora.path",),
        )
    if config.serve.reference:
        yield Conflict(
            f"serve.reference=true with {named} would hold the frozen weights twice: the base model is the actor without"
            " adapters; leave it out",
            ("serve.reference", key),
        )


def model_shape(config: RunConfig) -> ModelShape:
    """Return the shape of the actor's model with its adapters; ConfigError or CheckpointError if it is missing or
    unusable."""
    return _model_shape(config).with_adapters(config.actor.lora.adapters)


def _model_shape(config: RunConfig) -> ModelShape:
    if config.model.build is not None:
        return config.model.build.shape()
    if config.model.path is None and config.model.hf_config is None:
        raise ConfigError("model is given by none of path, gguf and build; add one")
    return shape_at(config.model.path, config.model.hf_config)


def holder_shape(config: RunConfig, holder: ModelHolder) -> ModelShape:
    """Return the shape of a holder's model, including any score head; errors are those of `model_shape`."""
    if holder.role == "actor":
        return model_shape(config)
    shape = _shape_without_head(config, holder)
    return shape.with_score_head() if holder.has_score_head else shape


def _shape_without_head(config: RunConfig, holder: ModelHolder) -> ModelShape:
    return _model_shape(config) if holder.path is None else shape_at(holder.path, holder.hf_config)


def shape_at(path: str | None, hf_config: str | None) -> ModelShape:
    """Return the shape of the checkpoint at `path`, or of `hf_config` if the checkpoint is elsewhere."""
    if hf_config is not None and not (path and (Path(path) / "config.json").exists()):
        return resolve_model(hf_config)
    assert path is not None, "one of the two is given"
    return ModelShape.from_folder(path)


def _checkpoints(config: RunConfig, dry_run: bool) -> Iterator[Conflict]:
    """Yield the problems of all checkpoints and model descriptions in the configuration."""
    model = config.model
    yield from checkpoint_conflicts("model", model.path, model.hf_config, dry_run)
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
    if "teacher" in config.algorithm.roles and config.teacher.path is None:
        yield Conflict(
            f"algorithm.name={config.algorithm.name} learns from a teacher, and teacher.path names no checkpoint; give"
            " it",
            ("teacher.path", "algorithm.name"),
        )
    for holder in model_holders(config):
        key, path, hf_config, scores = holder.key, holder.path, holder.hf_config, holder.role in SCORERS
        if path is None and hf_config is not None and not scores:
            yield Conflict(
                f"{key}.hf_config={hf_config} describes the checkpoint {key}.path, which is not given; give it, or leave"
                " hf_config out",
                (f"{key}.hf_config", f"{key}.path"),
            )
        yield from checkpoint_conflicts(key, path, hf_config, dry_run, scores=scores)


def checkpoint_conflicts(
    section: str, path: str | None, hf_config: str | None, dry_run: bool, *, scores: bool = False
) -> Iterator[Conflict]:
    """Yield the problems of a description and of a checkpoint, of a reward model if it `scores`."""
    described, key = None, f"{section}.path"
    try:
        described = resolve_model(hf_config) if hf_config else None
    except ConfigError as error:
        yield Conflict(f"{section}.hf_config: {error}", (f"{section}.hf_config",))
    if path is None:
        return
    if not Path(path).is_dir():
        if not (dry_run and described):
            hint = f", or give {section}.hf_config" if dry_run else ""
            yield Conflict(f"{key}={path} is not a folder; {paths_hint(path)}{hint}", (key,))
        return
    if problems := checkpoint_problems(path):
        yield from (Conflict(f"{key}: {problem}", (key,)) for problem in problems)
        return
    shape = ModelShape.from_folder(path)
    if section == "model" and described not in (None, shape):
        yield Conflict(
            f"{section}.hf_config={hf_config} describes another model than {path}/config.json; leave hf_config out, or"
            " name the checkpoint's own config.json",
            (f"{section}.hf_config", key),
        )
    if scores and shape.num_labels != 1:
        found = f"{shape.num_labels} labels" if shape.num_labels else "no score head"
        yield Conflict(
            f"{key}={path} has {found}, a reward model gives one score; use a ...ForSequenceClassification checkpoint"
            " with num_labels=1",
            (key,),
        )


def _sharding(holder: ModelHolder, shape: ModelShape) -> Iterator[Conflict]:
    """Yield conflicts of the parallel sizes with the model's heads, widths, layers and experts."""
    key, sizes, keys = holder.sizes_key, holder.sizes, (holder.sizes_key, "model", f"{holder.key}.path")
    for problem in train_problems(shape, sizes):
        yield Conflict(f"{key}={sizes}: {problem}", keys)
    if (
        shape.experts
        and sizes.tp_size > 1
        and holder.role in TRAINED
        and not holder.settings.sequence_parallel
    ):
        off = f"{holder.name}.sequence_parallel"
        yield Conflict(
            f"{off}=false: Megatron-core trains experts at t={sizes.tp_size} with sequence parallelism alone; set"
            f" {off}=true, or t=1",
            (off, *keys),
        )


def _router_losses(holder: ModelHolder, shape: ModelShape) -> Iterator[Conflict]:
    """Yield losses of routers that a dense model does not have."""
    for name in ("router_aux_loss_coef", "router_z_loss_coef"):
        key, value = f"{holder.name}.{name}", getattr(holder.settings, name)
        if value and shape.experts is None:
            yield Conflict(
                f"{key}={value:g} needs a mixture of experts, found {shape.family}; set 0, or use another model",
                (key, "model", f"{holder.key}.path"),
            )


def _routing_replay(config: RunConfig, shape: ModelShape) -> Iterator[Conflict]:
    """Yield what prevents training with the experts that engines have chosen."""
    key = "rollout.routing_replay"
    if config.rollout.routing_replay and shape.experts is None:
        yield Conflict(
            f"{key}=true needs a mixture of experts, found {shape.family}; set {key}=false, or use another model",
            (key, "model"),
        )
    if config.rollout.routing_replay and isinstance(config.algorithm, ServedAlgorithm):
        yield Conflict(f"{key}=true is not read by a server, whose rows have no routes; leave it out", (key,))
    if config.rollout.routing_replay and shape.windows:
        yield Conflict(
            f"{key}=true is not supported for a model whose attention has a window ({max(shape.windows)} tokens), because"
            f" the engine lets go of what lies behind it; set {key}=false",
            (key, "model"),
        )


def _positions(config: RunConfig, holder: ModelHolder, shape: ModelShape) -> Iterator[Conflict]:
    """Yield a conflict between the longest row and the positions of a model, by default the actor's."""
    rollout, width = config.rollout, config.max_tokens
    if width > shape.max_positions and (holder.path or holder.role == "actor"):
        whose = f"those of {holder.key}.path={holder.path}," if holder.path else "the model's"
        keys: tuple[str, ...] = ("data.max_tokens",)
        exceeding = f"data.max_tokens={width} exceeds"
        if config.algorithm.generates:
            keys = WIDTHS
            exceeding = (
                f"rollout.max_prompt_tokens={rollout.max_prompt_tokens} + max_response_tokens="
                f"{rollout.max_response_tokens} = {width} tokens exceed"
            )
        yield Conflict(
            f"{exceeding} {whose} max_positions={shape.max_positions}; take {width - shape.max_positions} fewer",
            (*keys, f"{holder.key}.path" if holder.path else "model"),
        )


def _engines(
    config: RunConfig, shape: ModelShape, key: str, gen: GenSizes, train_tp_size: int, train_pp_size: int
) -> Iterator[Conflict]:
    """Yield conflicts of engines' sizes, given by `key`, with the model, and between one sequence and the KV cache.

    Engines on ranks of their own do not share weights with training shards: their training sizes are their own.
    """
    rollout, width = config.rollout, config.max_tokens
    for problem in gen_problems(shape, gen, train_tp_size):
        yield Conflict(f"{key}={gen}: {problem}", (key, "model"))
    if max(gen.pp_size, train_pp_size) > shape.num_layers:
        return
    needed = width * shape.kv_token_bytes(train_pp_size, gen.pp_size, gen.tp_size, config.model.dtype)
    if needed > rollout.kv_cache_bytes:
        yield Conflict(
            f"rollout.kv_cache_bytes={rollout.kv_cache_bytes} must hold one sequence of {width} tokens, which takes"
            f" {needed} bytes at p_g-t_g = {gen}; raise it to a multiple of {needed}",
            ("rollout.kv_cache_bytes", *WIDTHS, key, "model"),
        )


def _cpu_engines(config: RunConfig, shape: ModelShape) -> Iterator[Conflict]:
    """Yield requirements of vLLM on a CPU."""
    if config.cluster.device == "cpu" and config.rollout.cuda_graphs:
        yield Conflict(
            "rollout.cuda_graphs=true needs cluster.device=cuda, found cpu; leave it false",
            ("rollout.cuda_graphs", "cluster.device"),
        )
    if config.cluster.device == "cpu" and shape.head_dim % 32:
        yield Conflict(
            f"head_dim={shape.head_dim} is not a multiple of 32, which vLLM needs on a CPU; use another model, or"
            " cluster.device=cuda",
            ("model", "cluster.device"),
        )


def paths_hint(path: str) -> str:
    """Return the remedy for a path that does not exist."""
    start = "" if Path(path).is_absolute() else f", relative paths start at {Path.cwd()}"
    return f"name one that exists{start}"

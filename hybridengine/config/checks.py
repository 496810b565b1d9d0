"""Rules between the values of a configuration: sizes against ranks, model, widths and files.

Every rule gives its message and the keys that it concerns, so that a rule is left out where one of its keys is
already in question.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from hybridengine.config.algorithm import Role
from hybridengine.config.algorithm_checks import algorithm_conflicts
from hybridengine.config.conflicts import (
    Conflict,
    checkpoint_conflicts,
    described_model,
    own_checkpoint_conflicts,
    paths_hint,
)
from hybridengine.config.holders import ModelHolder, model_holders
from hybridengine.config.pool_checks import pool_conflicts, size_conflicts
from hybridengine.config.reward_checks import reward_model_conflicts, reward_sections, scorer_conflicts
from hybridengine.config.run_config import TRAINED, RunConfig, ranks_key
from hybridengine.config.sections import BUILT_TOKENS
from hybridengine.errors import CheckpointError, ConfigError
from hybridengine.model_presets import find_preset, resolve_model
from hybridengine.model_shapes import DTYPE_BYTES, ModelShape
from hybridengine.topology.sizes import GenSizes

PLACEMENT_KEYS = ("cluster.ranks_per_node", "cluster.pools", "rollout.kv_cache_bytes")
"""Beside the sizes of models and engines."""


def check_run(config: RunConfig, *, dry_run: bool = False) -> list[str]:
    """Every rule between values that `config` breaks, as value, rule and remedy; empty where it breaks none."""
    return [conflict.message for conflict in find_conflicts(config, dry_run=dry_run)]


def find_conflicts(config: RunConfig, *, dry_run: bool = False, placed: bool = True) -> list[Conflict]:
    """As `check_run`, each message with the keys that it concerns.

    Args:
        placed: whether the ranks, pools and sizes of `config` count; without them, rules that concern them are left out.
    """
    conflicts = _all_conflicts(config, dry_run)
    return conflicts if placed else [one for one in conflicts if not any(map(_is_placement, one.keys))]


def _is_placement(key: str) -> bool:
    """Whether a key says where a model is, or with which sizes, or what then is left of memory."""
    return key.endswith((".parallel", ".generate")) or key.startswith(PLACEMENT_KEYS)


def _all_conflicts(config: RunConfig, dry_run: bool) -> list[Conflict]:
    conflicts = [*_sources(config), *algorithm_conflicts(config), *scorer_conflicts(config)]
    conflicts += pool_conflicts(config)
    for holder in model_holders(config):
        conflicts += size_conflicts(config, holder.role, holder.sizes, holder.sizes_key)
    conflicts += [*_rows(config), *_schedules(config)]
    if not dry_run:
        conflicts += _files(config)
    conflicts += _models(config, dry_run)
    for holder in model_holders(config):
        shape = _shape_or_none(config, holder.path, holder.hf_config)
        if shape is not None:
            conflicts += [*_sharding(holder, shape), *_positions(config, holder, shape)]
    shape = _shape_or_none(config)
    conflicts += _engines(config, shape)
    if shape is not None:
        conflicts += _generation(config, shape)
    return conflicts


def model_shape(config: RunConfig, role: Role = "actor") -> ModelShape:
    """Shape of a role's model: of its checkpoint, of the model to build, or of `model.hf_config`.

    Raises:
        ConfigError, CheckpointError: the model is not described, or cannot be used.
    """
    section = getattr(config, role)
    return _shape(config, getattr(section, "path", None), getattr(section, "hf_config", None))


def holder_shape(config: RunConfig, holder: ModelHolder) -> ModelShape:
    """As `model_shape`, of anything with weights; with a score head where it has one."""
    shape = _shape(config, holder.path, holder.hf_config)
    return replace(shape, num_labels=1, tied_embeddings=False) if holder.has_score_head else shape


def _shape(config: RunConfig, path: str | None, hf_config: str | None = None) -> ModelShape:
    """Shape of the checkpoint at `path`, which `hf_config` describes where it is elsewhere; without one, of the actor's
    model."""
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


def _shape_or_none(
    config: RunConfig, path: str | None = None, hf_config: str | None = None
) -> ModelShape | None:
    """As `_shape`; None where there is none to check, which `_models` then says."""
    try:
        return _shape(config, path, hf_config)
    except (ConfigError, CheckpointError):
        return None


def _sources(config: RunConfig) -> Iterator[Conflict]:
    """Either-or keys, and keys that need one another."""
    model, data = config.model, config.data
    yield from _exactly_one("model", {"path": model.path, "gguf": model.gguf, "build": model.build})
    yield from _exactly_one("data", {"train_file": data.train_file, "task": data.task})
    if model.gguf is not None and model.hf_config is None:
        yield Conflict(
            f"model.gguf={model.gguf} needs model.hf_config; name the config.json of the same model",
            ("model.gguf", "model.hf_config"),
        )
    elif model.gguf is not None and (
        find_preset(model.hf_config or "") or Path(model.hf_config or "").is_dir()
    ):
        yield Conflict(
            f"model.hf_config={model.hf_config} must be a file to convert model.gguf={model.gguf}, which needs more than"
            " the shapes; name the config.json of the same model",
            ("model.gguf", "model.hf_config"),
        )
    if data.task is not None and data.eval_file is not None:
        yield Conflict(
            f"data.eval_file={data.eval_file} is not read, since data.task generates the held-out rows;"
            " leave one of them out",
            ("data.eval_file", "data.task"),
        )
    if config.warmup is not None and config.warmup.file is None and data.task is None:
        yield Conflict(
            "warmup needs demonstrations; give warmup.file, or data.task, or leave warmup out",
            ("warmup.file", "data.task"),
        )
    for name in ("terms", "digits") if data.task is not None else ():
        low, high = getattr(data.task, f"min_{name}"), getattr(data.task, f"max_{name}")
        if low > high:
            yield Conflict(
                f"data.task.min_{name}={low} exceeds data.task.max_{name}={high}; lower the one or raise the other",
                (f"data.task.min_{name}", f"data.task.max_{name}"),
            )


def _exactly_one(section: str, values: dict[str, object]) -> Iterator[Conflict]:
    given = [name for name, value in values.items() if value is not None]
    if len(given) != 1:
        found = " and ".join(given) if given else "none"
        yield Conflict(
            f"{section} must be given by exactly one of {', '.join(values)}, found {found};"
            f" {'leave out all but one' if given else 'add one'}",
            tuple(f"{section}.{name}" for name in values),
        )


def _engines(config: RunConfig, shape: ModelShape | None) -> Iterator[Conflict]:
    """(p_g, t_g) against the ranks and the model; the remedy names the nearest sizes that keep every rule."""
    gen, train = config.actor.gen_sizes, config.actor.train_sizes

    def problems(sizes: GenSizes) -> list[str]:
        if shape is None:
            return []
        return shape.gen_pp_problems(sizes.pp_size) + shape.gen_tp_problems(sizes.tp_size, train.tp_size)

    for problem in gen.problems_over(train, lambda sizes: not problems(sizes)):
        yield Conflict(f"actor.generate={gen}: {problem}", ("actor.generate", "actor.parallel"))
    nearest = [str(sizes) for sizes in gen.nearest_over(train, lambda sizes: not problems(sizes))]
    hint = f"; the nearest p_g-t_g that can be: {', '.join(nearest)}" if nearest else ""
    for problem in problems(gen):
        yield Conflict(f"actor.generate={gen}: {problem}{hint}", ("actor.generate", "model"))


def _sharding(holder: ModelHolder, shape: ModelShape) -> Iterator[Conflict]:
    """t against heads and MLP width, p against layers."""
    key, sizes, keys = holder.sizes_key, holder.sizes, (holder.sizes_key, "model", f"{holder.key}.path")
    for problem in shape.tp_problems(sizes.tp_size):
        yield Conflict(f"{key}={sizes}: {problem}", keys)
    try:
        shape.split_layers(sizes.pp_size)
    except ConfigError as error:
        yield Conflict(f"{key}={sizes}: {error}", keys)


WIDTHS = ("rollout.max_prompt_tokens", "rollout.max_response_tokens")


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


def _generation(config: RunConfig, shape: ModelShape) -> Iterator[Conflict]:
    """One sequence against the KV cache, and what vLLM needs on a CPU."""
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


def _rows(config: RunConfig) -> Iterator[Conflict]:
    """Rows of an iteration against the replicas that share them, one row against a micro-batch.

    Optimizer steps need as many rows on every replica, since their losses are means over rows of replicas. Engines and
    models that only compute need not.
    """
    rows, row_keys = config.rows_per_step, ("data.batch_size", "rollout.samples_per_prompt")
    rows_text = (
        f"data.batch_size={config.data.batch_size} · rollout.samples_per_prompt="
        f"{config.rollout.samples_per_prompt} = {rows} rows"
    )
    yield from _rows_for_every_rank(config)
    for holder in model_holders(config):
        role, section, sizes, key = holder.key, holder.section, holder.sizes, holder.sizes_key
        replicas, mini_batches = sizes.dp_size, getattr(section, "mini_batches", None)
        if mini_batches is None:
            if rows < replicas:
                yield Conflict(
                    f"{rows_text} leave nothing for some of the d = {replicas} replicas of {key}={sizes}; choose at"
                    f" least {replicas}, or fewer replicas",
                    (*row_keys, key),
                )
        elif rows % (parts := replicas * mini_batches):
            among = f"{mini_batches} mini-batches of {role} and " if mini_batches > 1 else ""
            yield Conflict(
                f"{rows_text} must split evenly over {among}the d = {replicas} replicas of {key}={sizes}; choose a"
                f" multiple of {parts}",
                (*row_keys, key, f"{role}.mini_batches"),
            )
        num_kept = config.algorithm.rows_per_unit if role == "actor" else 1
        needed = config.max_tokens * num_kept
        if section.micro_batch_tokens < needed:
            what = "one row" if num_kept == 1 else f"{num_kept} rows, which stay together,"
            yield Conflict(
                f"{role}.micro_batch_tokens={section.micro_batch_tokens} must hold {what} of {config.max_tokens}"
                f" tokens (prompt and response); raise it to at least {needed}",
                (f"{role}.micro_batch_tokens", "rollout.max_prompt_tokens", "rollout.max_response_tokens"),
            )
    if config.warmup is not None and config.warmup.batch_size % config.actor.train_sizes.dp_size:
        replicas = config.actor.train_sizes.dp_size
        yield Conflict(
            f"warmup.batch_size={config.warmup.batch_size} must split evenly over the d = {replicas} replicas of"
            f" actor.parallel={config.actor.parallel}; choose a multiple of {replicas}",
            ("warmup", "actor.parallel"),
        )


def _rows_for_every_rank(config: RunConfig) -> Iterator[Conflict]:
    """Ranks that score or compute by themselves: each needs a row, or it would miss its peers."""
    row_keys = ("data.batch_size", "rollout.samples_per_prompt")
    for role, num_rows in rows_for_every_rank(config).items():
        name = config.pool_of(role)
        pool, key = config.pools[name], ranks_key(name)
        if num_rows < pool.num_ranks:
            what = "computes on" if role == "actor" else f"calls the functions of {role} for"
            yield Conflict(
                f"each of the {pool.num_ranks} ranks of {key}={list(pool.ranks_per_node)} {what} rows of its own, and"
                f" data.batch_size={config.data.batch_size} · rollout.samples_per_prompt="
                f"{config.rollout.samples_per_prompt} leave {num_rows} for all of them; raise data.batch_size,"
                " or take fewer ranks",
                (*row_keys, key),
            )


def rows_for_every_rank(config: RunConfig) -> dict[Role, int]:
    """Role -> rows of a call that all ranks of the role's pool share out, each at least one."""
    needs: dict[Role, int] = {"actor": config.rows_per_step}
    for role, section in reward_sections(config).items():
        if section.functions:
            needs[role] = config.algorithm.scored_rows(config.data.batch_size, config.rows_per_step)
    return needs


def _schedules(config: RunConfig) -> Iterator[Conflict]:
    """Learning-rate schedules against the length of the run."""
    for role in (role for role in TRAINED if role in config.model_roles):
        section = getattr(config, role)
        optimizer, prefix = section.optimizer, f"{role}.optimizer"
        steps = config.run.steps * section.ppo_epochs * section.mini_batches
        if optimizer.warmup_steps and optimizer.warmup_steps >= steps:
            yield Conflict(
                f"{prefix}.warmup_steps={optimizer.warmup_steps} must be fewer than the run's {steps} optimizer steps;"
                f" choose at most {steps - 1}",
                (f"{prefix}.warmup_steps", "run.steps", f"{role}.ppo_epochs", f"{role}.mini_batches"),
            )
        if optimizer.min_lr > optimizer.lr:
            yield Conflict(
                f"{prefix}.min_lr={optimizer.min_lr} exceeds {prefix}.lr={optimizer.lr}; lower min_lr",
                (f"{prefix}.min_lr", f"{prefix}.lr"),
            )


def _files(config: RunConfig) -> Iterator[Conflict]:
    """Files that must be there before anything starts."""
    for key, path in (
        ("data.train_file", config.data.train_file),
        ("data.eval_file", config.data.eval_file),
        ("warmup.file", config.warmup and config.warmup.file),
    ):
        if path is not None and not Path(path).is_file():
            yield Conflict(f"{key}={path} is not a file; {paths_hint(path)}", (key,))
    gguf = config.model.gguf
    if gguf is not None:
        package, colon, _ = gguf.rpartition(":")
        file = config.model.gguf_file
        if file is None:
            yield Conflict(
                f"model.gguf={gguf}: package {package} is not installed; install it", ("model.gguf",)
            )
        elif not file.is_file():
            remedy = f"name a file of package {package}" if colon else paths_hint(gguf)
            yield Conflict(f"model.gguf={gguf} is not a file; {remedy}", ("model.gguf",))
    tokenizer = config.model.tokenizer
    if tokenizer is not None and not Path(tokenizer).is_dir():
        yield Conflict(
            f"model.tokenizer={tokenizer} is not a folder; {paths_hint(tokenizer)}", ("model.tokenizer",)
        )


def _models(config: RunConfig, dry_run: bool) -> Iterator[Conflict]:
    """Every checkpoint, and every description of a model, that the configuration names."""
    model = config.model
    described, problems = described_model("model", model.hf_config)
    yield from problems
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
    elsewhere = dry_run and described is not None and not Path(model.path or "").is_dir()
    if model.path is not None and not elsewhere:
        hint = ", or give model.hf_config" if dry_run else ""
        problems = list(checkpoint_conflicts("model.path", model.path, hint))
        yield from problems
        if model.hf_config and described and not problems and described != ModelShape.from_folder(model.path):
            yield Conflict(
                f"model.hf_config={model.hf_config} describes another model than {model.path}/config.json;"
                " leave hf_config out, or name the checkpoint's own config.json",
                ("model.hf_config", "model.path"),
            )
    for role in ("critic", "cost_critic"):
        section = getattr(config, role)
        if role in config.model_roles:
            yield from own_checkpoint_conflicts(role, section.path, section.hf_config, dry_run=dry_run)
    yield from reward_model_conflicts(config, dry_run=dry_run)

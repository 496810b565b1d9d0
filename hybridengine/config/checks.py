"""Rules between configuration values: dependent and exclusive keys, ranks, rows, schedules and files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from hybridengine.config.algorithm import Conflict, Role
from hybridengine.config.episode_checks import episode_conflicts
from hybridengine.config.generation_checks import generation_conflicts
from hybridengine.config.judge_checks import judge_conflicts
from hybridengine.config.loss_checks import loss_conflicts
from hybridengine.config.model_checks import model_conflicts, paths_hint
from hybridengine.config.reward_checks import reward_conflicts
from hybridengine.config.rollout_checks import rollout_conflicts
from hybridengine.config.row_checks import row_conflicts
from hybridengine.config.run_config import TRAINED, RunConfig, model_holders, ranks_key
from hybridengine.config.sections import MAIN_POOL
from hybridengine.errors import shown
from hybridengine.models.presets import find_preset
from hybridengine.topology.sizes import TrainSizes

SERVED = (
    "model",
    "cluster.",
    "actor.",
    "generation.parallel",
    "reference.",
    "rollout.",
    "timeouts.",
    "faults.",
    "serve.",
)
"""Beginnings of the keys that a server reads."""
PLACEMENT_KEYS = ("cluster.ranks_per_node", "cluster.pools", "rollout.kv_cache_bytes")


def check_run(config: RunConfig, *, dry_run: bool = False) -> list[str]:
    """Return every violated rule between values of `config`, as value, rule and remedy."""
    return [conflict.message for conflict in find_conflicts(config, dry_run=dry_run)]


def find_conflicts(
    config: RunConfig, *, dry_run: bool = False, placed: bool = True, serves: bool = False
) -> list[Conflict]:
    """Return the messages of `check_run` with their keys; `placed` includes rules about ranks, pools and sizes.

    With `serves`, only rules between keys that a server reads are checked.
    """
    found = [
        *_sources(config),
        *_algorithm(config),
        *reward_conflicts(config),
        *_pools(config),
        *generation_conflicts(config),
        *episode_conflicts(config),
        *rollout_conflicts(config),
    ]
    for holder in model_holders(config):
        found += _sizes(config, holder.role, holder.sizes, holder.sizes_key)
    found += [*row_conflicts(config), *_schedules(config)]
    if not dry_run:
        found += _files(config)
    found += [*model_conflicts(config, dry_run), *judge_conflicts(config, dry_run)]
    if serves:
        found = [one for one in found if all(key.startswith(SERVED) for key in one.keys)]
        found += _served_pools(config)
    return [one for one in found if placed or not any(map(_is_placement, one.keys))]


def _is_placement(key: str) -> bool:
    """True if a key sets the placement or sizes of a model, or the size of the KV cache."""
    return key.endswith((".parallel", ".generate")) or key.startswith(PLACEMENT_KEYS)


def _sources(config: RunConfig) -> Iterator[Conflict]:
    """Yield keys that exclude or require one another."""
    model, data = config.model, config.data
    yield from _exactly_one("model", {"path": model.path, "gguf": model.gguf, "build": model.build})
    sources = {"train_file": data.train_file, "task": data.task, "environment": data.environment}
    yield from _exactly_one("data", sources)
    described = model.hf_config
    if model.gguf is not None and (described is None or find_preset(described) or Path(described).is_dir()):
        yield Conflict(
            f"model.gguf={model.gguf} needs a file model.hf_config, found {described or 'none'}; name the config.json"
            " of the same model",
            ("model.gguf", "model.hf_config"),
        )
    for name in ("task", "environment"):
        if getattr(data, name) is not None and data.eval_file is not None:
            yield Conflict(
                f"data.eval_file={data.eval_file} is not read, since data.{name} generates the held-out rows;"
                " leave one of them out",
                ("data.eval_file", f"data.{name}"),
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


def _algorithm(config: RunConfig) -> Iterator[Conflict]:
    """Yield keys that require one another, and unused keys."""
    algorithm, samples = config.algorithm, config.sequences_per_row
    named = f"algorithm.name={algorithm.name}"
    if samples < algorithm.min_samples:
        yield Conflict(
            f"rollout.samples_per_prompt={samples} leaves {named} nothing to compare; choose at least"
            f" {algorithm.min_samples}",
            ("rollout.samples_per_prompt", "algorithm.name"),
        )
    correction = algorithm.correction
    if correction is not None and algorithm.uncorrected is not None:
        yield Conflict(
            f"algorithm.correction is not read by {named}, {algorithm.uncorrected}; leave it out",
            ("algorithm.correction", "algorithm.name"),
        )
    if correction is not None:
        yield from correction.conflicts()
    if (overlong := algorithm.overlong) is not None:
        yield from overlong.conflicts(config.rollout.max_response_tokens)
        if not algorithm.reads_overlong:
            yield Conflict(
                f"algorithm.overlong is not read by {named}, which computes no advantages; leave it out",
                ("algorithm.overlong", "algorithm.name"),
            )
    yield from loss_conflicts(config)
    roles = ", ".join(algorithm.roles)
    if algorithm.generates and "reward" not in algorithm.roles and config.eval_file is not None:
        generated = "data.task" if config.data.task else "data.environment"
        held_out = "data.eval_file" if config.data.eval_file else generated
        yield Conflict(
            f"{named} has the roles {roles}, without the reward, which scores the held-out prompts of {held_out}; add"
            " it to the roles of the class",
            ("algorithm.name", "data.eval_file", "data.task"),
        )
    yield from algorithm.conflicts(config)


def _pools(config: RunConfig) -> Iterator[Conflict]:
    """Yield roles that are in two pools, or that the algorithm does not use."""
    used, taken = config.algorithm.roles, dict[Role, str]()
    for name, pool in config.cluster.pools.items():
        key = f"cluster.pools.{name}.roles"
        for role in pool.roles:
            if role not in used:
                yield Conflict(
                    f"{key} names {role}, which algorithm.name={config.algorithm.name} does not use; leave it out (its"
                    f" roles are {', '.join(used)})",
                    (key, "algorithm.name"),
                )
            elif role in taken:
                where = "twice" if taken[role] == name else f"and so does cluster.pools.{taken[role]}"
                yield Conflict(
                    f"{key} names {role}, {where}; a role is on one pool, leave one of them out",
                    (key, f"cluster.pools.{taken[role]}.roles"),
                )
            taken.setdefault(role, name)


def _served_pools(config: RunConfig) -> Iterator[Conflict]:
    """Yield pools of roles that a server does not have."""
    for name, pool in config.cluster.pools.items():
        unused = [role for role in pool.roles if role not in config.algorithm.roles]
        if unused:
            yield Conflict(
                f"cluster.pools.{name}.roles names {', '.join(unused)}, and this server has"
                f" {', '.join(config.algorithm.roles)}; leave the others out (serve.reference=true adds reference)",
                (f"cluster.pools.{name}.roles", "serve.reference"),
            )


def _sizes(config: RunConfig, role: Role, sizes: TrainSizes, key: str) -> Iterator[Conflict]:
    """Yield a conflict between p·t·d of a model, given by `key`, and the ranks of its role's pool."""
    name = config.pool_of(role)
    pool = config.pools[name]
    if sizes.num_ranks == pool.num_ranks:
        return
    pool_key = ranks_key(name)
    product = f"{sizes.factors} = {sizes.num_ranks}"
    replicas, rest = divmod(pool.num_ranks, sizes.replica_size)
    nearest = "other sizes" if rest or not replicas else str(replace(sizes, dp_size=replicas))
    inherited = name != MAIN_POOL and key == "actor.parallel"
    remedy = f"give {role} sizes of its own, {nearest}," if inherited else f"choose {nearest},"
    yield Conflict(
        f"{key}={sizes} takes {sizes.product} = {product} ranks, which must equal the {pool.num_ranks} of"
        f" {pool_key}={shown(pool.ranks_per_node)}{f' that {role} is on' if inherited else ''}; {remedy} or give the"
        f" {'cluster' if name == MAIN_POOL else 'pool'} {sizes.num_ranks} ranks",
        (key, pool_key, *(("cluster.pools",) if inherited else ())),
    )


def _schedules(config: RunConfig) -> Iterator[Conflict]:
    """Yield conflicts between learning-rate schedules and the length of the run."""
    for role in (role for role in TRAINED if role in config.model_roles):
        section = getattr(config, role)
        optimizer, prefix = section.optimizer, f"{role}.optimizer"
        iterations = config.run.steps + 1 - config.algorithm.first_update(role)
        steps = iterations * section.ppo_epochs * section.mini_batches
        if optimizer.warmup_steps and optimizer.warmup_steps >= steps > 0:
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
    """Yield files that are required at the start and missing."""
    for key, path in (
        ("data.train_file", config.data.train_file),
        ("data.eval_file", config.data.eval_file),
        ("warmup.file", config.warmup and config.warmup.file),
        ("generation.replay", config.generation.replay),
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
    template = config.model.chat_template
    if template is not None and not Path(template).is_file():
        yield Conflict(
            f"model.chat_template={template} is not a file; {paths_hint(template)}", ("model.chat_template",)
        )

"""Rules between the rows of an iteration, and the replicas, micro-batches and ranks that divide them."""

from __future__ import annotations

from collections.abc import Iterator

from hybridengine.config.algorithm import Conflict, Role
from hybridengine.config.run_config import RunConfig, model_holders, ranks_key, reward_sections
from hybridengine.errors import shown


def row_conflicts(config: RunConfig) -> Iterator[Conflict]:
    """Yield conflicts between the rows of an iteration and replicas, and between one row and a micro-batch.

    Optimizer steps need the same number of rows on every replica; models that only run forward do not.
    """
    rows, row_keys = config.rows_per_step, _row_keys(config)
    rows_text = f"{_rows_text(config)} = {rows} rows"
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
        needed, generates = config.max_tokens * num_kept, config.algorithm.generates
        limits = ("rollout.max_prompt_tokens", "rollout.max_response_tokens")
        if section.micro_batch_tokens < needed:
            what = "one row" if num_kept == 1 else f"{num_kept} rows, which stay together,"
            yield Conflict(
                f"{role}.micro_batch_tokens={section.micro_batch_tokens} must hold {what} of {config.max_tokens}"
                f" tokens ({'prompt and response' if generates else 'data.max_tokens'}); raise it to at least {needed}",
                (f"{role}.micro_batch_tokens", *(limits if generates else ("data.max_tokens",))),
            )
    if config.warmup is not None and config.warmup.batch_size % config.actor.parallel.dp_size:
        replicas = config.actor.parallel.dp_size
        yield Conflict(
            f"warmup.batch_size={config.warmup.batch_size} must split evenly over the d = {replicas} replicas of"
            f" actor.parallel={config.actor.parallel}; choose a multiple of {replicas}",
            ("warmup", "actor.parallel"),
        )


def _rows_for_every_rank(config: RunConfig) -> Iterator[Conflict]:
    """Yield groups whose ranks work on rows individually and have fewer rows than ranks: every rank needs a row."""
    for role, num_rows in rows_for_every_rank(config).items():
        name = config.pool_of(role)
        pool, key = config.pools[name], ranks_key(name)
        if num_rows < pool.num_ranks:
            what = "computes on" if role == "actor" else f"calls the scorers of {role} for"
            yield Conflict(
                f"each of the {pool.num_ranks} ranks of {key}={shown(pool.ranks_per_node)} {what} rows of its own, and"
                f" {_rows_text(config)} leave {num_rows} for all of them; raise data.batch_size, or take fewer ranks",
                (*_row_keys(config), key),
            )


def _row_keys(config: RunConfig) -> tuple[str, ...]:
    """Return the keys of the number of rows of an iteration."""
    generates = config.algorithm.generates
    return ("data.batch_size", "rollout.samples_per_prompt" if generates else "algorithm.name")


def _rows_text(config: RunConfig) -> str:
    """Return the product that is the number of rows of an iteration, as text."""
    batch = f"data.batch_size={config.data.batch_size}"
    if config.algorithm.generates:
        return f"{batch} · rollout.samples_per_prompt={config.rollout.samples_per_prompt}"
    return f"{batch} · {config.sequences_per_row} of algorithm.name={config.algorithm.name}"


def rows_for_every_rank(config: RunConfig) -> dict[Role, int]:
    """Return, by role, the number of rows of a call that is split over all ranks of the role's pool."""
    needs: dict[Role, int] = {"actor": config.rows_per_step}
    for role, section in reward_sections(config).items():
        if section.are_called:
            needs[role] = config.algorithm.scored_rows(config.data.batch_size, config.rows_per_step)
    return needs

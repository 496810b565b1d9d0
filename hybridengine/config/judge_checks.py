"""Rules of generative judges: what they are asked, how verdicts are read, and their models on the ranks of the pool."""

from __future__ import annotations

import re
from collections.abc import Iterator

from hybridengine.config.algorithm import Conflict
from hybridengine.config.judge_section import JudgeSection
from hybridengine.config.model_checks import checkpoint_conflicts, shape_at
from hybridengine.config.reward_sections import ScorerSection, scorer_key
from hybridengine.config.run_config import RunConfig, ranks_key, reward_sections
from hybridengine.config.structure_checks import structure_conflicts
from hybridengine.errors import shown
from hybridengine.topology.fitting import gen_problems

LOWEST_TEMPERATURE = 0.01
"""Lowest temperature above 0 that vLLM uses unchanged."""


def judge_conflicts(config: RunConfig, dry_run: bool) -> Iterator[Conflict]:
    """Yield the violated rules of all judges."""
    for name, section in reward_sections(config).items():
        for term, judge in section.judges.items():
            key, scorer = scorer_key(name, term), section.scorers[term]
            yield from _texts(f"{key}.judge", judge)
            yield from _draws(f"{key}.judge", judge)
            yield from _ranks(config, config.pool_of(name), f"{key}.judge", judge)
            if scorer.path is not None:
                problems = list(checkpoint_conflicts(key, scorer.path, scorer.hf_config, dry_run))
                yield from problems or _model(config, key, judge, scorer)


def _texts(key: str, judge: JudgeSection) -> Iterator[Conflict]:
    """Yield problems of the prompt and of reading the verdict."""
    if bool(judge.messages) == bool(judge.text):
        found = "both" if judge.text else "none"
        yield Conflict(
            f"{key} must have exactly one of messages and text, found {found}; write the judge's prompt as one of them",
            (f"{key}.messages", f"{key}.text"),
        )
    elif not any("{response}" in text for text in (judge.text, *(one.content for one in judge.messages))):
        name = f"{key}.{'text' if judge.text else 'messages'}"
        yield Conflict(
            f"{name} must contain {{response}}, which the judge would not see otherwise; add it", (name,)
        )
    if bool(judge.regex) == (judge.parser is not None):
        found = "both" if judge.regex else "none"
        yield Conflict(
            f"{key} must have exactly one of regex and parser, found {found}; give one that reads the score of a verdict",
            (f"{key}.regex", f"{key}.parser"),
        )
    if judge.regex:
        try:
            groups = re.compile(judge.regex).groups
        except re.error as error:
            yield Conflict(
                f"{key}.regex={judge.regex!r} is no regular expression ({error}); correct it",
                (f"{key}.regex",),
            )
        else:
            if groups != 1:
                yield Conflict(
                    f"{key}.regex={judge.regex!r} has {groups} groups, and the score is what the only group matches; put"
                    " parentheses around the number alone, and write other groups as (?:...)",
                    (f"{key}.regex",),
                )
    if judge.range is not None and judge.range[0] > judge.range[1]:
        yield Conflict(
            f"{key}.range={list(judge.range)} has no number; write the smaller bound first", (f"{key}.range",)
        )
    if judge.on_unparsed != "score" and judge.unparsed_score:
        yield Conflict(
            f"{key}.unparsed_score={judge.unparsed_score:g} is not read with {key}.on_unparsed={judge.on_unparsed}; set"
            f" {key}.on_unparsed=score, or leave it out",
            (f"{key}.unparsed_score", f"{key}.on_unparsed"),
        )
    if judge.structure is not None:
        yield from structure_conflicts(f"{key}.structure", judge.structure)


def _draws(key: str, judge: JudgeSection) -> Iterator[Conflict]:
    """Yield draws that the engine does not make, or makes several times alike."""
    if 0 < judge.temperature < LOWEST_TEMPERATURE:
        yield Conflict(
            f"{key}.temperature={judge.temperature:g} must be 0, or from {LOWEST_TEMPERATURE} to 2; choose another",
            (f"{key}.temperature",),
        )
    if judge.samples > 1 and not judge.temperature:
        yield Conflict(
            f"{key}.samples={judge.samples} verdicts would be equal at {key}.temperature=0; raise it, or leave"
            " samples at 1",
            (f"{key}.samples", f"{key}.temperature"),
        )


def _ranks(config: RunConfig, name: str, key: str, judge: JudgeSection) -> Iterator[Conflict]:
    """Yield ranks that engines do not divide, and engines without rows."""
    pool, sizes = config.pools.get(name), judge.engine
    if pool is None:
        return
    engines, rest = divmod(pool.num_ranks, sizes.num_ranks)
    if rest:
        yield Conflict(
            f"{key}.engine={sizes} takes {sizes.num_ranks} ranks for an engine, which must divide the {pool.num_ranks} of"
            f" {ranks_key(name)}={shown(pool.ranks_per_node)}; choose other sizes",
            (f"{key}.engine", ranks_key(name)),
        )
    elif (rows := config.algorithm.scored_rows(config.data.batch_size, config.rows_per_step)) < engines:
        yield Conflict(
            f"data.batch_size={config.data.batch_size} · rollout.samples_per_prompt={config.rollout.samples_per_prompt}"
            f" leave {rows} rows for the {engines} engines of {key}.engine={sizes}; raise it, or choose larger"
            " engines",
            ("data.batch_size", "rollout.samples_per_prompt", f"{key}.engine"),
        )


def _model(config: RunConfig, key: str, judge: JudgeSection, scorer: ScorerSection) -> Iterator[Conflict]:
    """Yield conflicts of a judge's model with the engine."""
    where, shape = f"{key}.path={scorer.path}", shape_at(scorer.path, scorer.hf_config)
    if shape.num_labels:
        yield Conflict(
            f"{where} has a score head, and a judge answers in words; use a ...ForCausalLM, or {key}.kind=model",
            (f"{key}.path", f"{key}.kind"),
        )
    sizes, width = judge.engine, judge.max_prompt_tokens + judge.max_tokens
    widths = (f"{key}.judge.max_prompt_tokens", f"{key}.judge.max_tokens")
    for problem in gen_problems(shape, sizes, sizes.tp_size):
        yield Conflict(f"{key}.judge.engine={sizes}: {problem}", (f"{key}.judge.engine", f"{key}.path"))
    sum_text = f"max_prompt_tokens={judge.max_prompt_tokens} + max_tokens={judge.max_tokens} = {width} tokens"
    if width > shape.max_positions:
        yield Conflict(
            f"{key}.judge.{sum_text} exceed the max_positions={shape.max_positions} of {where}; lower them by"
            f" {width - shape.max_positions}",
            (*widths, f"{key}.path"),
        )
    if sizes.pp_size <= shape.num_layers:
        needed = width * shape.kv_token_bytes(sizes.pp_size, sizes.pp_size, sizes.tp_size, config.model.dtype)
        if needed > judge.kv_cache_bytes:
            yield Conflict(
                f"{key}.judge.kv_cache_bytes={judge.kv_cache_bytes} must hold one sequence of {sum_text}, which takes"
                f" {needed} bytes at p_g-t_g = {sizes}; raise it to a multiple of {needed}",
                (f"{key}.judge.kv_cache_bytes", *widths),
            )
    if config.cluster.device == "cpu" and shape.head_dim % 32:
        yield Conflict(
            f"head_dim={shape.head_dim} of {where} is not a multiple of 32, which vLLM needs on a CPU; use another model,"
            " or cluster.device=cuda",
            (f"{key}.path", "cluster.device"),
        )

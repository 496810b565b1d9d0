"""Rules between values: sizes, rows, widths, schedules and sources, with value, rule and remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridengine.config import check_run, load_config
from hybridengine.config.algorithm import Algorithm
from tests.unit.test_config import problems_of


def test_the_configurations_of_these_tests_are_valid(built: Path, from_checkpoint: Path) -> None:
    for path in (built, from_checkpoint):
        assert check_run(load_config(path)) == []


@pytest.mark.parametrize(
    ("overrides", "messages"),
    [
        (  # sizes that do not multiply to the number of ranks
            ["critic.parallel=1-2-1"],
            [
                "critic.parallel=1-2-1 takes p·t·d = 1·2·1 = 2 ranks, which must equal the 4 of"
                " cluster.ranks_per_node=[4]; choose 1-2-2, or give the cluster 2 ranks"
            ],
        ),
        (
            ["cluster.ranks_per_node=[3,2]", "critic.parallel=2-2-1"],
            [
                "actor.parallel=2-2-1 takes p·t·d = 2·2·1 = 4 ranks, which must equal the 5 of"
                " cluster.ranks_per_node=[3, 2]; choose other sizes, or give the cluster 4 ranks",
                "critic.parallel=2-2-1 takes",
                "reference",
            ],
        ),
        (  # t and heads
            ["actor.parallel=1-4-1"],
            [
                "actor.parallel=1-4-1: t=4 does not divide num_kv_heads=2; choose 1 or 2",
            ],
        ),
        (
            ["critic.parallel=1-4-1", "model.build.num_kv_heads=4", "model.build.num_heads=4"],
            [],
        ),
        (  # p and layers
            ["cluster.ranks_per_node=[8]", "actor.parallel=8-1-1", "critic.parallel=4-2-1"],
            [
                "actor.parallel=8-1-1: p=8 pipeline stages need as many layers, the model has num_layers=4;"
                " choose p <= 4"
            ],
        ),
        (  # engines and ranks, and engines and the model
            ["actor.generate=1-3"],
            [
                "actor.generate=1-3: an engine's p_g·t_g = 1·3 = 3 ranks do not divide the 4 ranks of training 2-2-1;"
                " choose p_g·t_g from 1, 2, 4",
                "actor.generate=1-3: t_g=3 does not divide num_heads=4; choose t_g from 1, 2 or 4",
                "actor.generate=1-3: t_g=3 neither divides num_kv_heads=2 nor is a multiple of it;",
                "actor.generate=1-3: t_g=3 does not divide 64, which is vocab_size=57 padded to",
            ],
        ),
        (["actor.generate=3-1"], ["p_g·t_g = 3·1 = 3 ranks do not divide the 4 ranks"]),
        (
            ["actor.generate=4-4"],
            ["16 ranks do not divide the 4 ranks of training 2-2-1; choose p_g·t_g from"],
        ),
        (["actor.generate=1-4"], []),  # an engine of all ranks, each KV head on two of them
        (["actor.generate=4-1"], []),  # more stages than training has
        (
            [
                "cluster.ranks_per_node=[6]",
                "actor.parallel=3-2-1",
                "critic.parallel=3-2-1",
                "actor.generate=2-1",
                "data.batch_size=6",
            ],
            [],
        ),
        (
            [
                "cluster.ranks_per_node=[8]",
                "actor.parallel=2-2-2",
                "critic.parallel=2-2-2",
                "actor.generate=8-1",
            ],
            [
                "actor.generate=8-1: p_g=8 pipeline stages need as many layers, the model has num_layers=4;"
                " choose p_g <= 4"
            ],
        ),
        (
            ["actor.generate=1-4", "model.build.num_heads=6"],
            ["actor.generate=1-4: t_g=4 does not divide num_heads=6; choose t_g from 1 or 2"],
        ),
        (
            [
                "actor.generate=1-3",
                "model.build=null",
                "model.path=/no/model",
            ],  # the model is unknown
            [
                "3 ranks do not divide the 4 ranks of training 2-2-1; choose p_g·t_g from 1, 2, 4",
                "/no/model",
            ],
        ),
        (  # widths
            ["rollout.max_prompt_tokens=100"],
            [
                "rollout.max_prompt_tokens=100 + max_response_tokens=64 = 164 tokens exceed the model's"
                " max_positions=128; take 36 fewer"
            ],
        ),
        (
            ["rollout.kv_cache_bytes=262143"],  # 2 · 4 layers · 2 KV heads · 32 · 4 bytes · 128 tokens
            [
                "rollout.kv_cache_bytes=262143 must hold one sequence of 128 tokens, which takes 262144 bytes at"
                " p_g-t_g = 1-1; raise it to a multiple of 262144"
            ],
        ),
        (["rollout.kv_cache_bytes=256KiB"], []),
        (["rollout.kv_cache_bytes=64KiB", "actor.generate=2-2"], []),  # a quarter of it on each rank
        (
            ["critic.micro_batch_tokens=100"],
            [
                "critic.micro_batch_tokens=100 must hold one row of 128 tokens (prompt and response);"
                " raise it to at least 128"
            ],
        ),
        (
            ["model.build.head_dim=16", "cluster.device=cpu"],
            ["head_dim=16 is not a multiple of 32, which vLLM needs on a CPU; use another model, or"],
        ),
        (["model.build.head_dim=16", "cluster.device=cuda"], []),
        (["data.batch_size=6"], []),  # rows: engines may have different numbers of them
        (["data.batch_size=6", "reference.parallel=1-1-4"], []),
        (
            ["data.batch_size=2", "reference.parallel=1-1-4"],
            [
                "each of the 4 ranks of cluster.ranks_per_node=[4] computes on",
                "each of the 4 ranks of cluster.ranks_per_node=[4] calls",
                "data.batch_size=2 · rollout.samples_per_prompt=1 = 2 rows leave nothing for some of the d = 4 replicas"
                " of reference.parallel=1-1-4; choose at least 4, or fewer replicas",
            ],
        ),
        (
            ["data.batch_size=4", "critic.mini_batches=4"],
            [
                "must split evenly over 4 mini-batches of critic and the d = 2 replicas of critic.parallel=1-2-2;"
                " choose a multiple of 8"
            ],
        ),
        (
            ["actor.parallel=1-2-2", "warmup.batch_size=3"],
            [
                "warmup.batch_size=3 must split evenly over the d = 2 replicas of actor.parallel=1-2-2;"
                " choose a multiple of 2"
            ],
        ),
        (  # schedules
            ["run.steps=5", "actor.mini_batches=2", "actor.optimizer.warmup_steps=10"],
            [
                "actor.optimizer.warmup_steps=10 must be fewer than the run's 10 optimizer steps; choose at most 9"
            ],
        ),
        (["run.steps=5", "actor.mini_batches=2", "actor.optimizer.warmup_steps=9"], []),
        (
            ["critic.optimizer.min_lr=0.1"],
            ["critic.optimizer.min_lr=0.1 exceeds critic.optimizer.lr=1e-05; lower min_lr"],
        ),
        (  # sources
            ["model.path=x", "model.hf_config=qwen2.5-7b"],
            [
                "model must be given by exactly one of path, gguf, build, found path and build; leave out all but one"
            ],
        ),
        (
            ["model.build=null"],
            ["model must be given by exactly one of path, gguf, build, found none; add one"],
        ),
        (
            ["data.task=null"],
            ["data must be given by exactly one of train_file, task, environment, found none; add one"],
        ),
        (
            ["model.build=null", "model.gguf=m.gguf"],
            ["model.gguf=m.gguf needs a file model.hf_config, found none; name the config.json"],
        ),
        (["data.eval_file=e.jsonl"], ["data.eval_file=e.jsonl is not read, since data.task generates"]),
        (
            ["reward.kind=model"],
            ["reward.kind=model needs a checkpoint; give reward.path, or reward.kind=function"],
        ),
        (
            ["data.task.min_terms=4"],
            ["data.task.min_terms=4 exceeds data.task.max_terms=3; lower the one or raise the other"],
        ),
        (
            ["model.build.num_kv_heads=3"],
            ["model.build: num_kv_heads=3 does not divide num_heads=4; choose other values"],
        ),
        (
            ["model.build.num_layers=1001"],
            ["model.build: num_layers=1001 (at most 1000) must be positive integers"],
        ),
        (
            ["model.build.vocab_size=56"],
            ["model.build.vocab_size=56 must be at least the 57 tokens of the tokenizer that is built"],
        ),
        (
            ["actor.parallel=2-2-2", "actor.generate=1-3", "data.batch_size=7", "run.steps=1"],
            ["takes p·t·d", "takes p·t·d", "t_g=3", "choose a multiple of 2", "choose a multiple of 2"],
        ),
    ],
)
def test_rules(built: Path, overrides: list[str], messages: list[str]) -> None:
    if not messages:
        load_config(built, overrides, dry_run=True)
        return
    found = problems_of(built, *overrides, dry_run=True)
    if messages[-1] == "reference":  # which has the actor's sizes, and therefore the same message
        messages = messages[:-1]
    for message in messages:
        assert any(message in text for text in found), found
    if "2-2-2" not in str(overrides):
        assert len(found) == len(messages), found


def test_a_warmup_without_demonstrations(from_checkpoint: Path) -> None:
    found = problems_of(from_checkpoint, "warmup.steps=3")
    assert found == ["warmup needs demonstrations; give warmup.file, or data.task, or leave warmup out"]


class Unjudged(Algorithm):
    """User-defined algorithm without a reward, which therefore cannot be evaluated."""

    roles = ("actor",)

    def step(self, roles, sampling, state):
        return {}


@pytest.mark.parametrize(
    ("overrides", "messages"),
    [
        (  # a preference is a pair of rows, which stay together
            ["data.batch_size=8", "actor.mini_batches=4", "actor.parallel=1-2-2"],
            [],
        ),
        (
            ["data.batch_size=12", "actor.mini_batches=4", "actor.parallel=1-2-2"],
            [
                "data.batch_size=12 pairs of algorithm.name=online_dpo must split evenly over actor.mini_batches=4 and"
                " the d = 2 replicas of actor.parallel=1-2-2; choose a multiple of 8"
            ],
        ),
        (
            ["actor.micro_batch_tokens=255"],
            [
                "actor.micro_batch_tokens=255 must hold 2 rows, which stay together, of 128 tokens (prompt and response);"
                " raise it to at least 256"
            ],
        ),
        (
            ["algorithm.correction.name=token_tis"],
            ["algorithm.correction is not read by algorithm.name=online_dpo, which weighs no tokens"],
        ),
        (
            [
                "algorithm.name=grpo",
                "algorithm.loss=hybridengine.algorithms.losses.policy:cispo_loss",
                "actor.dual_clip=3",
            ],
            [
                "actor.dual_clip=3 is not read by algorithm.loss=hybridengine.algorithms.losses.policy:cispo_loss; leave"
            ],
        ),
        (
            ["algorithm.name=grpo", "algorithm.correction.low=0.5"],
            [
                "algorithm.correction.low=0.5 is not read by token_tis, which has no lower limit; leave it out, or choose"
            ],
        ),
        (
            ["algorithm.name=grpo_from_engine", "algorithm.correction.high=3"],
            ["algorithm.correction is not read by algorithm.name=grpo_from_engine, which takes the engine's"],
        ),
        (
            ["algorithm.name=tests.unit.test_config_checks:Unjudged", "actor.kl_loss_coef=0.1"],
            [
                "actor.kl_loss_coef=0.1 needs a reference, and algorithm.name=tests.unit.test_config_checks:Unjudged has",
                "algorithm.name=tests.unit.test_config_checks:Unjudged has the roles actor, without the reward, which"
                " scores the held-out prompts of data.task; add it to",
            ],
        ),
        (
            ["algorithm.name=safe_rlhf", "cost.function=a.b:c", "algorithm.max_log_multiplier=-1"],
            ["algorithm.max_log_multiplier=-1 must be"],
        ),
    ],
)
def test_rules_of_dataflows(built: Path, overrides: list[str], messages: list[str]) -> None:
    common = ["algorithm.name=online_dpo", "data.batch_size=8", "rollout.samples_per_prompt=4"]
    if not messages:
        assert check_run(load_config(built, [*common, *overrides])) == []
        return
    found = problems_of(built, *common, *overrides)
    assert len(found) == len(messages), found
    for text, message in zip(found, messages, strict=True):
        assert text.startswith(message)


def test_a_model_among_the_terms_of_costs_is_no_role(built: Path, from_checkpoint: Path) -> None:
    terms = ["cost.terms.critic.kind=model", "cost.terms.critic.path=/no/model"]
    (first, *_) = problems_of(built, "algorithm.name=safe_rlhf", *terms)
    assert first == (
        "cost.terms.critic would be called cost_critic, as a role of safe_rlhf is; choose another name"
    )


def test_processes_of_episodes_have_room_to_start(built: Path) -> None:
    common = ["rollout.episode.function=my.episodes:rollout", "reward.kind=episode", "reward.function=null"]
    for value in ("1KiB", "127MiB"):
        (found,) = problems_of(built, *common, f"rollout.episode.memory_bytes={value}")
        assert found.startswith(
            f'rollout.episode.memory_bytes="{value}" must be at least 134217728; correct it'
        )
    config = load_config(built, [*common, "rollout.episode.memory_bytes=128MiB"])
    assert config.rollout.episode is not None
    assert config.rollout.episode.memory_bytes == 128 * 2**20

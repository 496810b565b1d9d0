"""Every dataflow on real ranks, one iteration each on the same groups: Megatron, vLLM, the critics and the scorers."""

from __future__ import annotations

import math
from typing import Any

import pytest

from hybridengine.config import load_config
from hybridengine.config.algorithm import ALGORITHMS, CorrectionSection, algorithm_class
from hybridengine.config.loss_sections import KL_COV_LOSS, CovarianceSection
from hybridengine.controller.call_log import call_log
from hybridengine.drivers.roles import Sampling, State
from hybridengine.report import keys
from tests.full.dataflows.shared import COST_LIMIT, MULTIPLIER_LR, Started

pytestmark = pytest.mark.timeout(600)

PROMPTS, SAMPLES = 8, 4


def one_step(
    started: Started,
    name: str,
    state: State,
    step: int = 1,
    num_prompts: int = PROMPTS,
    num_samples: int = SAMPLES,
    **settings: Any,
) -> dict[str, float]:
    """Return the metrics of one iteration, with 32 rows by default."""
    kind = algorithm_class(name)
    known = {option: value for option, value in started.config.algorithm if option in kind.model_fields}
    functions = ("name", "loss", "advantages")
    algorithm = kind(**{key: known[key] for key in known if key not in functions} | settings)
    sampling = Sampling(
        step=step, num_prompts=num_prompts, samples_per_prompt=num_samples, first_seed=100 * step
    )
    metrics = algorithm.step(started.roles, sampling, state)
    started.pools.wait()
    return metrics


def test_a_runs_configuration_lies_beside_it_and_can_be_run_again(started: Started) -> None:
    assert load_config(started.config.run_folder / "config.yaml") == started.config


def runs_here(name: str) -> bool:
    """Return True for an algorithm that draws responses on the actor's ranks."""
    return algorithm_class(name).generates and not name.startswith("async_")


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if runs_here(name)])
def test_an_iteration(started: Started, name: str) -> None:
    exchange = call_log()
    started.pools.wait()
    exchange.take_records()
    state = State()
    metrics = one_step(started, name, state)
    called = {record.role for record in exchange.take_records()}
    assert called - {"prompts", "compute"} == set(algorithm_class(name).roles)
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["rollout/dropped_rows"] == metrics["rollout/cut_responses"] == 0
    assert metrics["reward/short_mean"] == pytest.approx(-metrics["reward/mean"]), (
        "the only term, weighted by -1"
    )
    assert ("cost/tokens_mean" in metrics) == (name == "safe_rlhf")
    if name == "grpo_from_engine":  # the trainer computes none
        assert keys.LOG_PROB_ABS_DIFF_MAX not in metrics
    else:
        assert metrics[keys.LOG_PROB_ABS_DIFF_MAX] < 1e-4
        assert 0 < metrics["rollout/entropy_mean"] < math.log(12), "of 12 tokens at most"
    assert metrics["actor/grad_norm"] > 0
    for role in ("critic", "cost_critic"):
        assert (f"{role}/grad_norm" in metrics) == (role in algorithm_class(name).roles)


def test_engines_with_different_numbers_of_rows(started: Started) -> None:
    """18 rows on 4 engines: trainer and engines agree on every row, so each row is in its place."""
    metrics = one_step(started, "grpo", State(), num_prompts=6, num_samples=3)
    assert started.roles.actor.num_ranks == 4
    assert metrics[keys.LOG_PROB_ABS_DIFF_MAX] < 1e-3
    assert metrics["rollout/dropped_rows"] == 0


def test_the_multiplier_follows_the_mean_cost(started: Started) -> None:
    """ln lam += lr·lam·(J_c - d): arXiv 2310.12773, equation 31."""
    state = State()
    logarithm = 0.0
    for step in (1, 2):
        metrics = one_step(started, "safe_rlhf", state, step)
        logarithm += MULTIPLIER_LR * math.exp(logarithm) * (metrics["cost/mean"] - COST_LIMIT)
        assert state["log_multiplier"] == pytest.approx(logarithm, rel=1e-6)
        assert metrics["cost/multiplier"] == pytest.approx(math.exp(logarithm), rel=1e-6)
    assert metrics["cost/tokens_mean"] == pytest.approx(metrics["rollout/response_tokens_mean"], rel=0.3)
    assert metrics["cost/mean"] == pytest.approx(2.0 * metrics["cost/tokens_mean"])


def test_covariant_tokens_and_a_baseline_for_each_token(started: Started) -> None:
    """Both take columns that others do not have: squared probabilities, and a choice made after the advantages."""
    covariance = CovarianceSection(share=0.1)
    settings = {"loss": KL_COV_LOSS, "covariance": covariance, "baseline": "token", "normalize_std": False}
    metrics = one_step(started, "grpo", State(), **settings)
    num_tokens = round(metrics["rollout/response_tokens_mean"] * PROMPTS * SAMPLES)
    chosen = max(1, int(0.1 * num_tokens))
    assert metrics["actor/covariant_fraction"] == pytest.approx(chosen / num_tokens)
    assert metrics["actor/grad_norm"] > 0


def test_the_teachers_most_likely_tokens(started: Started) -> None:
    for count in (57, 5):
        metrics = one_step(started, "distill", State(), top_k=count)
        assert metrics["actor/policy_loss"] == 0 < metrics["actor/grad_norm"]
        assert 0 < metrics["actor/teacher_kl"] < 1


def test_prompts_of_equal_scores_are_replaced(started: Started) -> None:
    """Rows of two calls of each method are one batch: trainer and engines agree on every row of it."""
    state = State()
    metrics = one_step(started, "grpo", state, num_samples=2, max_rounds=3)
    rounds = metrics["rollout/rounds"]
    assert rounds > 1 and metrics["rollout/equal_groups"] > 0, "eight pairs of short responses"
    assert state["more_prompts"] == (rounds - 1) * PROMPTS
    assert metrics[keys.LOG_PROB_ABS_DIFF_MAX] < 1e-4
    assert metrics["actor/grad_norm"] > 0 and metrics["rollout/dropped_rows"] == 0


def test_a_correction_leaves_a_batch_on_policy_alone(started: Started) -> None:
    """Engine and trainer agree to 1e-4 here, so weights are 1 and nothing is dropped."""
    correction = CorrectionSection(name="sequence_mis", high=1.5)
    metrics = one_step(started, "grpo", State(), correction=correction)
    assert metrics["actor/grad_norm"] > 0
    assert metrics["rollout/dropped_rows"] == 0

"""Every dataflow on real ranks, one iteration each on the same groups: Megatron, vLLM, the critics and the scorers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from hybridengine.cli.prepare import claim_run, prepare_files
from hybridengine.config import RunConfig, load_config
from hybridengine.config.algorithm_sections import ALGORITHM_ROLES, CorrectionSection
from hybridengine.controller.exchange import row_exchange
from hybridengine.controller.worker_group import WorkerGroup
from hybridengine.drivers.dataflow import load_step
from hybridengine.drivers.launch import RunPools
from hybridengine.drivers.roles import Roles, Sampling, State
from hybridengine.errors import ConfigError
from hybridengine.metrics import keys
from tests.full.tiny_runs import SECTIONS

pytestmark = pytest.mark.timeout(600)

PROMPTS, SAMPLES = 8, 4
COST_LIMIT, MULTIPLIER_LR = 10.0, 0.2


@dataclass(frozen=True)
class Started:
    """Groups for all roles that any dataflow has."""

    config: RunConfig
    pools: RunPools
    roles: Roles


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory, ray_cluster: int) -> Iterator[Started]:
    folder = tmp_path_factory.mktemp("dataflows")
    changes = {
        "run": {"steps": 1, "seed": 3, "folder": str(folder / "runs")},
        "warmup": None,
        "algorithm": {"name": "safe_rlhf", "cost_limit": COST_LIMIT, "multiplier_lr": MULTIPLIER_LR},
        # An untrained model has no right answers, but responses of several lengths; short ones are to be better.
        "reward": {"terms": {"short": {"function": "hybridengine.data.tasks:length_cost", "weight": -1.0}}},
        "cost": {"function": "hybridengine.data.tasks:length_cost"},
        "cost_critic": SECTIONS["critic"],
    }
    (folder / "all.yaml").write_text(yaml.safe_dump(SECTIONS | changes))
    config = claim_run(load_config(folder / "all.yaml"))
    files = prepare_files(config)
    with RunPools(config) as pools:
        pools.start()
        actor = pools.start_actor(folder=config.model_folder, stop_token_ids=files.stop_token_ids)
        actor.start_training()
        yield Started(config, pools, pools.start_roles(actor))


def one_step(
    started: Started, name: str, state: State, step: int = 1, **settings: object
) -> dict[str, float]:
    """Metrics of an iteration, with 32 rows whatever the dataflow."""
    algorithm = started.config.algorithm.model_copy(update={"name": name, **settings})
    sampling = Sampling(step=step, num_prompts=PROMPTS, samples_per_prompt=SAMPLES, first_seed=100 * step)
    metrics = load_step(algorithm)(started.roles, sampling, algorithm, state)
    started.pools.wait()
    return metrics


@pytest.mark.parametrize("name", ALGORITHM_ROLES)
def test_an_iteration(started: Started, name: str) -> None:
    exchange = row_exchange()
    started.pools.wait()
    exchange.take_records()
    payload = exchange.payload_bytes
    state = State()
    metrics = one_step(started, name, state)
    called = {record.role for record in exchange.take_records()}
    assert called - {"prompts", "compute"} == set(ALGORITHM_ROLES[name])
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["rollout/dropped_rows"] == 0
    if name == "grpo_from_engine":  # nobody asks the trainer
        assert keys.LOG_PROB_ABS_DIFF_MAX not in metrics
    else:
        assert metrics[keys.LOG_PROB_ABS_DIFF_MAX] < 1e-3
    assert metrics["actor/grad_norm"] > 0
    rows = PROMPTS * SAMPLES
    # Online DPO picks pairs by scores [rows] float32 and whether they were dropped [rows] bool; no other fetches rows.
    assert exchange.payload_bytes - payload == (rows * (4 + 1) if name == "online_dpo" else 0)
    for role in ("critic", "cost_critic"):
        assert (f"{role}/grad_norm" in metrics) == (role in ALGORITHM_ROLES[name])


def test_the_multiplier_follows_the_mean_cost(started: Started) -> None:
    """ln lam += lr·lam·(J_c - d): arXiv 2310.12773, equation 31."""
    state = State()
    logarithm = 0.0
    for step in (1, 2):
        metrics = one_step(started, "safe_rlhf", state, step)
        logarithm += MULTIPLIER_LR * math.exp(logarithm) * (metrics["cost/mean"] - COST_LIMIT)
        assert state["log_multiplier"] == pytest.approx(logarithm, rel=1e-6)
        assert metrics["cost/multiplier"] == pytest.approx(math.exp(logarithm), rel=1e-6)
    assert metrics["cost/mean"] == pytest.approx(metrics["rollout/response_tokens_mean"], rel=0.3)


def test_a_correction_leaves_a_batch_on_policy_alone(started: Started) -> None:
    """Engine and trainer agree to 1e-4 here, so that weights are 1 and nothing is dropped."""
    correction = CorrectionSection(name="sequence_mis", high=1.5)
    metrics = one_step(started, "grpo", State(), correction=correction)
    assert metrics["actor/grad_norm"] > 0
    assert metrics["rollout/dropped_rows"] == 0


def test_a_role_that_the_run_does_not_have(started: Started) -> None:
    groups: dict[str, WorkerGroup] = {"actor": started.roles.actor, "prompts": started.roles.prompts}
    sampling = Sampling(step=1, num_prompts=4, samples_per_prompt=1, first_seed=0)
    with pytest.raises(
        ConfigError, match="the dataflow uses the role 'critic', and the run has actor, prompts"
    ):
        load_step(started.config.algorithm)(Roles(**groups), sampling, started.config.algorithm, State())


def test_rows_of_a_dataflow_that_nobody_has_produced(started: Started, tmp_path: Path) -> None:
    roles = started.roles
    prompts = roles.prompts.training_prompts(Sampling(1, 4, 1, 0).prompts, 1)
    with pytest.raises(Exception, match=r"actor\.update") as error:
        roles.actor.update(prompts).wait()
    assert "log_probs" in str(error.value)

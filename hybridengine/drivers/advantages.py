"""The advantage functions of this project's algorithms, and what else they compute between their models, on ranks.

An advantage function has rows of one rank with the columns `drivers.dataflow.COLUMNS`, their numbers among all rows
(`ROW_NUMBERS`), and `across`, which puts together what all ranks have. It returns `advantages` [B, R] and what else the
updates read.
"""

from __future__ import annotations

from tensordict import TensorDict, TensorDictBase

from hybridengine.algorithms import advantages as estimators
from hybridengine.algorithms.across import Across
from hybridengine.algorithms.advantages import gae, token_rewards
from hybridengine.algorithms.masking import over_tokens, whiten
from hybridengine.drivers.counted import counted_rows
from hybridengine.drivers.grpo import Grpo
from hybridengine.drivers.grpo_from_engine import GrpoFromEngine
from hybridengine.drivers.ppo import Ppo
from hybridengine.drivers.reinforce_plus_plus import ReinforcePlusPlus
from hybridengine.drivers.remax import Remax
from hybridengine.drivers.rloo import Rloo
from hybridengine.drivers.safe_rlhf import SafeRlhf
from hybridengine.errors import DataError
from hybridengine.runtime.row_requests import ROW_NUMBERS


def ppo(rows: TensorDictBase, across: Across, algorithm: Ppo, samples: int) -> TensorDict:
    """Return `advantages` and `returns` [B, R], from the critic's `values`."""
    counted = counted_rows(rows, algorithm)
    mask = counted.mask_BR
    rewards = token_rewards(counted.scores_B, counted.kl_BR, mask, algorithm.kl_coef)
    estimates, returns = gae(rewards, rows["values"], mask, algorithm.gamma, algorithm.lam)
    if algorithm.whiten_advantages:
        estimates = whiten(estimates, mask, across=across)
    return counted.columns(advantages=estimates, returns=returns)


def grpo(rows: TensorDictBase, across: Across, algorithm: Grpo | GrpoFromEngine, samples: int) -> TensorDict:
    """Return `advantages` [B, R]: one for each response, at all of its tokens."""
    counted = counted_rows(rows, algorithm)
    groups = rows[ROW_NUMBERS] // samples
    estimates = estimators.grpo(counted.scores_B, groups, counted.keep_B, across, algorithm.normalize_std)
    return counted.columns(advantages=over_tokens(estimates, counted.mask_BR))


def rloo(rows: TensorDictBase, across: Across, algorithm: Rloo, samples: int) -> TensorDict:
    """Return `advantages` [B, R]: one for each response, at all of its tokens."""
    counted = counted_rows(rows, algorithm)
    mask = counted.mask_BR
    rewards = token_rewards(counted.scores_B, counted.kl_BR, mask, algorithm.kl_coef).sum(1)
    estimates = estimators.rloo(rewards, rows[ROW_NUMBERS] // samples, counted.keep_B, across)
    return counted.columns(advantages=over_tokens(estimates, mask))


def reinforce_plus_plus(
    rows: TensorDictBase, across: Across, algorithm: ReinforcePlusPlus, samples: int
) -> TensorDict:
    """Return `advantages` [B, R]."""
    counted = counted_rows(rows, algorithm)
    rewards = token_rewards(counted.scores_B, counted.kl_BR, counted.mask_BR, algorithm.kl_coef)
    return counted.columns(
        advantages=estimators.reinforce_plus_plus(rewards, counted.mask_BR, algorithm.gamma, across=across)
    )


def remax(rows: TensorDictBase, across: Across, algorithm: Remax, samples: int) -> TensorDict:
    """Return `advantages` [B, R]; a row whose baseline has no score counts as little as one without its own score."""
    rows["dropped"] = rows["dropped"] | rows["baseline_dropped"]
    counted = counted_rows(rows, algorithm)
    rewards = token_rewards(counted.scores_B, counted.kl_BR, counted.mask_BR, algorithm.kl_coef)
    return counted.columns(advantages=estimators.remax(rewards, counted.mask_BR, rows["baseline_scores"]))


def safe_rlhf(
    rows: TensorDictBase, across: Across, algorithm: SafeRlhf, samples: int, multiplier: float
) -> TensorDict:
    """Return `advantages`, `returns` and `cost_returns` [B, R]; rewards and costs share the KL penalty."""
    rows["dropped"] = rows["dropped"] | rows["cost_dropped"]
    counted = counted_rows(rows, algorithm)
    mask, kl = counted.mask_BR, counted.kl_BR
    rewards = token_rewards(counted.scores_B, kl, mask, algorithm.kl_coef / 2)
    costs = token_rewards(rows["cost_scores"].nan_to_num(), kl, mask, -algorithm.kl_coef / 2)
    estimates, returns = gae(rewards, rows["values"], mask, algorithm.gamma, algorithm.lam)
    cost_estimates, cost_returns = gae(costs, rows["cost_values"], mask, algorithm.gamma, algorithm.lam)
    if algorithm.whiten_advantages:
        estimates = whiten(estimates, mask, across=across)
        cost_estimates = whiten(cost_estimates, mask, across=across)
    both = estimators.safe_advantages(estimates, cost_estimates, mask, multiplier)
    return counted.columns(advantages=both, returns=returns, cost_returns=cost_returns)


def mean_cost(rows: TensorDictBase, across: Across) -> dict[str, float]:
    """Return `cost/mean` of the responses that have a cost.

    Raises:
        DataError: none has.
    """
    keep = ~rows["cost_dropped"]
    total, count = across.sum(rows["cost_scores"][keep].double().sum()), across.sum(keep.sum())
    if not count:
        raise DataError("none of this step's responses has a cost; look at the cost function's failures")
    return {"cost/mean": float(total / count)}

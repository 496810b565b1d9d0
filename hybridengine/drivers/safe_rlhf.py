"""Safe-RLHF's dataflow (PPO-Lagrangian): rewards are raised while the mean cost stays under a limit.

Source: arXiv 2310.12773, section 3.3 and appendix B.3.
"""

from __future__ import annotations

from tensordict import TensorDict, TensorDictBase

from hybridengine.algorithms.across import Across
from hybridengine.algorithms.advantages import LagrangeMultiplier, gae, safe_advantages, token_rewards
from hybridengine.algorithms.masking import whiten
from hybridengine.config.algorithm_sections import AlgorithmSection
from hybridengine.drivers.counted import COLUMNS, counted_rows
from hybridengine.drivers.roles import Roles, Sampling, State, function_path
from hybridengine.drivers.step_metrics import measure_rollout, switch_metrics
from hybridengine.errors import DataError

COSTS = {"cost_scores": "scores", "cost_dropped": "dropped"}
COST_VALUES = {"cost_values": "values"}


def step(roles: Roles, sampling: Sampling, settings: AlgorithmSection, state: State) -> dict[str, float]:
    """One iteration; returns its metrics. `state` keeps the logarithm of the Lagrange multiplier."""
    actor, critic, cost_critic = roles.actor, roles.critic, roles.cost_critic

    prompts = roles.prompts.training_prompts(sampling.prompts, sampling.step).repeat(
        sampling.samples_per_prompt
    )
    to_generate = actor.switch_to_generate()
    rollout = prompts.union(actor.generate_sequences(prompts, sampling.first_seed))
    to_train = actor.switch_to_train()

    costs = roles.cost.compute_scores(rollout)
    batch = rollout.union(
        actor.compute_log_probs(rollout),
        roles.reference.compute_log_probs(rollout),
        critic.compute_values(rollout),
        cost_critic.compute_values(rollout).select_as(**COST_VALUES),
        roles.reward.compute_scores(rollout),
        costs.select_as(**COSTS),
        costs.select(*roles.cost.term_columns),
    )
    measured_costs = roles.compute.measure(batch.select(*COSTS), function_path(mean_cost)).get()[0]
    multiplier = LagrangeMultiplier(
        settings.cost_limit,
        settings.multiplier_lr,
        settings.max_log_multiplier,
        state.get("log_multiplier", 0.0),
    ).updated(measured_costs["cost/mean"])
    state["log_multiplier"] = multiplier.log_value

    inputs = batch.select(*COLUMNS, *COSTS, *COST_VALUES, "values")
    batch = batch.union(roles.compute.map(inputs, function_path(advantages), settings, multiplier.value))
    for_costs = batch.union(batch.select_as(values="cost_values", returns="cost_returns"))
    updates = critic.update(batch), cost_critic.update(for_costs), actor.update(batch)
    measured = measure_rollout(roles, batch, settings)

    metrics = measured.get()[0] | switch_metrics(to_generate.get(), to_train.get())
    metrics |= measured_costs | {"cost/multiplier": multiplier.value}
    return metrics | updates[0].get()[0] | updates[1].get()[0] | updates[2].get()[0]


def mean_cost(rows: TensorDictBase, across: Across) -> dict[str, float]:
    """`cost/mean` of the responses that have a cost.

    Raises:
        DataError: none has.
    """
    keep = ~rows["cost_dropped"]
    total, count = across.sum(rows["cost_scores"][keep].double().sum()), across.sum(keep.sum())
    if not count:
        raise DataError("none of this step's responses has a cost; look at the cost function's failures")
    return {"cost/mean": float(total / count)}


def advantages(
    rows: TensorDictBase, across: Across, settings: AlgorithmSection, multiplier: float
) -> TensorDict:
    """`advantages`, `returns` and `cost_returns` [B, R]; the KL penalty is shared out between rewards and costs."""
    rows["dropped"] = rows["dropped"] | rows["cost_dropped"]
    counted = counted_rows(rows, settings)
    mask, kl = counted.mask_BR, counted.kl_BR
    rewards = token_rewards(counted.scores_B, kl, mask, settings.kl_coef / 2)
    costs = token_rewards(rows["cost_scores"].nan_to_num(), kl, mask, -settings.kl_coef / 2)
    estimates, returns = gae(rewards, rows["values"], mask, settings.gamma, settings.lam)
    cost_estimates, cost_returns = gae(costs, rows["cost_values"], mask, settings.gamma, settings.lam)
    if settings.whiten_advantages:
        estimates = whiten(estimates, mask, across=across)
        cost_estimates = whiten(cost_estimates, mask, across=across)
    both = safe_advantages(estimates, cost_estimates, mask, multiplier)
    return counted.columns(advantages=both, returns=returns, cost_returns=cost_returns)

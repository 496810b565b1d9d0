"""Functions that dataflows run on the ranks that hold a batch's rows: advantages, and metrics of the batch.

An advantage function receives the rows of one rank with the columns `drivers.dataflow.COLUMNS`, their numbers among all
rows (`ROW_NUMBERS`), and `across`, for sums and maxima over all ranks. It returns `advantages` [B, R] and any other
columns that the updates read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from hybridengine.algorithms import advantages as estimators
from hybridengine.algorithms import group_advantages
from hybridengine.algorithms.across import Across
from hybridengine.algorithms.advantages import gae, length_adaptive_lambdas, token_rewards
from hybridengine.algorithms.correction import RolloutWeights, correction_metrics, rollout_weights
from hybridengine.algorithms.covariance import covariances, largest_entries
from hybridengine.algorithms.kl import KL_ESTIMATORS
from hybridengine.algorithms.masking import (
    masked_max,
    masked_sum,
    over_tokens,
    whiten,
    zero_masked,
)
from hybridengine.algorithms.overlong import cut_responses, length_penalties
from hybridengine.algorithms.staleness import staleness_metrics
from hybridengine.config.algorithm import Algorithm, OverlongSection
from hybridengine.config.loss_sections import CLIP_COV_LOSS
from hybridengine.drivers.dataflow import NO_SCORES
from hybridengine.drivers.grpo import Grpo
from hybridengine.drivers.ppo import Ppo
from hybridengine.drivers.reinforce_plus_plus import ReinforcePlusPlus
from hybridengine.drivers.remax import Remax
from hybridengine.drivers.rloo import Rloo
from hybridengine.drivers.safe_rlhf import SafeRlhf
from hybridengine.episodes.wire import FAILURES
from hybridengine.errors import DataError
from hybridengine.report import keys
from hybridengine.rows.batch import columns_of
from hybridengine.rows.micro_batches import RESPONSE_MASK, drawn_tokens, loss_mask
from hybridengine.rows.protocols import ROW_NUMBERS


@dataclass(frozen=True)
class Counted:
    """Rows of a batch after exclusion of dropped rows and invalid tokens."""

    keep_B: Tensor
    """True for rows that have a score and whose rollout is close enough to the training policy."""
    mask_BR: Tensor
    """True at valid tokens of kept rows, over which rewards and returns run."""
    trained_BR: Tensor
    """True at those that are trained: `mask_BR` itself, if nothing excludes single tokens."""
    scores_B: Tensor
    """Scores; 0 for rows that are not kept."""
    kl_BR: Tensor
    """KL divergence from the reference; 0 at masked entries."""
    weights_BR: Tensor | None
    """Weights of the rollout correction, if any."""

    def columns(self, **estimates: Tensor) -> TensorDict:
        """Return `estimates` and the other columns that updates read: `keep`, and `trained` and `weights` if needed."""
        found = {**estimates, "keep": self.keep_B}
        if self.trained_BR is not self.mask_BR:
            found["trained"] = self.trained_BR
        if self.weights_BR is not None:
            found["weights"] = self.weights_BR
        return TensorDict(found, batch_size=[len(self.keep_B)])  # pyright: ignore[reportArgumentType]


def correction_weights(rows: TensorDictBase, mask_BR: Tensor, algorithm: Algorithm) -> RolloutWeights | None:
    """Return the weights of the run's rollout correction; None without one."""
    correction = algorithm.correction
    if correction is None:
        return None
    log_probs = rows["log_probs"], rows["rollout_log_probs"]
    return rollout_weights(correction.name, *log_probs, mask_BR, correction.high, correction.low)


def trained_tokens(rows: TensorDictBase, mask_BR: Tensor, algorithm: Algorithm) -> Tensor:
    """Return `mask_BR` without tokens that are not `fresh` [B, R], and without cut responses if `overlong.mask`.

    Without that column and that option the result is `mask_BR` itself.
    """
    if "fresh" in columns_of(rows):
        mask_BR = mask_BR & rows["fresh"]
    if algorithm.overlong is not None and algorithm.overlong.mask:
        mask_BR = mask_BR & ~cut_responses(rows["response_lengths"], mask_BR.size(1))[:, None]
    return mask_BR


def penalties_of(rows: TensorDictBase, algorithm: Algorithm) -> Tensor:
    """Return the amounts [B] by which the scores of over-long responses fall."""
    lengths, width = rows["response_lengths"], rows["log_probs"].size(1)
    overlong = algorithm.overlong or OverlongSection()
    penalties = length_penalties(lengths, width, overlong.cache_tokens, overlong.penalty)
    return penalties.to(rows["scores"].dtype)


def counted_rows(rows: TensorDictBase, algorithm: Algorithm) -> Counted:
    """Return the valid parts of `rows` (`drivers.dataflow.COLUMNS`, any `fresh`), after drops and rollout correction.

    The scores include the punishment of over-long responses.
    """
    mask = drawn_tokens(rows, rows["log_probs"].size(1))
    keep, weights = ~rows["dropped"], None
    trained = trained_tokens(rows, mask & keep[:, None], algorithm)
    if (found := correction_weights(rows, trained, algorithm)) is not None:
        keep, weights = keep & found.keep_B, found.weights_BR
    mask = mask & keep[:, None]
    trained = trained_tokens(rows, mask, algorithm)
    kl = zero_masked(KL_ESTIMATORS[algorithm.kl_estimator](rows["log_probs"], rows["ref_log_probs"]), mask)
    scores = torch.where(keep, rows["scores"] - penalties_of(rows, algorithm), 0.0)
    return Counted(keep, mask, trained, scores, kl, weights)


def ppo(rows: TensorDictBase, across: Across, algorithm: Ppo, samples: int) -> TensorDict:
    """Return `advantages` and `returns` [B, R], computed from the critic's `values`."""
    counted = counted_rows(rows, algorithm)
    mask = counted.mask_BR
    rewards = token_rewards(counted.scores_B, counted.kl_BR, mask, algorithm.kl_coef)
    estimates, returns = generalised(rewards, rows["values"], mask, algorithm)
    if algorithm.whiten_advantages:
        estimates = whiten(estimates, counted.trained_BR, across=across)
    return counted.columns(advantages=estimates, returns=returns)


def generalised(
    rewards_BR: Tensor, values_BR: Tensor, mask_BR: Tensor, algorithm: Ppo
) -> tuple[Tensor, Tensor]:
    """Return (advantages, returns of the critic) by generalised advantage estimation, each with its own lambda.

    Source: VAPO, arXiv 2504.05118, section 4.
    """
    gamma, lam = algorithm.gamma, algorithm.lam
    if algorithm.lam_alpha is not None:
        lam = length_adaptive_lambdas(mask_BR, algorithm.lam_alpha)
    estimates, returns = gae(rewards_BR, values_BR, mask_BR, gamma, lam)
    critic_lam = algorithm.lam if algorithm.critic_lam is None else algorithm.critic_lam
    if critic_lam is not lam:
        _, returns = gae(rewards_BR, values_BR, mask_BR, gamma, critic_lam)
    return estimates, returns


def grpo(rows: TensorDictBase, across: Across, algorithm: Grpo, samples: int) -> TensorDict:
    """Return `advantages` [B, R]: one value per response, repeated at all of its tokens, but for the token baseline.

    That one reads `squared_probs` [B, R] as well.
    """
    counted = counted_rows(rows, algorithm)
    mask, normalize_std = counted.mask_BR, algorithm.normalize_std
    group = rows[ROW_NUMBERS] // samples, counted.keep_B, across
    if algorithm.baseline == "token":
        energies = _energies(rows, counted)
        trained = counted.trained_BR
        estimates = group_advantages.optimal_token_baseline(counted.scores_B, energies, trained, *group)
    else:
        if algorithm.baseline == "length_weighted":
            by_row = group_advantages.length_weighted(counted.scores_B, mask.sum(1), *group)
        elif algorithm.baseline == "best_other":
            by_row = group_advantages.pass_at_k(counted.scores_B, *group, normalize_std)
        else:
            by_row = group_advantages.grpo(counted.scores_B, *group, normalize_std)
        estimates = over_tokens(by_row, mask)
    if algorithm.rescale_equal:
        estimates = estimates * group_advantages.equal_rescaling(counted.scores_B, *group)
    return counted.columns(advantages=estimates)


def _energies(rows: TensorDictBase, counted: Counted) -> Tensor:
    """Return the squared norm of each token's gradient by the logits, 1 - 2·pi + sum(pi^2), weighted like its loss."""
    energies = 1.0 - 2.0 * rows["log_probs"].double().exp() + rows["squared_probs"].double()
    weights = counted.weights_BR
    return (energies if weights is None else energies * weights.square()).to(rows["log_probs"].dtype)


def rloo(rows: TensorDictBase, across: Across, algorithm: Rloo, samples: int) -> TensorDict:
    """Return `advantages` [B, R], as `grpo` does."""
    counted = counted_rows(rows, algorithm)
    mask = counted.mask_BR
    rewards = token_rewards(counted.scores_B, counted.kl_BR, mask, algorithm.kl_coef).sum(1)
    estimates = group_advantages.rloo(rewards, rows[ROW_NUMBERS] // samples, counted.keep_B, across)
    return counted.columns(advantages=over_tokens(estimates, mask))


def reinforce_plus_plus(
    rows: TensorDictBase, across: Across, algorithm: ReinforcePlusPlus, samples: int
) -> TensorDict:
    """Return `advantages` [B, R]."""
    counted = counted_rows(rows, algorithm)
    mask = counted.mask_BR
    rewards = token_rewards(counted.scores_B, counted.kl_BR, mask, algorithm.kl_coef)
    if algorithm.group_baseline:
        groups = rows[ROW_NUMBERS] // samples
        estimates = group_advantages.whitened_differences(
            rewards.sum(1), groups, counted.trained_BR, counted.keep_B, across
        )
    else:
        estimates = estimators.reinforce_plus_plus(rewards, mask, algorithm.gamma, across, counted.trained_BR)
    return counted.columns(advantages=estimates)


def remax(rows: TensorDictBase, across: Across, algorithm: Remax, samples: int) -> TensorDict:
    """Return `advantages` [B, R]; a row whose baseline has no score is excluded like a row without its own score."""
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
    estimates, returns = generalised(rewards, rows["values"], mask, algorithm)
    cost_estimates, cost_returns = generalised(costs, rows["cost_values"], mask, algorithm)
    if algorithm.whiten_advantages:
        estimates = whiten(estimates, counted.trained_BR, across=across)
        cost_estimates = whiten(cost_estimates, counted.trained_BR, across=across)
    both = estimators.safe_advantages(estimates, cost_estimates, mask, multiplier)
    return counted.columns(advantages=both, returns=returns, cost_returns=cost_returns)


def covariant_tokens(rows: TensorDictBase, across: Across, algorithm: Algorithm, seed: int) -> TensorDict:
    """Return `covariant`, bool [B, R], the tokens that the losses clip-cov and kl-cov restrain.

    Reads `response_lengths`, `log_probs`, `advantages`, `keep`, and `trained` if there is one.
    """
    log_probs, options = rows["log_probs"], algorithm.covariance
    mask = loss_mask(rows, log_probs.size(1))
    products = covariances(log_probs, rows["advantages"], mask, across)
    count = max(1, int(options.share * int(across.sum(mask.sum()))))
    if algorithm.loss == CLIP_COV_LOSS:
        mask = mask & (products > options.low) & (products < options.high)
        products = torch.zeros_like(products)  # any of them, at random
    # Drawn for the rows of all ranks, so that the choice does not depend on their distribution.
    numbers = rows[ROW_NUMBERS]
    num_rows = int(across.max(numbers.max() if len(numbers) else numbers.new_tensor(-1))) + 1
    generator = torch.Generator().manual_seed(seed % 2**63)  # seeds of steps may be longer
    draws = torch.rand(num_rows, mask.size(1), dtype=torch.float64, generator=generator)[numbers]
    chosen = largest_entries(products, draws, mask, count, across)
    return TensorDict({"covariant": chosen}, batch_size=[len(rows)])  # pyright: ignore[reportArgumentType]


def mean_cost(rows: TensorDictBase, across: Across) -> dict[str, float]:
    """Return `cost/mean` over the responses that have a cost; raises DataError if none has."""
    keep = ~rows["cost_dropped"]
    total, count = across.sum(rows["cost_scores"][keep].double().sum()), across.sum(keep.sum())
    if not count:
        raise DataError("none of this step's responses has a cost; look at the cost function's failures")
    return {"cost/mean": float(total / count)}


def rollout_metrics(
    rows: TensorDictBase,
    across: Across,
    algorithm: Algorithm,
    term_columns: Sequence[str] = (),
    version: int | None = None,
    max_versions: int = 0,
) -> dict[str, float]:
    """Return means of rewards, of each term's scores, of the KL divergence and of lengths; if the training model has
    computed log-probs, also its entropy, their distance from the engine's, and statistics of the rollout correction;
    and, if a `version` trains rows with `versions` [B, R], their `staleness_metrics`. Scores are those before any
    punishment of over-long responses, which has metrics of its own. Raises DataError if no response has a score.
    """
    keep = ~rows["dropped"]
    mask = drawn_tokens(rows, rows["log_probs"].size(1))
    kl = KL_ESTIMATORS[algorithm.kl_estimator](rows["log_probs"], rows["ref_log_probs"])
    parts = [
        mask.sum(),
        rows["scores"][keep].sum(),
        keep.sum(),
        masked_sum(kl, mask),
        rows["prompt_lengths"].sum(),
        rows["response_lengths"].sum(),
        cut_responses(rows["response_lengths"], mask.size(1)).sum(),
    ]
    sums = torch.stack([torch.tensor(float(len(rows))), *parts]).double()
    num_rows, num_tokens, scores, num_scored, kl_sum, prompts, responses, num_cut = across.sum(sums).tolist()
    if not num_scored:
        raise DataError(f"none of the {int(num_rows)} responses of this step has a score; {NO_SCORES}")
    metrics = {
        keys.REWARD_MEAN: scores / num_scored,
        "rollout/dropped_rows": num_rows - num_scored,
        "rollout/cut_responses": num_cut,
        keys.KL_MEAN: kl_sum / max(1.0, num_tokens),
        keys.RESPONSE_TOKENS_MEAN: responses / num_rows,
        **_length_quantiles(rows, across),
        keys.TOKENS: prompts + responses,
        **_episode_metrics(rows, across),
    }
    for name in (name for name in term_columns if name in columns_of(rows)):
        scored = ~rows[name].isnan()
        total, count = across.sum(torch.stack([rows[name][scored].sum(), scored.sum()]).double()).tolist()
        metrics[keys.mean_key(name)] = total / max(1.0, count)
    if "entropies" in columns_of(rows):
        difference = (rows["log_probs"] - rows["rollout_log_probs"]).abs()
        same = mask  # weights in engine and trainer
        if version is not None:
            same = mask & ((rows["versions"] == version) | ~mask).all(1, keepdim=True)
        metrics[keys.LOG_PROB_ABS_DIFF_MAX] = float(across.max(masked_max(difference, same)))
        found = across.sum(torch.stack([masked_sum(difference, same), same.sum()]).double()).tolist()
        metrics["rollout/log_prob_abs_diff_mean"] = found[0] / max(1.0, found[1])
        entropies = float(across.sum(masked_sum(rows["entropies"], mask).double()))
        metrics["rollout/entropy_mean"] = entropies / max(1.0, num_tokens)
    trained = trained_tokens(rows, mask & keep[:, None], algorithm)
    if (weights := correction_weights(rows, trained, algorithm)) is not None:
        metrics |= correction_metrics(weights, across)
    if version is not None:
        metrics |= staleness_metrics(rows["versions"], mask, version, max_versions, across)
    return metrics | _overlong_metrics(rows, across, algorithm)


def _episode_metrics(rows: TensorDictBase, across: Across) -> dict[str, float]:
    """Return the mean number of turns, the shares of failures by kind, and means of what functions have returned; nothing
    for rows that are no episodes.
    """
    if RESPONSE_MASK not in columns_of(rows):
        return {}
    failures = torch.bincount(rows[keys.EPISODE_FAILURE], minlength=len(FAILURES) + 1)
    lengths = rows["response_lengths"].sum()
    sums = [failures, torch.stack([rows[keys.EPISODE_TURNS].sum(), rows[RESPONSE_MASK].sum(), lengths])]
    *counts, turns, trained, tokens = across.sum(torch.cat(sums).double()).tolist()
    num_rows = sum(counts)
    found = {
        "episode/turns_mean": turns / num_rows,
        "episode/trained_token_share": trained / max(1.0, tokens),
        "episode/failed_share": 1 - counts[0] / num_rows,
        **{f"episode/failed_{kind}": count for kind, count in zip(FAILURES, counts[1:], strict=True)},
    }
    known = (keys.EPISODE_FAILURE, keys.EPISODE_TURNS)
    names = (name for name in columns_of(rows) if name.startswith("episode/") and name not in known)
    return found | {keys.mean_key(name): mean for name in names for mean in _means(rows[name], across)}


def _means(values_B: Tensor, across: Across) -> list[float]:
    """Return the mean of the numbers of all ranks that are not NaN, in a list; an empty one if there are none."""
    known_B = ~values_B.isnan()
    total, count = across.sum(torch.stack([values_B[known_B].sum(), known_B.sum()]).double()).tolist()
    return [total / count] if count else []


def _overlong_metrics(rows: TensorDictBase, across: Across, algorithm: Algorithm) -> dict[str, float]:
    """Return overlong/cut_share, the share of responses of the maximum length, and overlong/penalty_mean, by which the
    scores fall on average; nothing without the option `overlong`.
    """
    if algorithm.overlong is None:
        return {}
    keep = ~rows["dropped"]
    cut = cut_responses(rows["response_lengths"], rows["log_probs"].size(1))
    parts = [cut.sum(), penalties_of(rows, algorithm)[keep].sum(), torch.tensor(len(rows)), keep.sum()]
    num_cut, penalties, num_rows, num_scored = across.sum(torch.stack([x.double() for x in parts])).tolist()
    return {
        "overlong/cut_share": num_cut / num_rows,
        "overlong/penalty_mean": penalties / max(num_scored, 1.0),
    }


def _length_quantiles(rows: TensorDictBase, across: Across) -> dict[str, float]:
    """Return the shortest and longest response length of all ranks, and quantiles between them, for the planner."""
    counts = torch.bincount(rows["response_lengths"], minlength=rows["log_probs"].size(1) + 1)
    running = across.sum(counts.double()).cumsum(0)
    total = running[-1].item()
    wanted = torch.tensor([max(1.0, percent / 100 * total) for percent in keys.LENGTH_SHARES]).double()
    lengths = torch.searchsorted(running, wanted.ceil())
    return {
        keys.response_tokens_key(percent): float(length)
        for percent, length in zip(keys.LENGTH_SHARES, lengths.tolist(), strict=True)
    }

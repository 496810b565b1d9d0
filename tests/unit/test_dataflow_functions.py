"""Computations of dataflows between their models, compared with float64 loops, with dropped rows and corrections."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from hybridengine.algorithms.across import ONE_PROCESS
from hybridengine.algorithms.masking import response_mask
from hybridengine.config.algorithm import CorrectionSection
from hybridengine.drivers import advantages, online_dpo
from hybridengine.drivers.advantages import counted_rows, rollout_metrics
from hybridengine.drivers.grpo import Grpo
from hybridengine.drivers.ppo import Ppo
from hybridengine.drivers.reinforce_plus_plus import ReinforcePlusPlus
from hybridengine.drivers.remax import Remax
from hybridengine.drivers.rloo import Rloo
from hybridengine.drivers.roles import Roles
from hybridengine.drivers.safe_rlhf import SafeRlhf
from hybridengine.errors import ConfigError, DataError
from hybridengine.rows.micro_batches import RESPONSE_MASK
from hybridengine.rows.protocols import ROW_NUMBERS

NUM_ROWS, WIDTH, SAMPLES = 8, 5, 4
LENGTHS = [5, 3, 0, 2, 1, 4, 5, 2]
DROPPED = [False, True, False, False, False, False, True, False]
COST_DROPPED = [False, True, False, False, False, True, False, False]


def batch() -> TensorDict:
    """Return rows with NaN wherever nothing may be read: beyond responses, and in the scores of dropped rows."""
    generator = torch.Generator().manual_seed(3)

    def tokens() -> torch.Tensor:
        values = -3 * torch.rand(NUM_ROWS, WIDTH, generator=generator, dtype=torch.float64)
        for row, length in enumerate(LENGTHS):
            values[row, length:] = math.nan
        return values

    def scores(dropped: list[bool]) -> torch.Tensor:
        values = torch.randint(0, 4, (NUM_ROWS,), generator=generator).double()
        return values.masked_fill(torch.tensor(dropped), math.nan)

    columns = {name: tokens() for name in ("log_probs", "ref_log_probs", "rollout_log_probs", "values")}
    columns |= {"cost_values": tokens(), "scores": scores(DROPPED), "cost_scores": scores(COST_DROPPED)}
    columns |= {"baseline_scores": torch.arange(NUM_ROWS).double() / 4}
    columns |= {"dropped": torch.tensor(DROPPED), "cost_dropped": torch.tensor(COST_DROPPED)}
    columns |= {"baseline_dropped": torch.tensor([row == 4 for row in range(NUM_ROWS)])}
    columns |= {"response_lengths": torch.tensor(LENGTHS), "prompt_lengths": torch.tensor([2] * NUM_ROWS)}
    columns |= {"entropies": tokens(), ROW_NUMBERS: torch.arange(NUM_ROWS)}
    return TensorDict(columns, batch_size=[NUM_ROWS])  # pyright: ignore[reportArgumentType]


ROWS = batch()
SETTINGS = Ppo(kl_coef=0.1, kl_estimator="k1", gamma=0.9, lam=0.8)


def rewards_of(row: int, kl_coef: float = 0.1, scores: str = "scores") -> list[float]:
    """Return the token rewards of a row: -kl_coef·k1 each, plus the score at the last."""
    found = [
        -kl_coef * float(ROWS["log_probs"][row, place] - ROWS["ref_log_probs"][row, place])
        for place in range(LENGTHS[row])
    ]
    if found:
        found[-1] += float(ROWS[scores][row])
    return found


def gae_of(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    found, following, after = [0.0] * len(rewards), 0.0, 0.0
    for place in reversed(range(len(rewards))):
        delta = rewards[place] + gamma * after - values[place]
        following = delta + gamma * lam * following
        found[place], after = following, values[place]
    return found


def estimates_of(
    rows: list[int], kl_coef: float = 0.1, scores: str = "scores", values: str = "values"
) -> dict[int, list[float]]:
    """Return the generalised advantages of these rows, with gamma = 0.9 and lambda = 0.8."""
    return {
        row: gae_of(rewards_of(row, kl_coef, scores), ROWS[values][row, : LENGTHS[row]].tolist(), 0.9, 0.8)
        for row in rows
    }


def safe_advantages_of(
    rows: list[int], whiten: Callable[[dict[int, list[float]]], dict[int, list[float]]]
) -> dict[int, list[float]]:
    """Return the advantages of Safe-RLHF with a multiplier of 2, from rewards and costs whitened by `whiten`."""
    rewards = whiten(estimates_of(rows, 0.05))
    costs = whiten(estimates_of(rows, -0.05, "cost_scores", "cost_values"))
    return {
        row: [(one - 2 * two) / 3 for one, two in zip(rewards[row], costs[row], strict=True)] for row in rows
    }


def whitened(by_row: dict[int, list[float]]) -> dict[int, list[float]]:
    values = [value for row in by_row.values() for value in row]
    mean = sum(values) / len(values)
    scale = 1 / math.sqrt(sum((value - mean) ** 2 for value in values) / len(values) + 1e-8)
    return {row: [(value - mean) * scale for value in found] for row, found in by_row.items()}


def assert_rows(found: torch.Tensor, expected: dict[int, list[float]]) -> None:
    """Assert that the expected rows match and that all other entries are exactly zero."""
    for row in range(NUM_ROWS):
        values = expected.get(row, [])
        wanted = values + [0.0] * (WIDTH - len(values))
        assert found[row].tolist() == pytest.approx(wanted, abs=1e-6), row


KEPT = [row for row in range(NUM_ROWS) if not DROPPED[row]]


def test_advantages_of_ppo() -> None:
    found = advantages.ppo(ROWS.clone(), ONE_PROCESS, SETTINGS, SAMPLES)
    estimates = estimates_of(KEPT)
    assert_rows(found["advantages"], whitened(estimates))
    returns = {
        row: [one + two for one, two in zip(estimates[row], ROWS["values"][row].tolist(), strict=False)]
        for row in KEPT
    }
    assert_rows(found["returns"], returns)
    assert found["keep"].tolist() == [not dropped for dropped in DROPPED]
    assert "weights" not in found


def test_advantages_of_ppo_with_two_lambdas() -> None:
    """VAPO: the critic's returns with a lambda of 1, advantages with one that depends on the response's length."""
    algorithm = SETTINGS.model_copy(update={"critic_lam": 1.0, "lam_alpha": 0.4, "whiten_advantages": False})
    found = advantages.ppo(ROWS.clone(), ONE_PROCESS, algorithm, SAMPLES)
    estimates, returns = {}, {}
    for row in KEPT:
        values = ROWS["values"][row, : LENGTHS[row]].tolist()
        lam = max(0.0, 1 - 1 / (0.4 * max(LENGTHS[row], 1)))
        estimates[row] = gae_of(rewards_of(row), values, 0.9, lam)
        returns[row] = [
            one + two for one, two in zip(gae_of(rewards_of(row), values, 0.9, 1.0), values, strict=True)
        ]
    assert_rows(found["advantages"], estimates)
    assert_rows(found["returns"], returns)
    without = algorithm.model_copy(update={"critic_lam": None})
    found = advantages.ppo(ROWS.clone(), ONE_PROCESS, without, SAMPLES)
    assert_rows(found["advantages"], estimates)
    plain = advantages.ppo(ROWS.clone(), ONE_PROCESS, SETTINGS, SAMPLES)
    assert torch.equal(found["returns"], plain["returns"])


@pytest.mark.parametrize("normalize_std", [True, False])
def test_advantages_of_grpo(normalize_std: bool) -> None:
    settings = Grpo(normalize_std=normalize_std)
    found = advantages.grpo(ROWS.clone(), ONE_PROCESS, settings, SAMPLES)
    expected = {}
    for first in range(0, NUM_ROWS, SAMPLES):
        rows = [row for row in range(first, first + SAMPLES) if row in KEPT]
        scores = [float(ROWS["scores"][row]) for row in rows]
        mean = sum(scores) / len(scores)
        deviation = math.sqrt(sum((score - mean) ** 2 for score in scores) / (len(scores) - 1)) + 1e-6
        for row, score in zip(rows, scores, strict=True):
            expected[row] = [(score - mean) / (deviation if normalize_std else 1.0)] * LENGTHS[row]
    assert_rows(found["advantages"], expected)


def scores_of(first: int) -> dict[int, float]:
    return {row: float(ROWS["scores"][row]) for row in range(first, first + SAMPLES) if row in KEPT}


def test_advantages_of_grpo_with_other_baselines() -> None:
    expected: dict[str, dict[int, list[float]]] = {"length_weighted": {}, "best_other": {}}
    for first in range(0, NUM_ROWS, SAMPLES):
        scores = scores_of(first)
        total = sum(LENGTHS[row] for row in scores)
        mean = sum(LENGTHS[row] * score for row, score in scores.items()) / total
        for row, score in scores.items():
            others = max(value for other, value in scores.items() if other != row)
            expected["length_weighted"][row] = [score - mean] * LENGTHS[row]
            expected["best_other"][row] = [max(0.0, score - others)] * LENGTHS[row]
    for name, wanted in expected.items():
        algorithm = Grpo(baseline=name, normalize_std=False)  # type: ignore[arg-type]
        found = advantages.grpo(ROWS.clone(), ONE_PROCESS, algorithm, SAMPLES)
        assert found["advantages"].any()
        assert_rows(found["advantages"], wanted)


@pytest.mark.parametrize("corrected", [True, False])
def test_advantages_of_grpo_with_a_baseline_for_each_token(corrected: bool) -> None:
    """Energies are 1 - 2·pi + sum(pi^2), times the square of a correction's weight."""
    correction = CorrectionSection(name="token_tis", high=1.5) if corrected else None
    algorithm = Grpo(baseline="token", normalize_std=False, correction=correction)
    squares = torch.rand(NUM_ROWS, WIDTH, generator=torch.Generator().manual_seed(9)).double()
    rows = ROWS.clone().update({"squared_probs": squares})
    found = advantages.grpo(rows, ONE_PROCESS, algorithm, SAMPLES)

    def weight(row: int, place: int) -> float:
        total = 0.0
        for earlier in range(place + 1):
            probability = math.exp(float(ROWS["log_probs"][row, earlier]))
            ratio = probability / math.exp(float(ROWS["rollout_log_probs"][row, earlier]))
            energy = 1 - 2 * probability + float(squares[row, earlier])
            total += energy * (min(ratio, 1.5) ** 2 if corrected else 1.0)
        return total

    expected = {}
    for first in range(0, NUM_ROWS, SAMPLES):
        scores = scores_of(first)
        for row, score in scores.items():
            expected[row] = []
            for place in range(LENGTHS[row]):
                known = {other: weight(other, place) for other in scores if LENGTHS[other] > place}
                mean = sum(scores[other] * w for other, w in known.items()) / sum(known.values())
                expected[row].append(score - (mean if len(known) > 1 else 0.0))
    assert_rows(found["advantages"], expected)


def test_lengths_of_episodes_are_those_of_their_own_tokens() -> None:
    """Not of what the environment adds: with all tokens, response 0 would weigh most in its group."""
    drawn = response_mask(ROWS["response_lengths"], WIDTH)
    drawn[0, 1:] = False
    drawn[5, ::2] = False
    rows = ROWS.clone().update({RESPONSE_MASK: drawn})
    algorithm = Grpo(baseline="length_weighted", normalize_std=False)
    found = advantages.grpo(rows, ONE_PROCESS, algorithm, SAMPLES)
    for first in range(0, NUM_ROWS, SAMPLES):
        scores, counts = scores_of(first), drawn.sum(1).tolist()
        mean = sum(counts[row] * score for row, score in scores.items()) / sum(counts[row] for row in scores)
        for row, score in scores.items():
            expected = [(score - mean) * flag for flag in drawn[row].tolist()]
            assert found["advantages"][row].tolist() == pytest.approx(expected), row


def test_advantages_of_grpo_make_up_for_equal_scores() -> None:
    rows = ROWS.clone()
    rows["scores"][:SAMPLES] = 2.0
    plain = advantages.grpo(rows.clone(), ONE_PROCESS, Grpo(), SAMPLES)
    found = advantages.grpo(rows.clone(), ONE_PROCESS, Grpo(rescale_equal=True), SAMPLES)
    kept = [row for row in KEPT if row >= SAMPLES]
    assert torch.allclose(found["advantages"], plain["advantages"] * len(KEPT) / len(kept), atol=0)


def test_advantages_of_rloo() -> None:
    found = advantages.rloo(ROWS.clone(), ONE_PROCESS, Rloo(kl_coef=0.1), SAMPLES)
    expected = {}
    for first in range(0, NUM_ROWS, SAMPLES):
        rows = [row for row in range(first, first + SAMPLES) if row in KEPT]
        rewards = {row: sum(rewards_of(row)) for row in rows}
        for row in rows:
            others = [rewards[other] for other in rows if other != row]
            expected[row] = [rewards[row] - sum(others) / len(others)] * LENGTHS[row]
    assert_rows(found["advantages"], expected)


def returns_of(rewards: list[float], gamma: float) -> list[float]:
    return [
        sum(gamma ** (later - place) * rewards[later] for later in range(place, len(rewards)))
        for place in range(len(rewards))
    ]


def test_advantages_of_reinforce_plus_plus() -> None:
    algorithm = ReinforcePlusPlus(kl_coef=0.1, gamma=0.9)
    found = advantages.reinforce_plus_plus(ROWS.clone(), ONE_PROCESS, algorithm, SAMPLES)
    assert_rows(found["advantages"], whitened({row: returns_of(rewards_of(row), 0.9) for row in KEPT}))


def test_advantages_of_reinforce_plus_plus_with_a_group_baseline() -> None:
    algorithm = ReinforcePlusPlus(kl_coef=0.1, group_baseline=True)
    found = advantages.reinforce_plus_plus(ROWS.clone(), ONE_PROCESS, algorithm, SAMPLES)
    differences = {}
    for first in range(0, NUM_ROWS, SAMPLES):
        rewards = {row: sum(rewards_of(row)) for row in range(first, first + SAMPLES) if row in KEPT}
        mean = sum(rewards.values()) / len(rewards)
        differences |= {row: [reward - mean] * LENGTHS[row] for row, reward in rewards.items()}
    assert_rows(found["advantages"], whitened(differences))


def test_advantages_of_remax() -> None:
    found = advantages.remax(ROWS.clone(), ONE_PROCESS, Remax(kl_coef=0.1), SAMPLES)
    expected = {
        row: [value - row / 4 for value in returns_of(rewards_of(row), 1.0)] for row in KEPT if row != 4
    }
    assert_rows(found["advantages"], expected)
    assert found["keep"].tolist() == [row in KEPT and row != 4 for row in range(NUM_ROWS)]


def test_advantages_of_safe_rlhf() -> None:
    """A row without a reward or without a cost counts nowhere; the mean cost covers all rows that have one."""
    judged = [row for row in KEPT if not COST_DROPPED[row]]
    algorithm = SafeRlhf(kl_coef=0.1, gamma=0.9, lam=0.8)
    found = advantages.safe_rlhf(ROWS.clone(), ONE_PROCESS, algorithm, SAMPLES, 2.0)
    expected = safe_advantages_of(judged, whitened)
    assert_rows(found["advantages"], expected)
    assert found["keep"].tolist() == [row in judged for row in range(NUM_ROWS)]
    costs = advantages.mean_cost(ROWS, ONE_PROCESS)
    known = [float(ROWS["cost_scores"][row]) for row in range(NUM_ROWS) if not COST_DROPPED[row]]
    assert costs["cost/mean"] == pytest.approx(sum(known) / len(known))


def test_preferences_are_the_best_and_the_worst() -> None:
    scores = [1.0, 3.0, math.nan, 0.0, 2.0, 2.0, 2.0, 2.0]
    dropped = [False, False, True, False] + [False] * 4
    assert online_dpo.preferences(scores, dropped, 4) == [1, 3, 4, 4]
    assert online_dpo.preferences(scores, dropped, 2) == [1, 0, 3, 3, 4, 4, 6, 6]
    assert online_dpo.preferences([math.nan] * 2, [True] * 2, 2) == [0, 0]


@pytest.mark.parametrize("name", ["token_tis", "sequence_mis"])
def test_a_correction_weighs_tokens_and_drops_rows(name: str) -> None:
    settings = SETTINGS.model_copy(update={"correction": CorrectionSection(name=name, high=1.5)})  # type: ignore[arg-type]
    counted = counted_rows(ROWS.clone(), settings)
    weights = counted.weights_BR
    assert weights is not None
    for row in KEPT:
        ratios = [
            math.exp(float(ROWS["log_probs"][row, place] - ROWS["rollout_log_probs"][row, place]))
            for place in range(LENGTHS[row])
        ]
        product = math.prod(ratios)
        if name == "token_tis":
            assert weights[row, : LENGTHS[row]].tolist() == pytest.approx(
                [min(ratio, 1.5) for ratio in ratios]
            )
            assert bool(counted.keep_B[row])
        else:
            assert bool(counted.keep_B[row]) is (product <= 1.5 or not ratios)
            assert int(counted.mask_BR[row].sum()) == (LENGTHS[row] if product <= 1.5 else 0)
    assert "weights" in counted.columns(advantages=counted.mask_BR.double())


def test_metrics_leave_dropped_rows_out() -> None:
    found = rollout_metrics(ROWS, ONE_PROCESS, SETTINGS)
    assert found["rollout/dropped_rows"] == sum(DROPPED)
    kept = [float(ROWS["scores"][row]) for row in KEPT]
    assert found["reward/mean"] == pytest.approx(sum(kept) / len(kept))
    assert not [name for name in found if name.startswith("correction/")]
    with pytest.raises(DataError, match="none of the 8 responses of this step has a score"):
        rollout_metrics(
            ROWS.clone().update({"dropped": torch.ones(8, dtype=torch.bool)}), ONE_PROCESS, SETTINGS
        )


def test_metrics_are_means_over_tokens() -> None:
    """The means cover dropped responses too: the policy's drift and the response lengths do not depend on scores."""
    rows = ROWS.clone().update(
        {"reward/short": torch.tensor([1.0, math.nan, 3.0, 0.0, 0.0, math.nan, 0.0, 2.0])}
    )
    found = rollout_metrics(rows, ONE_PROCESS, SETTINGS, ["reward/short", "cost/not_there"])
    places = [(row, place) for row in range(NUM_ROWS) for place in range(LENGTHS[row])]

    def mean(value: Callable[[tuple[int, int]], float]) -> float:
        return sum(map(value, places)) / len(places)

    kl = mean(lambda at: float(ROWS["log_probs"][at] - ROWS["ref_log_probs"][at]))
    assert found["kl/mean"] == pytest.approx(kl)
    assert found["rollout/entropy_mean"] == pytest.approx(mean(lambda at: float(ROWS["entropies"][at])))
    differences = [abs(float(ROWS["log_probs"][at] - ROWS["rollout_log_probs"][at])) for at in places]
    assert found["rollout/log_prob_abs_diff_max"] == pytest.approx(max(differences))
    assert found["rollout/log_prob_abs_diff_mean"] == pytest.approx(sum(differences) / len(differences))
    assert found["rollout/response_tokens_mean"] == sum(LENGTHS) / NUM_ROWS
    assert found["rollout/tokens"] == sum(LENGTHS) + 2 * NUM_ROWS
    assert found["rollout/cut_responses"] == LENGTHS.count(WIDTH) == 2
    assert found["reward/short_mean"] == 6.0 / 6
    assert "cost/not_there_mean" not in found


def test_metrics_of_a_correction() -> None:
    """Shares and means cover the tokens of the rows that have a score."""
    settings = SETTINGS.model_copy(update={"correction": CorrectionSection(name="token_tis", high=1.5)})
    found = rollout_metrics(ROWS, ONE_PROCESS, settings)
    ratios = [
        math.exp(float(ROWS["log_probs"][row, place] - ROWS["rollout_log_probs"][row, place]))
        for row in KEPT
        for place in range(LENGTHS[row])
    ]
    cut = [min(ratio, 1.5) for ratio in ratios]
    assert found["correction/weight_mean"] == pytest.approx(sum(cut) / len(cut))
    capped = sum(ratio > 1.5 for ratio in ratios)
    assert 0 < capped < len(ratios)
    assert found["correction/capped_fraction"] == pytest.approx(capped / len(ratios))


def test_a_role_that_the_run_does_not_have_is_named() -> None:
    groups: dict[str, Any] = {"actor": object(), "prompts": object()}
    with pytest.raises(
        ConfigError,
        match="uses the role 'critic', and the run has actor, prompts; add it to the algorithm's roles",
    ):
        _ = Roles(**groups).critic

"""Every algorithm on layouts of 8 ranks equals one process: forward passes, advantages and updates.

The tolerance is 1e-5 of the largest value of a column, or of the optimizer step on each tensor of the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import load_file
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from hybridengine.algorithms.across import ONE_PROCESS
from hybridengine.algorithms.kl import KL_ESTIMATORS
from hybridengine.config.algorithm import ALGORITHMS, CorrectionName, algorithm_class
from hybridengine.config.loss_sections import COVARIANCE_LOSSES
from hybridengine.config.role_sections import LossAggregation
from hybridengine.config.run_config import TRAINED
from tests.gloo import sharded_cases as cases
from tests.gloo import sharded_ranks as on_ranks
from tests.gloo.ranks import RankLauncher
from tests.gloo.row_parts import slice_rows
from tests.gloo.sharded_cases import ALL_ESTIMATED, CASES, NUM_ROWS, ONE_RANK, SAMPLES, UPDATES, run_of
from tests.gloo.sharded_ranks import Outcome, Pieces, shards
from tests.gloo.sharded_reference import plain_update
from tests.gloo.tiny_models import write_model

TOLERANCE = 1e-5
MEAN_TOLERANCE = 1e-6
"""Absolute tolerance of metrics, whose relative tolerance is 1e-5: terms of about 1 and of both signs may cancel."""

ROUNDING = torch.finfo(torch.float32).eps

ESTIMATED = [case for case in CASES if case != "online_dpo"]
UPDATED = [(layout, case) for layout, updated in UPDATES.items() for case in updated]


@dataclass(frozen=True, repr=False)
class Seen:
    """Results of one process and of 8 ranks."""

    policy: Path
    scorer: Path
    rows: TensorDict
    one: dict[str, Outcome]
    """Case -> outcome."""
    eight: list[dict[tuple[str, str], Outcome]]
    """For each rank, (layout, case) -> outcome."""

    def folder(self, role: str) -> Path:
        return self.policy if role == "actor" else self.scorer

    def batch(self, case: str) -> TensorDictBase:
        """Return the rows of a case's updates, made in this process."""
        if case == "online_dpo":
            return self.rows[on_ranks.pairs_of(self.rows)]
        return slice_rows(self.rows, range(NUM_ROWS)).update(self.estimates(case)[0])

    def estimates(self, case: str) -> tuple[TensorDict, dict[str, float]]:
        """Return a dataflow's estimates from all rows, computed in this process."""
        rows = on_ranks.numbered(slice_rows(self.rows, range(NUM_ROWS)))
        return on_ranks.estimate(run_of(case, ONE_RANK, self.policy, self.scorer), rows, ONE_PROCESS)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory, run_ranks: RankLauncher) -> Seen:
    folder = tmp_path_factory.mktemp("sharded")
    policy, scorer = folder / "policy", folder / "scorer"
    write_model(policy, "qwen3", tied=True, **cases.SIZES)
    write_model(scorer, "llama", num_labels=1, pad_token_id=0, **cases.SIZES)
    rows = cases.rollout()
    rows, one = run_ranks(1, on_ranks.run_one_process, policy, scorer, cases.rollout())[0]
    eight = run_ranks(8, on_ranks.run_all, UPDATES, policy, scorer, rows, timeout_s=250)
    return Seen(policy, scorer, rows, one, eight)


def assert_columns(found: TensorDictBase, expected: TensorDictBase, label: str) -> None:
    assert set(found.keys()) == set(expected.keys()), label
    for name in map(str, expected.keys()):
        wanted = expected[name]
        if wanted.dtype == torch.bool:
            assert torch.equal(found[name], wanted), f"{label}: {name}"
            continue
        worst = float((found[name] - wanted).abs().max() / wanted.abs().max())
        assert worst < TOLERANCE, f"{label}: {name} differs by {worst} of its largest value"


def assert_metrics(found: Mapping[str, float], expected: Mapping[str, float], label: str) -> None:
    assert found.keys() == expected.keys(), label
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=TOLERANCE, abs=MEAN_TOLERANCE), f"{label}: {name}"


def assembled(parts: Iterable[Pieces], shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """Return whole tensors joined from the boxes of all ranks; ranks that hold the same box must agree bitwise."""
    whole = {name: torch.full(shape, torch.nan) for name, shape in shapes.items()}
    for name, box, values in (piece for part in parts for piece in part):
        place = whole[name][tuple(slice(start, stop) for start, stop in box)]
        assert torch.equal(place, values) or place.isnan().all(), f"{name} {box}: replicas disagree"
        place.copy_(values)
    for name, tensor in whole.items():
        assert not tensor.isnan().any(), f"no rank has all of {name}"
    return whole


def assert_steps(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor], folder: Path, label: str
) -> None:
    """Assert that steps from the checkpoint's weights are equal, tensor by tensor, up to the rounding of the weights."""
    for name, before in load_file(folder / "model.safetensors").items():
        step = (expected[name] - before).abs().max()
        assert step > 1e-3, f"{label}: {name} was hardly trained, by {step}"
        rounding = 2 * ROUNDING * expected[name].abs().max()
        worst = (found[name] - expected[name]).abs().max()
        assert worst <= TOLERANCE * step + rounding, f"{label}: {name} is off by {worst}, the step is {step}"


def shapes_of(folder: Path) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in load_file(folder / "model.safetensors").items()}


@pytest.mark.parametrize("layout", UPDATES)
def test_log_probs_entropies_and_values_are_those_of_one_process(layout: str, seen: Seen):
    expected = seen.one["forward"].estimates
    assert expected is not None
    for rank, outcomes in enumerate(seen.eight):
        found = outcomes[layout, "forward"].estimates
        assert found is not None
        assert_columns(found, expected, f"{layout}, rank {rank}")


@pytest.mark.parametrize("layout", [*UPDATES, "compute workers"])
def test_advantages_and_statistics_of_shards_are_those_of_all_rows(layout: str, seen: Seen):
    for case in ESTIMATED if layout in (*ALL_ESTIMATED, "compute workers") else UPDATES[layout]:
        if case not in ESTIMATED:
            continue
        expected, measured = seen.estimates(case)
        for rank, outcomes in enumerate(seen.eight):
            label, outcome = f"{case} on {layout}, rank {rank}", outcomes[layout, case]
            assert outcome.estimates is not None
            assert_columns(outcome.estimates, expected, label)
            assert_metrics(outcome.measured, measured, label)


@pytest.mark.parametrize("groups", [[8], [5, 3], [3, 1, 2, 2], [1] * 8])
def test_preferences_of_whole_groups_are_those_of_all_rows(groups: list[int], seen: Seen):
    """[5, 3]: one rank has the responses to 5 prompts, another those to 3."""
    parts, first = [], 0
    for num_groups in groups:
        rows = seen.rows[first * SAMPLES : (first + num_groups) * SAMPLES]
        parts += [row + first * SAMPLES for row in on_ranks.pairs_of(rows)]
        first += num_groups
    assert parts == on_ranks.pairs_of(seen.rows)


@pytest.mark.parametrize(("layout", "case"), UPDATED)
def test_updates_are_those_of_one_process(layout: str, case: str, seen: Seen):
    one = seen.one[case]
    roles = [role for role in TRAINED if role in algorithm_class(CASES[case]["algorithm"]["name"]).roles]
    assert list(one.weights) == roles
    pp_size = int(layout[0])
    for role in roles:
        label, folder = f"{case} on {layout}, {role}", seen.folder(role)
        metrics = [outcomes[layout, case].metrics[role] for outcomes in seen.eight]
        assert sum(map(bool, metrics)) == 8 // pp_size, "the last stage has metrics"
        for found in filter(None, metrics):
            assert_metrics(found, one.metrics[role], label)
        shapes = shapes_of(folder)
        weights = assembled((outcomes[layout, case].weights[role] for outcomes in seen.eight), shapes)
        assert_steps(weights, assembled([one.weights[role]], shapes), folder, label)


@pytest.mark.parametrize("case", CASES)
def test_one_process_equals_plain_pytorch(case: str, seen: Seen):
    run, batch = run_of(case, ONE_RANK, seen.policy, seen.scorer), seen.batch(case)
    for role, pieces in seen.one[case].weights.items():
        folder, kind = seen.folder(role), AutoModelForSequenceClassification
        model: Any = (AutoModelForCausalLM if role == "actor" else kind).from_pretrained(folder)
        norm, expected = plain_update(model.double(), run, role, on_ranks.rows_for(role, batch))
        metrics = seen.one[case].metrics[role]
        assert metrics[f"{role}/grad_norm"] == pytest.approx(norm, rel=TOLERANCE)
        assert_steps(assembled([pieces], shapes_of(folder)), expected, folder, f"{case}, {role}")


def test_replicas_with_unequal_rows_make_equally_many_steps(seen: Seen, run_ranks: RankLauncher):
    """9 rows on two replicas in 4 mini-batches: 2, 1, 1 and 1 from one replica, 1 each from the other."""
    changes = {"mini_batches": 4, "optimizer": {"lr": 1.0}}
    run = run_of("dr_grpo", "1-1-2", seen.policy, seen.scorer, **changes)
    batch = slice_rows(seen.batch("dr_grpo"), range(9))
    by_rank = run_ranks(2, on_ranks.update_in_mini_batches, run, seen.policy, on_ranks.numbered(batch))
    generator = torch.Generator().manual_seed(
        (7 * 1_000_003 + 1) * 1_009
    )  # the run's seed, its first update and epoch
    # Each mini-batch draws one of rows 0 to 3, one of rows 4 to 7 and one of rows 8 to 11.
    drawn = [torch.rand(4, generator=generator, dtype=torch.float64).argsort().tolist() for _ in range(3)]
    place = {row: drawn[row // 4][row % 4] for row in range(9)}
    orders = [sorted(rows, key=lambda row: (place[row], row)) for rows in (range(5), range(5, 9))]
    steps = [orders[0][:2] + orders[1][:1]] + [
        [orders[0][place + 1], orders[1][place]] for place in (1, 2, 3)
    ]
    model: Any = AutoModelForCausalLM.from_pretrained(seen.policy)
    norm, expected = plain_update(model.double(), run, "actor", batch, steps)
    for errors, metrics, _ in by_rank:
        assert metrics["actor/grad_norm"] == pytest.approx(norm, rel=TOLERANCE)
        assert (
            "3 rows of one replica of actor must be at least 1 for each of actor.mini_batches=4" in errors[0]
        )
        assert "3 rows of one replica of actor must be a multiple of 2, which stay together" in errors[1]
        number, detached, uncovered = errors[2:]
        assert uncovered.startswith("actor.update: columns ['covariant'] are needed with algorithm.loss=")
        assert f"algorithm.loss={on_ranks.__name__}:loss_as_a_number returned a float; return a" in number
        assert (
            f"{on_ranks.__name__}:loss_without_gradient returned a loss without a gradient; compute"
            in detached
        )
    weights = assembled((pieces for _, _, pieces in by_rank), shapes_of(seen.policy))
    assert_steps(weights, expected, seen.policy, "mini-batches")


def test_the_cases_are_all_that_a_configuration_offers():
    actors = [changes.get("actor", {}) for changes in CASES.values()]
    algorithms = [changes["algorithm"] for changes in CASES.values()]
    others = {"grpo_from_engine", "async_grpo", "async_ppo"}  # they compute and update as grpo and ppo do
    others |= {"sft", "dpo"}  # test_offline_updates.py
    assert {algorithm["name"] for algorithm in algorithms} == set(ALGORITHMS) - others
    assert {algorithm.get("correction", {}).get("name") for algorithm in algorithms} >= set(
        get_args(CorrectionName)
    )
    assert {algorithm.get("kl_estimator", "k1") for algorithm in algorithms} == set(KL_ESTIMATORS)
    assert {actor.get("kl_loss_estimator") for actor in actors} >= set(KL_ESTIMATORS)
    assert {actor.get("loss_aggregation", "token") for actor in actors} == set(get_args(LossAggregation))
    assert {actor.get("kl_loss_estimator", "")[-1:] for actor in actors} >= {"+"}
    assert {algorithm.get("baseline") for algorithm in algorithms} >= {"length_weighted", "token"}
    assert {algorithm.get("loss") for algorithm in algorithms} >= {*COVARIANCE_LOSSES}
    assert {algorithm.get("normalize_std", True) for algorithm in algorithms} == {True, False}
    assert {algorithm.get("whiten_advantages", True) for algorithm in algorithms} == {True, False}
    for case in CASES:
        sizes = [layout[:5].split("-") for layout, updated in UPDATES.items() if case in updated]
        assert all(any(int(place[axis]) > 1 for place in sizes) for axis in range(3)), f"{case}: some axis"
    for layout, updated in UPDATES.items():
        roles = {role for case in updated for role in algorithm_class(CASES[case]["algorithm"]["name"]).roles}
        assert layout.endswith("megatron") or {"actor", "critic"} <= roles, f"{layout} updates both"


def test_the_rows_have_every_kind_of_hole(seen: Seen):
    """Without such rows, the comparisons above would prove less than they claim."""
    for num_ranks in (2, 4, 8):
        parts = shards(NUM_ROWS, num_ranks)
        assert len({len(part) for part in parts}) > 1, "uneven"
        cut = {
            group
            for group in range(5)
            if sum(any(row // SAMPLES == group for row in part) for part in parts) > 1
        }
        assert cut, "groups are cut across ranks"
    assert not all(shards(NUM_ROWS, 8)), "a rank without rows"
    for case in ESTIMATED:
        columns, _ = seen.estimates(case)
        correction = CASES[case]["algorithm"].get("correction")
        without_score = set(cases.DROPPED) | set(
            {"remax": cases.BASELINE_DROPPED, "safe_rlhf": cases.COST_DROPPED}.get(case, ())
        )
        dropped = set((~columns["keep"]).nonzero().flatten().tolist())
        if correction is not None and correction["name"] in ("sequence_mis", "geometric_filter"):
            assert without_score < dropped < set(range(NUM_ROWS)), f"{case}: the correction drops some rows"
        else:
            assert dropped == without_score
        if correction is not None and correction["name"].endswith("tis"):
            share = float((columns["weights"] == torch.tensor(correction["high"])).float().mean())
            assert 0.05 < share < 0.6, f"{case}: some weights are cut off, {share}"
        if correction is not None and correction["name"] == "icepop":
            share = seen.estimates(case)[1]["correction/dropped_fraction"]
            assert 0.05 < share < 0.6, f"{case}: some tokens are dropped, {share}"
    clips = [one.metrics.get("actor", {}) for one in seen.one.values()]
    for name in ("clip_low", "clip_high", "dual_clip"):
        shares = [
            metrics[f"actor/{name}_fraction"] for metrics in clips if f"actor/{name}_fraction" in metrics
        ]
        assert len(shares) > 1 and all(0 < share < 1 for share in shares), f"{name}: {shares}"
    told = seen.one["online_dpo"].metrics["actor"]["actor/dpo_accuracy"]
    assert 0 < told < 1

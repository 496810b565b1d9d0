"""Options of algorithms and losses: those that nothing would read are refused, and the published settings are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridengine.config import check_run, load_config
from hybridengine.config.loss_checks import READERS
from hybridengine.config.loss_sections import (
    CISPO_LOSS,
    CLIP_COV_LOSS,
    CLIPPED_LOSS,
    GPG_LOSS,
    GSPO_LOSS,
    IPO_LOSS,
    KL_COV_LOSS,
    LOSS_KINDS,
    PREFERENCE_LOSS,
    SAPO_LOSS,
    SUPERVISED_LOSS,
)
from hybridengine.importing import import_object
from tests.unit.test_config import problems_of

ROOT = Path(__file__).parents[2]
GRPO = ["algorithm.name=grpo", "rollout.samples_per_prompt=2"]
PAIRS = ["algorithm.name=online_dpo", "rollout.samples_per_prompt=2", "data.batch_size=8"]
SFT = ["algorithm.name=sft", "warmup=null", "data.max_tokens=64"]
CHANGED = {
    "actor.clip_low": "0.1",
    "actor.clip_high": "0.3",
    "actor.dual_clip": "3",
    "actor.entropy_coef": "0.1",
    "actor.kl_loss_coef": "0.2",
    "actor.kl_loss_estimator": "k2",
    "actor.loss_aggregation": "sequence",
    "algorithm.sapo.positive_temperature": "2",
    "algorithm.sapo.negative_temperature": "3",
    "algorithm.covariance.share": "0.1",
    "algorithm.covariance.low": "2",
    "algorithm.covariance.high": "4",
    "algorithm.covariance.kl_weight": "0.5",
    "algorithm.label_smoothing": "0.1",
}
UPDATE = {"actor.entropy_coef", "actor.kl_loss_coef", "actor.kl_loss_estimator", "actor.loss_aggregation"}
"""Options that the update by advantages reads itself."""
READ: dict[str, set[str]] = {
    CLIPPED_LOSS: {*UPDATE, "actor.clip_low", "actor.clip_high", "actor.dual_clip"},
    GSPO_LOSS: {*UPDATE, "actor.clip_low", "actor.clip_high", "actor.dual_clip"},
    CISPO_LOSS: {*UPDATE, "actor.clip_low", "actor.clip_high"},
    SAPO_LOSS: {*UPDATE, "algorithm.sapo.positive_temperature", "algorithm.sapo.negative_temperature"},
    GPG_LOSS: UPDATE,
    CLIP_COV_LOSS: {
        *UPDATE,
        *("actor.clip_low", "actor.clip_high", "actor.dual_clip"),
        *("algorithm.covariance.share", "algorithm.covariance.low", "algorithm.covariance.high"),
    },
    KL_COV_LOSS: {*UPDATE, "algorithm.covariance.share", "algorithm.covariance.kl_weight"},
    PREFERENCE_LOSS: {"algorithm.label_smoothing"},
    IPO_LOSS: set(),
    SUPERVISED_LOSS: {"actor.loss_aggregation"},
}
COMMON = {"advantages": GRPO, "preferences": PAIRS, "demonstrations": SFT}


def test_the_table_knows_every_loss_and_option() -> None:
    assert set(READ) == set(LOSS_KINDS)
    assert set(CHANGED) == set(READERS)
    assert all(callable(import_object(path)) for path in LOSS_KINDS)


@pytest.mark.parametrize("loss", READ, ids=lambda path: path.partition(":")[2])
def test_options_that_a_loss_does_not_read_are_refused(built: Path, loss: str) -> None:
    common = [*COMMON[LOSS_KINDS[loss]], f"algorithm.loss={loss}"]
    assert check_run(load_config(built, [*common, *(f"{key}={CHANGED[key]}" for key in READ[loss])])) == []
    unread = [key for key in READERS if key not in READ[loss]]
    if LOSS_KINDS[loss] != "preferences":
        unread.remove("algorithm.label_smoothing")  # a key of DPO alone
    found = problems_of(built, *common, *(f"{key}={CHANGED[key]}" for key in unread))
    assert len(found) == len(unread)
    for key, message in zip(unread, found, strict=True):
        start = f"{key}={CHANGED[key]} is not read by algorithm.loss={loss}; leave it out"
        others = [other for other in READ if LOSS_KINDS[other] == LOSS_KINDS[loss] and key in READ[other]]
        assert message.startswith(start)
        assert {*message.removeprefix(start).replace(", or choose ", " or ").split(" or ")[1:]} == {*others}


def test_a_loss_of_the_user_may_read_all_of_them(built: Path) -> None:
    loss = "tests.gloo.sharded_cases:reinforce"
    overrides = [f"{key}={value}" for key, value in CHANGED.items() if key != "algorithm.label_smoothing"]
    for common in COMMON.values():
        needed = overrides if common is not SFT else [one for one in overrides if "kl_loss_coef" not in one]
        assert check_run(load_config(built, [*common, f"algorithm.loss={loss}", *needed])) == []


@pytest.mark.parametrize("loss", LOSS_KINDS, ids=lambda path: path.partition(":")[2])
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("advantages", "grpo"),
        ("advantages", "ppo"),
        ("preferences", "dpo"),
        ("preferences", "online_dpo"),
        ("demonstrations", "sft"),
    ],
)
def test_losses_of_another_kind_are_refused(built: Path, name: str, kind: str, loss: str) -> None:
    common = [f"algorithm.name={name}", *PAIRS[1:], *SFT[1:]]
    overrides = [*common, f"algorithm.loss={loss}"]
    if LOSS_KINDS[loss] == kind:
        assert check_run(load_config(built, overrides)) == []
        return
    (found,) = problems_of(built, *overrides, "actor.clip_low=0.1", "actor.entropy_coef=0.1")
    default = load_config(built, common).algorithm.loss
    assert found.startswith(
        f"algorithm.loss={loss} is a loss of {LOSS_KINDS[loss]}, and algorithm.name={name} trains on {kind}; leave it out"
        f" for {default}, or choose another algorithm.name: "
    )


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([*GRPO, "algorithm.baseline=length_weighted", "algorithm.normalize_std=false"], None),
        ([*GRPO, "algorithm.baseline=token", "algorithm.normalize_std=false"], None),
        ([*GRPO, "algorithm.baseline=best_other", "algorithm.rescale_equal=true"], None),
        (
            [*GRPO, "algorithm.baseline=length_weighted"],
            "algorithm.baseline=length_weighted gives advantages that are not divided by a standard deviation; set"
            " algorithm.normalize_std=false",
        ),
        (
            [*GRPO, "algorithm.baseline=token"],
            "algorithm.baseline=token gives advantages that are not divided by a",
        ),
        (
            [
                *("algorithm.name=grpo_from_engine", "rollout.samples_per_prompt=2"),
                *("algorithm.baseline=token", "algorithm.normalize_std=false"),
            ],
            "algorithm.baseline=token needs the trainer's distributions, and algorithm.name=grpo_from_engine takes the"
            " engine's log-probs; choose grpo",
        ),
        (["algorithm.name=reinforce_plus_plus", "algorithm.gamma=0.9"], None),
        (
            [
                *("algorithm.name=reinforce_plus_plus", "rollout.samples_per_prompt=2"),
                "algorithm.group_baseline=true",
            ],
            None,
        ),
        (
            ["algorithm.name=reinforce_plus_plus", "algorithm.group_baseline=true"],
            "algorithm.group_baseline=true compares the responses to a prompt, and rollout.samples_per_prompt=1; choose",
        ),
        (
            [
                *("algorithm.name=reinforce_plus_plus", "rollout.samples_per_prompt=2"),
                *("algorithm.group_baseline=true", "algorithm.gamma=0.9"),
            ],
            "algorithm.gamma=0.9 is not read with algorithm.group_baseline=true, whose returns are those of whole",
        ),
        (["algorithm.lam=0.9", "algorithm.lam_alpha=0.05"], None),
        (["algorithm.critic_lam=1", "algorithm.lam_alpha=0.05"], None),
        (
            ["algorithm.lam=0.9", "algorithm.critic_lam=1", "algorithm.lam_alpha=0.05"],
            "algorithm.lam=0.9 is not read: lam_alpha gives the lambda of the advantages, and critic_lam that of the",
        ),
        (["algorithm.kl_controller.target=0.1"], None),
        (["algorithm.kl_controller.rate=0.1"], "algorithm.kl_controller.target is missing"),
        (
            ["algorithm.kl_controller.target=0.1", "algorithm.kl_coef=0"],
            "algorithm.kl_controller multiplies algorithm.kl_coef=0, which remains 0; choose a first value above 0",
        ),
        (
            ["algorithm.kl_controller.target=0.1", "algorithm.kl_controller.rate=5"],
            "algorithm.kl_controller.rate=5 could make the weight of the penalty 0 or negative; choose less than 5",
        ),
        ([*GRPO, "algorithm.kl_controller.target=0.1"], "unknown key algorithm.kl_controller"),
        ([*GRPO, "algorithm.max_rounds=3"], None),
        ([*GRPO, "algorithm.max_rounds=0"], "algorithm.max_rounds=0 must be"),
        (
            [*GRPO, f"algorithm.loss={CLIP_COV_LOSS}", "algorithm.covariance.low=5"],
            "algorithm.covariance.low=5 must be less than its high=5; lower the one or raise the other",
        ),
    ],
)
def test_rules(built: Path, overrides: list[str], message: str | None) -> None:
    if message is None:
        assert check_run(load_config(built, overrides)) == []
        return
    (found,) = problems_of(built, *overrides)
    assert found.startswith(message)


def test_dapo_as_published() -> None:
    config = load_config(ROOT / "configs/dapo.yaml")
    assert config.algorithm.loss == CLIPPED_LOSS
    actor, overlong = config.actor, config.algorithm.overlong
    assert (actor.clip_low, actor.clip_high, actor.loss_aggregation) == (0.2, 0.28, "token")
    assert actor.kl_loss_coef == actor.entropy_coef == 0
    assert overlong is not None
    assert (overlong.penalty, overlong.mask) == (1.0, False)
    assert config.algorithm.num_rounds > 1

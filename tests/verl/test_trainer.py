"""verl's own `main_ppo`, unmodified, trains and generates on two ranks with one copy of the weights."""

from __future__ import annotations

import re
import shutil

import pytest

from tests.verl.conftest import Trial

pytestmark = [pytest.mark.verl, pytest.mark.timeout(1800)]

PPO = (
    "algorithm.adv_estimator=gae",
    "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=1",
    "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    "actor_rollout_ref.rollout.pipeline_model_parallel_size=2",
    "actor_rollout_ref.actor.use_kl_loss=True",
    "+actor_rollout_ref.ref.megatron.override_mcore_model_config.dtype=float32",
    "actor_rollout_ref.ref.megatron.tensor_model_parallel_size=2",
    "actor_rollout_ref.ref.megatron.pipeline_model_parallel_size=1",
    "critic.model.path=$MODEL",
    "+critic.model.override_config.attn_implementation=eager",
    "critic.megatron.tensor_model_parallel_size=2",
    "+critic.megatron.override_mcore_model_config.dtype=float32",
    "critic.optim.lr=1e-3",
    "critic.ppo_mini_batch_size=8",
    "critic.use_dynamic_bsz=True",
    "critic.ppo_max_token_len_per_gpu=4096",
)


def switches(output: str) -> list[tuple[str, int]]:
    """Return the direction and the redundant bytes of each switch of the first rank."""
    found = re.findall(r"hybridengine (to_\w+): received .*?redundant (\d+) bytes", output)
    return [(direction, int(redundant)) for direction, redundant in found]


def test_grpo_at_t_2_with_two_engines(trial: Trial) -> None:
    steps, output = trial.run("grpo")
    scores = [one["critic/score/mean"] for one in steps]
    assert len(steps) == 5 and sum(scores[-2:]) > sum(scores[:2]) + 0.2
    # Engine and trainer agree on the probability of every token drawn: both are float32, with sums in other orders.
    assert max(one["training/rollout_probs_diff_max"] for one in steps) < 1e-5
    assert steps[0]["actor/lr"] == pytest.approx(2e-4) and steps[0]["actor/ppo_kl"] == pytest.approx(
        0, abs=1e-6
    )
    # Each step's update_weights switches to generation, each sleep back; the first precedes the first step.
    assert switches(output) == [("to_generate", 0), ("to_train", 0)] * 5 + [("to_generate", 0)]


def test_ppo_at_p_2_with_critic_and_reference_is_resumed(trial: Trial) -> None:
    saved = trial.folder / "saved"
    shutil.rmtree(saved, ignore_errors=True)
    steps, output = trial.run("ppo", *PPO, "trainer.save_freq=3")
    assert len(steps) == 5 and {redundant for _, redundant in switches(output)} == {0}
    assert max(one["training/rollout_probs_diff_max"] for one in steps) < 1e-5
    # The reference at t = 2 is the actor at p = 2 before its first step; the critic's head is zero at first, so that its
    # loss is half of the mean squared return, which is the score of the row.
    assert steps[0]["actor/kl_loss"] == pytest.approx(0, abs=1e-6)
    assert steps[0]["critic/vf_loss"] == pytest.approx(steps[0]["critic/score/mean"] / 2, rel=0.1)
    assert steps[0]["critic/values/max"] == 0 and steps[-1]["critic/values/max"] > 0
    assert all(one["actor/grad_norm"] > 0 and one["critic/grad_norm"] > 0 for one in steps)

    shutil.rmtree(saved / "global_step_5")
    (saved / "latest_checkpointed_iteration.txt").write_text("3")
    resumed, _ = trial.run("resumed", *PPO, "trainer.resume_mode=auto")
    assert len(resumed) == 2
    for before, after in zip(steps[3:], resumed, strict=True):
        # The same rows, in another order: the resumed run has drawn them anew.
        assert after["critic/score/mean"] == before["critic/score/mean"]
        for name in (
            "actor/grad_norm",
            "critic/grad_norm",
            "actor/entropy",
            "critic/vf_loss",
            "actor/kl_loss",
        ):
            assert after[name] == pytest.approx(before[name], rel=1e-4), name

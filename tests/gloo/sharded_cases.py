"""Inputs of the tests of sharded algorithms: layouts, one configuration per case, and rows with every kind of hole.

Shapes: B rows, P prompt tokens, R response tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from hybridengine.algorithms.across import Across
from hybridengine.algorithms.losses.aggregation import Aggregation, SummedLoss
from hybridengine.algorithms.masking import over_tokens
from hybridengine.config import RunConfig
from hybridengine.config.loss_sections import CLIP_COV_LOSS, KL_COV_LOSS, SAPO_LOSS
from hybridengine.config.role_sections import ActorSection
from hybridengine.drivers.advantages import counted_rows
from hybridengine.drivers.grpo import Grpo

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 5,  # uneven pipeline stages for every p
    "num_attention_heads": 8,
    "num_key_value_heads": 4,  # grouped-query attention, and one group for each of 4 tensor-parallel ranks
    "head_dim": 4,
}

SAMPLES = 3
"""Responses per prompt: replicas get uneven numbers of rows, and groups are cut across them."""
NUM_ROWS, NUM_JUDGED_ROWS = 15, 24
"""Rows of an update by advantages; rows from which online DPO chooses 16, two for each replica of the largest d."""
PROMPT_WIDTH, WIDTH = 6, 8
EMPTY, DROPPED, COST_DROPPED, BASELINE_DROPPED = (5, 11), (3, 14), (9,), (10,)
"""Rows with an empty response, and without a score, a cost or a baseline. The last of 8 replicas has only row 14."""

OPTIMIZER = {"lr": 10.0, "eps": 1.0, "weight_decay": 0.01, "betas": (0.9, 0.95)}
"""With an epsilon above the gradients, Adam's step is smooth in them: rounding cannot change a sign. The learning rate
makes steps about as large as the weights: the steps are compared, and the weights must resolve them to six digits."""


def scores_alone(rows: TensorDictBase, across: Across, algorithm: Grpo, samples: int) -> TensorDict:
    """A user-defined advantage function: a response's score at each of its tokens."""
    counted = counted_rows(rows, algorithm)
    return counted.columns(advantages=over_tokens(counted.scores_B, counted.mask_BR))


def reinforce(
    log_probs_BR: Tensor,
    columns: Mapping[str, Tensor],
    algorithm: Grpo,
    actor: ActorSection,
    aggregation: Aggregation,
) -> SummedLoss:
    """A user-defined loss: -A·log pi of every token."""
    mask_BR = columns["mask"]
    loss_sum = aggregation.loss_sum(-columns["advantages"] * log_probs_BR, mask_BR)
    return SummedLoss(loss_sum, aggregation.stats("actor/policy_loss", loss_sum, mask_BR))


CASES: dict[str, dict[str, dict[str, Any]]] = {
    "ppo": {"algorithm": {"name": "ppo", "correction": {"name": "token_tis", "high": 1.3}}},
    "ppo-epochs": {
        "algorithm": {"name": "ppo", "whiten_advantages": False, "gamma": 0.9, "kl_estimator": "k3"},
        "actor": {
            "ppo_epochs": 2,
            "clip_low": 0.1,
            "clip_high": 0.3,
            "dual_clip": 1.45,
            "entropy_coef": 0.02,
            "optimizer": {"lr": 1.0, "clip_grad": 0.0},
        },
        "critic": {"ppo_epochs": 2, "value_clip": 0.0, "optimizer": {"lr": 1.0}},
    },
    "grpo": {
        "algorithm": {"name": "grpo", "correction": {"name": "sequence_mis", "high": 1.5}},
        "actor": {"loss_aggregation": "sequence", "kl_loss_coef": 0.1, "kl_loss_estimator": "k3"},
    },
    "dr_grpo": {
        "algorithm": {"name": "grpo", "normalize_std": False},
        "actor": {"loss_aggregation": "sequence_sum", "clip_high": 0.28, "entropy_coef": 0.01},
    },
    "rloo": {
        "algorithm": {
            "name": "rloo",
            "kl_estimator": "k2",
            "correction": {"name": "sequence_tis", "high": 1.2},
        },
        "actor": {"loss_aggregation": "sequence", "dual_clip": 1.6, "entropy_coef": 0.01},
    },
    "remax": {
        "algorithm": {"name": "remax", "correction": {"name": "icepop", "low": 0.75, "high": 1.35}},
        "actor": {"kl_loss_coef": 0.2, "kl_loss_estimator": "k1", "clip_low": 0.3, "clip_high": 0.1},
    },
    "reinforce_plus_plus": {
        "algorithm": {
            "name": "reinforce_plus_plus",
            "gamma": 0.95,
            "correction": {"name": "geometric_filter", "low": 0.7, "high": 1.15},
        },
        "actor": {
            "loss_aggregation": "sequence_sum",
            "kl_loss_coef": 0.2,
            "kl_loss_estimator": "k2",
            "dual_clip": 1.25,
        },
    },
    "safe_rlhf": {
        "algorithm": {
            "name": "safe_rlhf",
            "cost_limit": 0.2,
            "multiplier_lr": 0.5,
            "kl_coef": 0.1,
            "critic_lam": 1.0,
            "lam_alpha": 0.4,
        },
        "cost_critic": {"value_clip": 0.1},
    },
    "clip_cov": {
        "algorithm": {
            "name": "grpo",
            "loss": CLIP_COV_LOSS,
            "covariance": {"share": 0.2, "low": -0.1},
            "baseline": "length_weighted",
            "normalize_std": False,
            "rescale_equal": True,
            "correction": {"name": "token_tis", "high": 1.2},
        },
        "actor": {"kl_loss_coef": 0.2, "kl_loss_estimator": "k3+"},
    },
    "kl_cov": {
        "algorithm": {
            "name": "reinforce_plus_plus",
            "loss": KL_COV_LOSS,
            "covariance": {"share": 0.2, "kl_weight": 0.7},
            "group_baseline": True,
            "kl_estimator": "abs",
        },
        "actor": {"kl_loss_coef": 0.2, "kl_loss_estimator": "abs"},
    },
    "sapo": {
        "algorithm": {"name": "grpo", "loss": SAPO_LOSS, "baseline": "token", "normalize_std": False},
        "actor": {"loss_aggregation": "sequence"},
    },
    "own": {
        "algorithm": {
            "name": "grpo",
            "advantages": f"{__name__}:scores_alone",
            "loss": f"{__name__}:reinforce",
        },
        "actor": {"entropy_coef": 0.01},
    },
    "distill": {"algorithm": {"name": "distill", "gamma": 0.5, "reward_coef": 0.4}},
    "online_dpo": {"algorithm": {"name": "online_dpo", "label_smoothing": 0.1, "beta": 0.3}},
}
"""Name -> sections of the run's configuration: all dataflows, and all options of the policy's and critic's losses."""

UPDATES = {
    "2-2-2": tuple(CASES),
    "4-2-1": ("ppo-epochs",),
    "1-4-2": ("ppo",),
    "1-1-8": ("safe_rlhf", "online_dpo"),
    "2-2-2 megatron": ("grpo",),
}
"""Layout -> cases whose updates run on it: all three axes cut, in both rank orders, each axis cut in four beside another
one, and more replicas than some have rows."""
ALL_ESTIMATED = ("2-2-2", "1-1-8")
"""Layouts that compute the advantages of all cases; others have no other numbers of replicas, or only one."""

ONE_RANK = "1-1-1"


def run_of(case: str, layout: str, policy: Path, scorer: Path, **actor: Any) -> RunConfig:
    """Return the configuration of a case on a layout; `actor` are further changes of that section."""
    changes = CASES[case] | {"actor": CASES[case].get("actor", {}) | actor}
    parallel, _, order = layout.partition(" ")
    p, t, d = map(int, parallel.split("-"))
    trained = {
        role: {"micro_batch_tokens": 100, **changes.get(role, {})}
        for role in ("actor", "critic", "cost_critic")
    }
    for section in trained.values():
        section["optimizer"] = OPTIMIZER | section.get("optimizer", {})
    return RunConfig.model_validate(
        {
            "run": {"seed": 7, "steps": 1},
            "cluster": {"ranks_per_node": (p * t * d,), "rank_order": order or "paper"},
            "model": {"path": str(policy)},
            "data": {"batch_size": NUM_ROWS // SAMPLES},
            "guards": {"log_prob_drift": None},  # rows are made up, and so are the engine's log-probs
            "rollout": {
                "max_prompt_tokens": PROMPT_WIDTH,
                "max_response_tokens": WIDTH,
                "samples_per_prompt": SAMPLES,
                "temperature": 0.8,
            },
            "timeouts": {"call_s": 60},
            "algorithm": changes["algorithm"],
            "actor": trained["actor"] | {"parallel": parallel},
            "critic": trained["critic"] | {"path": str(scorer)},
            "cost_critic": trained["cost_critic"] | {"path": str(scorer)},
        }
    )


def rollout() -> TensorDict:
    """Return prompts and responses of many lengths, some of them empty."""
    generator = torch.Generator().manual_seed(11)
    prompts = torch.randint(1, PROMPT_WIDTH + 1, (NUM_JUDGED_ROWS,), generator=generator)
    responses = torch.randint(1, WIDTH + 1, (NUM_JUDGED_ROWS,), generator=generator)
    responses[list(EMPTY)] = 0
    responses[0] = WIDTH
    tokens = torch.randint(0, 131, (NUM_JUDGED_ROWS, PROMPT_WIDTH + WIDTH), generator=generator)
    return _rows({"tokens": tokens, "prompt_lengths": prompts, "response_lengths": responses})


def judged(rows: TensorDict, log_probs_BR: Tensor, values_BR: Tensor, squared_probs_BR: Tensor) -> TensorDict:
    """Return rows with all columns that a dataflow creates before its advantages.

    The old log-probabilities differ from the present ones by distances that are not near a clip, so that tokens are
    clipped in every way, and the same ones wherever they are computed; the old values likewise.
    """
    generator = torch.Generator().manual_seed(12)
    distances = torch.tensor([-0.8, -0.5, -0.33, -0.15, -0.05, 0.05, 0.15, 0.33, 0.5, 0.8])

    def near(values_BR: Tensor) -> Tensor:
        return values_BR + distances[torch.randint(10, values_BR.shape, generator=generator)]

    def noisy(values_BR: Tensor) -> Tensor:
        return values_BR + 0.3 * torch.randn(values_BR.shape, generator=generator)

    def scores(dropped: tuple[int, ...]) -> dict[str, Tensor]:
        found = torch.randn(NUM_JUDGED_ROWS, generator=generator)
        found[6:9] = 0.3  # all responses to one prompt get the same score
        missing = torch.zeros(NUM_JUDGED_ROWS, dtype=torch.bool)
        missing[list(dropped)] = True
        return {"scores": found.masked_fill(missing, torch.nan), "dropped": missing}

    old_BR = near(log_probs_BR)
    columns = {
        "log_probs": old_BR,
        "ref_log_probs": noisy(log_probs_BR),
        "rollout_log_probs": noisy(old_BR),
        "squared_probs": squared_probs_BR,
        "entropies": noisy(log_probs_BR).abs(),
        "values": near(values_BR),
        "cost_values": near(values_BR),
        **scores(DROPPED),
    }
    for prefix, dropped in (("cost", COST_DROPPED), ("baseline", BASELINE_DROPPED)):
        columns |= {f"{prefix}_{name}": column for name, column in scores(dropped).items()}
    return rows.copy().update(columns)


def _rows(columns: dict[str, Tensor]) -> TensorDict:
    return TensorDict(columns, batch_size=[NUM_JUDGED_ROWS])  # pyright: ignore[reportArgumentType]

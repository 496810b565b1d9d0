"""Updates of transformers' models in float64, all rows in one batch: no Megatron, no micro-batches, no shards.

Shapes: B rows, T positions, R response tokens, N pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from hybridengine.algorithms.losses.aggregation import Aggregation
from hybridengine.algorithms.losses.dpo import dpo_loss
from hybridengine.algorithms.losses.policy import entropy_bonus, kl_loss
from hybridengine.algorithms.losses.value import value_loss
from hybridengine.config import RunConfig
from hybridengine.config.role_sections import TrainedSection
from hybridengine.drivers.online_dpo import OnlineDpo
from hybridengine.importing import import_object


def plain_update(
    model: Any, run: RunConfig, role: str, batch: TensorDictBase, mini_batches: Sequence[list[int]] = ()
) -> tuple[float, dict[str, Tensor]]:
    """Return (mean gradient norm, final weights) of a role's update by plain PyTorch; `model` is in float64.

    Args:
        mini_batches: rows of each optimizer step of an epoch; by default one step with all rows.
    """
    section: TrainedSection = getattr(run, role)
    settings = section.optimizer
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": settings.weight_decay},
            {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
        ],
        lr=settings.lr,
        betas=settings.betas,
        eps=settings.eps,
    )
    norms = []
    for rows in [*(mini_batches or [list(range(len(batch)))])] * int(section.ppo_epochs):
        optimizer.zero_grad()
        _loss(model, run, role, batch[rows]).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip_grad or torch.inf)
        norms.append(float(norm))
        optimizer.step()
    return sum(norms) / len(norms), {name: p.detach() for name, p in model.named_parameters()}


def _loss(model: Any, run: RunConfig, role: str, batch: TensorDictBase) -> Tensor:
    if role != "actor":
        return _critic_loss(model, getattr(run, role).value_clip, batch)
    log_probs_BR, entropies_BR = _log_probs(model, batch, run.rollout.temperature)
    if isinstance(run.algorithm, OnlineDpo):
        return _preference_loss(log_probs_BR, run, batch)
    mask_BR = _mask(batch) & batch["keep"][:, None]
    actor = run.actor
    aggregation = Aggregation(actor.loss_aggregation, run.rollout.max_response_tokens)
    if run.algorithm.loss.endswith(":reinforce"):
        losses_BR = -torch.where(mask_BR, batch["advantages"].double() * log_probs_BR, 0.0)
        bonus = entropy_bonus(entropies_BR, mask_BR, actor.entropy_coef, aggregation)
        return (losses_BR.sum() + bonus.loss_sum) / mask_BR.sum()
    names = {"log_probs", "advantages", "weights", "covariant"} & set(batch.keys())
    columns = {name: batch[name] if name == "covariant" else batch[name].double() for name in names}
    policy_loss = import_object(run.algorithm.loss)
    total = policy_loss(
        log_probs_BR, columns | {"mask": mask_BR}, run.algorithm, actor, aggregation
    ) + entropy_bonus(entropies_BR, mask_BR, actor.entropy_coef, aggregation)
    if actor.kl_loss_coef:
        total = total + kl_loss(
            log_probs_BR,
            batch["ref_log_probs"].double(),
            mask_BR,
            actor.kl_loss_coef,
            actor.kl_loss_estimator,
            aggregation,
        )
    return total.loss_sum / aggregation.count(mask_BR).clamp(min=1)


def _critic_loss(model: Any, value_clip: float, batch: TensorDictBase) -> Tensor:
    mask_BR = _mask(batch) & batch["keep"][:, None]
    values_BT = model.score(model.model(batch["tokens"]).last_hidden_state)[..., 0]
    total = value_loss(
        values_BT.gather(1, _positions(batch)),
        batch["values"].double(),
        batch["returns"].double(),
        mask_BR,
        value_clip or None,
    )
    return total.loss_sum / mask_BR.sum().clamp(min=1)


def _preference_loss(log_probs_BR: Tensor, run: RunConfig, batch: TensorDictBase) -> Tensor:
    """Return the loss of rows that are pairs, the better response first."""
    mask_BR, dropped_B, scores_B = _mask(batch), batch["dropped"], batch["scores"]
    keep_N = ~dropped_B[0::2] & ~dropped_B[1::2] & (scores_B[0::2] > scores_B[1::2])
    own_B = torch.where(mask_BR, log_probs_BR, 0.0).sum(1)
    reference_B = torch.where(mask_BR, batch["ref_log_probs"].double(), 0.0).sum(1)
    assert isinstance(run.algorithm, OnlineDpo)
    total = dpo_loss(
        own_B[0::2],
        own_B[1::2],
        reference_B[0::2],
        reference_B[1::2],
        run.algorithm.beta,
        run.algorithm.label_smoothing,
        keep_N,
    )
    return total.loss_sum / keep_N.sum().clamp(min=1)


def _log_probs(model: Any, batch: TensorDictBase, temperature: float) -> tuple[Tensor, Tensor]:
    """Return (log-probability of each response token, entropy of its distribution), both [B, R]."""
    distributions_BTV = (model(batch["tokens"]).logits / temperature).log_softmax(-1)
    positions_BR = _positions(batch)
    rows_B1 = torch.arange(len(batch))[:, None]
    distributions_BRV = distributions_BTV[rows_B1, positions_BR]
    following_BR = (positions_BR + 1).clamp(max=batch["tokens"].size(1) - 1)
    tokens_BR = batch["tokens"].gather(1, following_BR)
    entropies_BR = -(distributions_BRV.exp() * distributions_BRV).sum(-1)
    return distributions_BRV.gather(2, tokens_BR[..., None])[..., 0], entropies_BR


def _positions(batch: TensorDictBase) -> Tensor:
    """Return the position before each response token, [B, R]."""
    steps_R = torch.arange(batch["log_probs"].size(1))
    return (batch["prompt_lengths"][:, None] - 1 + steps_R).clamp(max=batch["tokens"].size(1) - 1)


def _mask(batch: TensorDictBase) -> Tensor:
    return torch.arange(batch["log_probs"].size(1)) < batch["response_lengths"][:, None]

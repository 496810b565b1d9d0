"""The same steps by transformers, verl's losses, and torch's AdamW, on all rows at once in float64 and in one process."""

# pyright: reportMissingImports=false
from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.verl import rows
from tests.verl.engine_ranks import BETAS, CLIP_GRAD, EPS, LR, WEIGHT_DECAY, Case


@dataclass
class Training:
    """Figures of each step."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    metrics: list[dict[str, float]] = field(default_factory=list)


def language_outputs(
    model: PreTrainedModel, tokens: list[Tensor], temperature: float | Tensor = 1.0
) -> dict[str, Tensor]:
    """Return jagged log-probs of following tokens (zero after the last one), and entropies."""
    by_row = torch.as_tensor(temperature).expand(len(tokens)).double()
    log_probs, entropies = [], []
    for row, divisor in zip(tokens, by_row, strict=True):
        every = torch.log_softmax(model(row.unsqueeze(0)).logits[0] / divisor, dim=-1)
        following = every[:-1].gather(-1, row[1:].unsqueeze(-1)).squeeze(-1)
        log_probs.append(torch.cat([following, following.new_zeros(1)]))
        entropies.append(-(every.exp() * every).sum(dim=-1))
    return {"log_probs": _jagged(log_probs), "entropy": _jagged(entropies)}


def value_outputs(model: PreTrainedModel, tokens: list[Tensor]) -> dict[str, Tensor]:
    """Return jagged scores of all positions."""
    return {"values": _jagged([scores_of(model, row) for row in tokens])}


def scores_of(model: PreTrainedModel, row: Tensor) -> Tensor:
    hidden = model.base_model(row.unsqueeze(0)).last_hidden_state
    return model.get_submodule("score")(hidden)[0, :, 0]


def train(model: PreTrainedModel, case: Case, num_steps: int) -> Training:
    """Take steps with a float64 model, in place; return their figures."""
    found = Training()
    optimizer = adamw(model)
    for seed in range(num_steps):
        columns = case.columns(seed)
        tokens = columns["input_ids"]
        if case.is_language:
            outputs = language_outputs(model, tokens, case.batch["temperature"])
            if not case.batch.get("calculate_entropy"):
                del outputs["entropy"]
        else:
            outputs = value_outputs(model, tokens)
        num_tokens = sum(int(mask.sum()) for mask in columns["loss_mask"])
        doubles = {
            name: [row.double() if row.is_floating_point() else row for row in column]
            for name, column in columns.items()
        }
        batch = rows.batch_of(doubles, dp_size=1, batch_num_tokens=num_tokens)
        optimizer.zero_grad()
        loss, metrics = case.loss_function()(model_output=outputs, data=batch)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_GRAD)
        optimizer.step()
        found.losses.append(loss.item())
        found.grad_norms.append(norm.item())
        found.metrics.append(
            {name: metric.aggregate() for name, metric in metrics.items() if hasattr(metric, "aggregate")}
        )
    return found


def adamw(model: PreTrainedModel) -> torch.optim.AdamW:
    """Return torch's AdamW; as in Megatron, norms do not decay."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [one for one in parameters if one.dim() > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [one for one in parameters if one.dim() == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS)


def _jagged(values: list[Tensor]) -> Tensor:
    return torch.nested.as_nested_tensor(values, layout=torch.jagged)

"""One update of SFT and of DPO at parallel sizes, from packed rows, compared with transformers in float64 row by row.

Shapes: B rows, T positions, R response tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor
from transformers import AutoModelForCausalLM

from hybridengine.config import RunConfig
from tests.gloo.ranks import RankLauncher
from tests.gloo.sharded_cases import OPTIMIZER, SIZES
from tests.gloo.sharded_ranks import Group, Pieces
from tests.gloo.test_sharded_algorithms import assembled, assert_steps, shapes_of
from tests.gloo.tiny_models import write_model
from workers.policy import PolicyWorker

PROMPTS = torch.tensor([3, 1, 5, 2, 4, 4, 1, 6])
RESPONSES = torch.tensor([7, 12, 1, 5, 3, 8, 2, 4])
WIDTH, BETA, SMOOTHING = 14, 0.3, 0.1
LAYOUTS = ("2-2-1", "1-2-2", "1-1-4", "1-2-1 c=2")
CASES: dict[str, dict[str, Any]] = {
    "sft": {"algorithm": {"name": "sft"}},
    "sft by sequence": {"algorithm": {"name": "sft"}, "actor": {"loss_aggregation": "sequence"}},
    "dpo": {"algorithm": {"name": "dpo", "beta": BETA, "label_smoothing": SMOOTHING}},
    "ipo": {
        "algorithm": {"name": "dpo", "beta": BETA, "loss": "hybridengine.algorithms.losses.dpo:ipo_loss"}
    },
}


def rows_of(case: str) -> TensorDict:
    """Return rows of which a conversation's turns of the user are not trained."""
    generator = torch.Generator().manual_seed(5)
    places = torch.arange(WIDTH)
    mask_BR = torch.rand(len(PROMPTS), WIDTH, generator=generator) < 0.7
    mask_BR[torch.arange(len(PROMPTS)), RESPONSES - 1] = True
    columns: dict[str, Any] = {
        "tokens": torch.randint(0, 131, (len(PROMPTS), WIDTH), generator=generator),
        "prompt_lengths": PROMPTS,
        "response_lengths": RESPONSES,
        "response_mask": mask_BR & (places < RESPONSES[:, None]),
        "row_numbers": torch.arange(len(PROMPTS)),
    }
    if not case.startswith("sft"):
        columns["ref_log_probs"] = -4 * torch.rand(len(PROMPTS), WIDTH, generator=generator)
    return TensorDict(columns, batch_size=[len(PROMPTS)])


def run_of(case: str, layout: str, folder: Path) -> RunConfig:
    changes = CASES[case]
    return RunConfig.model_validate(
        {
            "run": {"steps": 1},
            "cluster": {"ranks_per_node": (4,)},
            "model": {"path": str(folder)},
            "data": {"batch_size": 4, "max_tokens": WIDTH},
            "rollout": {"temperature": 0.5},  # not read
            "algorithm": changes["algorithm"],
            "actor": {
                "parallel": layout,
                "micro_batch_tokens": 2 * WIDTH,
                "optimizer": OPTIMIZER,
                **changes.get("actor", {}),
            },
        }
    )


def update_all(rank: int, folder: Path) -> dict[tuple[str, str], tuple[dict[str, float], Pieces]]:
    """Return (layout, case) -> metrics and weights of this rank."""
    found = {}
    for layout in LAYOUTS:
        group = Group(run_of("sft", layout, folder), "actor", PolicyWorker, rank, folder)
        for case in CASES:
            run = run_of(case, layout, folder)
            group.restart(run)
            method = "update_supervised" if case.startswith("sft") else "update_preferences"
            metrics = group.call(method, rows_of(case), algorithm=run.algorithm)
            found[layout, case] = metrics, group.pieces()
    return found


def log_probs_of(model: Any, rows: TensorDict, row: int) -> tuple[Tensor, Tensor]:
    """Return the log-probs of the trained tokens of one row, and the reference's."""
    prompt, response = int(PROMPTS[row]), int(RESPONSES[row])
    tokens = rows["tokens"][row, : prompt + response]
    log_probs = model(tokens[None, :-1]).logits[0].log_softmax(-1)
    picked = log_probs[prompt - 1 :].gather(1, tokens[prompt:, None])[:, 0]
    mask = rows["response_mask"][row, :response]
    reference = rows.get("ref_log_probs", torch.zeros(len(PROMPTS), WIDTH))[row, :response]
    return picked[mask], reference[mask].double()


def plain_loss(model: Any, case: str) -> Tensor:
    rows = rows_of(case)
    found = [log_probs_of(model, rows, row) for row in range(len(PROMPTS))]
    if case == "sft":
        return -torch.cat([own for own, _ in found]).mean()
    if case == "sft by sequence":
        return -torch.stack([own.mean() for own, _ in found]).mean()
    losses = []
    for (chosen, ref_chosen), (rejected, ref_rejected) in zip(found[0::2], found[1::2], strict=True):
        gap = (chosen.sum() - ref_chosen.sum()) - (rejected.sum() - ref_rejected.sum())
        if case == "ipo":
            losses.append((gap - 1 / (2 * BETA)) ** 2)
        else:
            right, wrong = torch.log(1 + torch.exp(-BETA * gap)), torch.log(1 + torch.exp(BETA * gap))
            losses.append((1 - SMOOTHING) * right + SMOOTHING * wrong)
    return torch.stack(losses).mean()


def plain_step(model: Any, loss: Callable[[Any], Tensor]) -> tuple[float, float, dict[str, Tensor]]:
    """Return loss, gradient norm and weights after one step of AdamW, which decays matrices alone."""
    decay = OPTIMIZER["weight_decay"]
    groups = [
        {"params": [one for one in model.parameters() if one.dim() > 1], "weight_decay": decay},
        {"params": [one for one in model.parameters() if one.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=OPTIMIZER["lr"], betas=OPTIMIZER["betas"], eps=OPTIMIZER["eps"])
    value = loss(model)
    value.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return value.item(), norm.item(), {name: one.detach() for name, one in model.named_parameters()}


def test_updates_equal_plain_pytorch_on_unpacked_rows(tmp_path: Path, run_ranks: RankLauncher) -> None:
    folder = tmp_path / "model"
    write_model(folder, "qwen2", **SIZES)
    by_rank = run_ranks(4, update_all, folder, timeout_s=300)
    names = {"sft": "sft_loss", "sft by sequence": "sft_loss"}
    for case in CASES:
        model: Any = AutoModelForCausalLM.from_pretrained(folder)
        loss, norm, weights = plain_step(model.double(), lambda model, case=case: plain_loss(model, case))
        for layout in LAYOUTS:
            told = [outcomes[layout, case][0] for outcomes in by_rank]
            last = [metrics for metrics in told if metrics]
            assert len(last) == (2 if layout == "2-2-1" else 4)
            for metrics in last:
                assert metrics[f"actor/{names.get(case, 'dpo_loss')}"] == pytest.approx(loss, rel=1e-4)
                assert metrics["actor/grad_norm"] == pytest.approx(norm, rel=1e-4)
            parts = (outcomes[layout, case][1] for outcomes in by_rank)
            assert_steps(assembled(parts, shapes_of(folder)), weights, folder, f"{layout}, {case}")
    assert math.isfinite(loss)

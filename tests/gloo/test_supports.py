"""Log-probs and updates among the tokens that could be drawn, on sharded models, beside transformers in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorStack, TensorDict
from torch import Tensor
from transformers import AutoModelForCausalLM

from hybridengine.config import RunConfig
from hybridengine.rows.supports import SUPPORTS, support_of, support_row
from hybridengine.topology.sizes import TrainSizes
from tests.gloo import sharded_cases as cases
from tests.gloo.ranks import RankLauncher
from tests.gloo.sharded_ranks import Group, Outcome
from tests.gloo.test_sharded_algorithms import assembled, assert_columns, assert_steps, shapes_of
from tests.gloo.tiny_models import write_model
from workers.policy import PolicyWorker

LAYOUTS = ("2-2-1", "1-2-1 c=2", "1-1-4")
VOCAB, WIDTH = 131, cases.WIDTH


def run_on(layout: str, folder: Path) -> RunConfig:
    """Return the configuration of -A·log pi with an entropy bonus."""
    run = cases.run_of("own", "1-1-4", folder, folder)
    actor = run.actor.model_copy(update={"parallel": TrainSizes.parse(layout)})
    return run.model_copy(update={"actor": actor})


def batch_of(drawable_BRV: Tensor) -> TensorDict:
    """Return rows of many lengths, whose response tokens could have been drawn."""
    rows = cases.rollout()[: cases.NUM_ROWS].clone()
    shape = len(rows), WIDTH
    generator = torch.Generator().manual_seed(5)
    rows["advantages"] = torch.randn(shape, generator=generator)
    rows["log_probs"] = torch.zeros(shape)
    supports = []
    parts = zip(drawable_BRV.numpy(), rows["prompt_lengths"], rows["response_lengths"], strict=True)
    for row, (drawable_RV, begin, length) in enumerate(parts):
        drawable_RV[np.arange(int(length)), rows["tokens"][row, begin : begin + length]] = True
        words = [support_of(np.flatnonzero(one), VOCAB) for one in drawable_RV[: int(length)]]
        supports.append(support_row(words))
    rows[SUPPORTS] = NonTensorStack(*supports)
    return rows


def train(rank: int, folder: Path, batch: TensorDict) -> dict[str, Outcome]:
    found = {}
    for layout in LAYOUTS:
        run = run_on(layout, folder)
        group = Group(run, "actor", PolicyWorker, rank, folder)
        log_probs = group.collect("compute_log_probs", batch)
        group.restart(run)
        metrics = group.call("update", batch)
        found[layout] = Outcome(log_probs, {}, {"actor": metrics}, {"actor": group.pieces()})
    return found


def truncated(model: Any, batch: TensorDict, drawable_BRV: Tensor) -> tuple[Tensor, Tensor]:
    """Return log-probs and entropies of response tokens, [B, R], of the renormalized softmax over their supports."""
    every, temperature = [], 0.8
    for row, drawable_RV in zip(batch, drawable_BRV, strict=True):
        begin, length = int(row["prompt_lengths"]), int(row["response_lengths"])
        tokens, drawable = row["tokens"][: begin + length], drawable_RV[:length]
        logits = model(tokens[None]).logits[0, begin - 1 : begin + length - 1] / temperature
        kept = logits.masked_fill(~drawable, -torch.inf).log_softmax(-1)
        log_probs = kept.gather(1, tokens[begin:, None])[:, 0]
        entropies = -(kept.exp() * kept.masked_fill(~drawable, 0)).sum(-1)
        every.append(torch.nn.functional.pad(torch.stack([log_probs, entropies]), (0, WIDTH - length)))
    log_probs, entropies = torch.stack(every, 1)
    return log_probs, entropies


@pytest.mark.timeout(300)
def test_sharded_models_train_truncated_distributions(tmp_path: Path, run_ranks: RankLauncher):
    write_model(tmp_path, "qwen3", tied=True, **cases.SIZES)
    generator = torch.Generator().manual_seed(4)
    shares = torch.tensor([0.01, 0.05, 0.6, 1.0])[
        torch.randint(4, (cases.NUM_ROWS, WIDTH), generator=generator)
    ]
    drawable = torch.rand(cases.NUM_ROWS, WIDTH, VOCAB, generator=generator) < shares[..., None]
    batch = batch_of(drawable)
    by_rank = run_ranks(4, train, tmp_path, batch, timeout_s=200)

    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path).double()
    log_probs, entropies = truncated(model, batch, drawable)
    expected = TensorDict({"log_probs": log_probs, "entropies": entropies}, batch_size=[len(batch)])
    run = run_on(LAYOUTS[0], tmp_path)
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.01},
            {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
        ],
        **{key: cases.OPTIMIZER[key] for key in ("lr", "eps", "betas")},
    )
    gains = batch["advantages"] * log_probs + run.actor.entropy_coef * entropies
    (-gains.sum() / batch["response_lengths"].sum()).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), run.actor.optimizer.clip_grad)
    optimizer.step()
    stepped = {name: p.detach() for name, p in model.named_parameters()}

    for layout in LAYOUTS:
        parts = [found[layout] for found in by_rank]
        for part in parts:
            assert part.estimates is not None
            assert_columns(part.estimates, expected.detach(), layout)
            if part.metrics["actor"]:
                assert part.metrics["actor"]["actor/grad_norm"] == pytest.approx(float(norm), rel=1e-5)
        weights = assembled((part.weights["actor"] for part in parts), shapes_of(tmp_path))
        assert_steps(weights, stepped, tmp_path, layout)

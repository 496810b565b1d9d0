"""Replayed routes, losses of routers and the experts' load at combinations of sizes, compared with one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hybridengine.backends.megatron.routing import RoutedPack
from hybridengine.backends.megatron.shim import device_shim
from hybridengine.config.role_sections import MegatronSettings
from hybridengine.models.shapes import ModelShape
from hybridengine.topology.grid import Grid
from hybridengine.topology.sizes import TrainSizes
from hybridengine.weights.process_groups import ProcessGroups
from tests.gloo import training_reference as reference
from tests.gloo.megatron_training import loss_of, make_trainer
from tests.gloo.ranks import RankLauncher
from tests.gloo.tiny_models import write_model

NUM_STEPS = 3
NUM_LAYERS, NUM_EXPERTS, NUM_ACTIVE = 4, 8, 2
SIZES: dict[str, Any] = {
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
}
COEFS = (0.3, 0.02)
FEATURES = {"router_aux_loss_coef": COEFS[0], "router_z_loss_coef": COEFS[1]}


def routes_of(step: int) -> Tensor:
    """Return routes of a step's rows, [B, T, L, K]: two experts that differ, and none at every third position."""
    generator = torch.Generator().manual_seed(1000 + step)
    shape = (reference.NUM_ROWS, reference.MAX_LENGTH, NUM_LAYERS, NUM_EXPERTS)
    routes = torch.rand(shape, generator=generator).argsort(-1)[..., :NUM_ACTIVE].to(torch.int8)
    routes[:, ::3] = -1
    return routes


def batches_of(step: int, dp_rank: int, dp_size: int, replays: bool) -> list[dict[str, Tensor]]:
    batches = reference.micro_batches(step, dp_rank, dp_size)
    for batch, rows in zip(batches, reference.MICRO_BATCHES[dp_size][dp_rank], strict=True):
        batch["weight"] = reference.token_mask(batch, 1).sum()
        if replays:
            batch["routes"] = routes_of(step)[rows][:, : batch["tokens"].size(1)]
    return batches


class RoutedReference:
    """A model of transformers in one process, with the micro-batches of d replicas."""

    def __init__(self, model: Any, dp_size: int, replays: bool) -> None:
        self.model, self._dp_size, self._replays = model, dp_size, replays
        self._step, self._routes = 0, torch.zeros(0)
        self.logits: list[Tensor] = [torch.zeros(0)] * NUM_LAYERS
        self.chosen: list[Tensor] = [torch.zeros(0)] * NUM_LAYERS
        self.figures: list[dict[str, float]] = []
        for number, layer in enumerate(model.model.layers):
            layer.mlp.gate.forward = lambda hidden, number=number: self._route(hidden, number)

    def _route(self, hidden: Tensor, number: int) -> tuple[Tensor, Tensor, Tensor]:
        gate = self.model.model.layers[number].mlp.gate
        logits = F.linear(hidden.view(-1, hidden.size(-1)), gate.weight)
        scores = logits.softmax(-1)
        experts = scores.topk(NUM_ACTIVE).indices
        if self._replays:
            routes = self._routes[:, :, number].reshape(-1, NUM_ACTIVE).long()
            experts = torch.where(routes >= 0, routes, experts)
        self.logits[number], self.chosen[number] = logits, experts
        gates = scores.gather(1, experts)
        return logits, gates / gates.sum(-1, keepdim=True), experts

    def loss(self, model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
        """Return the weighted mean over micro-batches of the language loss and the routers' losses."""
        total, num_tokens, losses = torch.zeros(()), 0, torch.zeros(2)
        load = torch.zeros(NUM_LAYERS, NUM_EXPERTS)
        for rank in range(self._dp_size):
            for micro in batches_of(self._step, rank, self._dp_size, self._replays):
                self._routes = micro.get("routes", torch.zeros(0))
                mean, count = reference.language_loss(model, micro)
                own = self._router_losses(reference.token_mask(micro, 0).flatten(), load)
                total = total + count * (mean + COEFS[0] * own[0] + COEFS[1] * own[1])
                num_tokens, losses = num_tokens + count, losses + count * own.detach()
        aux, z = (losses / num_tokens / NUM_LAYERS).tolist()
        self.figures.append(
            {
                "expert_load_max": float((load.amax(1) / load.mean(1)).mean()),
                "expert_idle_share": float((load == 0).float().mean()),
                "router_aux": aux,
                "router_z": z,
            }
        )
        self._step += 1
        return total / num_tokens, num_tokens

    def _router_losses(self, valid: Tensor, load: Tensor) -> Tensor:
        """Return (auxiliary loss, z-loss), sums over layers, and add to the tokens of each expert."""
        losses = torch.zeros(2)
        for number, (logits, experts) in enumerate(zip(self.logits, self.chosen, strict=True)):
            counts = F.one_hot(experts[valid], NUM_EXPERTS).sum((0, 1)).float()
            load[number] += counts
            means = logits[valid].softmax(-1).mean(0)
            aux = NUM_EXPERTS * (counts / counts.sum() * means).sum()
            losses = losses + torch.stack([aux, logits[valid].logsumexp(-1).square().mean()])
        return losses


def train_routed(
    rank: int, folder: Path, sizes: list[str], features: dict[str, Any], replays: bool
) -> list[list[tuple[float, dict[str, float]]]]:
    """Return (gradient norm, metrics of the routers) of each step at each size."""
    registry, shape, found = ProcessGroups(), ModelShape.from_folder(folder), []
    for one in sizes:
        grid, settings = Grid(TrainSizes.parse(one)), MegatronSettings.model_validate(features)
        trainer = make_trainer(shape, grid, rank, registry, folder, features=settings)
        replica, records = grid.coordinate(rank).dp_rank, []
        for step in range(NUM_STEPS):
            batches = batches_of(step, replica, grid.sizes.dp_size, replays)
            result = trainer.train_step(batches, loss_of(trainer))
            records.append((result.grad_norm, trainer.take_routing()))
        found.append(records)
    return found


@pytest.mark.parametrize("replays", [False, True])
@pytest.mark.parametrize(
    ("num_ranks", "sizes", "more"),
    [
        (2, ["1-2-1 e=2 etp=1", "1-1-1 c=2 e=2", "2-1-1 v=2"], {}),
        (4, ["1-1-4 e=2", "2-1-2 e=2 v=2", "1-2-1 c=2 e=4 etp=1", "2-2-1 etp=1"], {"recompute": "full"}),
    ],
)
def test_routing_equals_plain_pytorch(
    num_ranks: int,
    sizes: list[str],
    more: dict[str, Any],
    replays: bool,
    tmp_path: Path,
    run_ranks: RankLauncher,
) -> None:
    by_rank = None
    for dp_size in sorted({TrainSizes.parse(one).dp_size for one in sizes}):
        model = write_model(tmp_path, "qwen3_moe", **SIZES)
        if by_rank is None:
            by_rank = run_ranks(num_ranks, train_routed, tmp_path, sizes, FEATURES | more, replays)
        expected = RoutedReference(model, dp_size, replays)
        steps = reference.train(model, expected.loss, NUM_STEPS)
        for index, one in enumerate(sizes):
            if TrainSizes.parse(one).dp_size != dp_size:
                continue
            for outcomes in by_rank:
                for (norm, figures), step, known in zip(
                    outcomes[index], steps, expected.figures, strict=True
                ):
                    assert norm == pytest.approx(step.grad_norm, rel=1e-4), one
                    assert figures == pytest.approx(known, rel=1e-4), one


def gates_of(rank: int, folder: Path, hidden: Tensor) -> list[Tensor]:
    """Return the gates [N, E] of each layer's router for the same hidden states."""
    trainer = make_trainer(
        ModelShape.from_folder(folder), Grid(TrainSizes(1, 1, 1)), rank, ProcessGroups(), folder, "bfloat16"
    )
    found = []
    with device_shim(), torch.no_grad():
        layers: Any = trainer._chunks[0].decoder.layers
        for layer in layers:
            layer.mlp.router.pack = RoutedPack(is_token_N=torch.ones(len(hidden), dtype=torch.bool))
            found.append(layer.mlp.router(hidden.unsqueeze(1))[0])
    return found


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_gates_in_bfloat16_are_those_of_transformers(
    family: str, tmp_path: Path, run_ranks: RankLauncher
) -> None:
    """Bit by bit except for the division: both compute logits in bfloat16, so that no choice differs."""
    model: Any = write_model(tmp_path, family, dtype="bfloat16")
    generator = torch.Generator().manual_seed(7)
    hidden = torch.randn(512, 64, generator=generator).bfloat16()
    [found] = run_ranks(1, gates_of, tmp_path, hidden)
    for layer, gates in zip(model.model.layers, found, strict=True):
        _, scores, experts = layer.mlp.gate(hidden)
        expected = torch.zeros(512, NUM_EXPERTS).scatter(1, experts, scores.float())
        assert torch.equal(gates != 0, expected != 0)
        torch.testing.assert_close(gates.float(), expected, rtol=2**-7, atol=0)

"""Engines in FP8 against transformers with matrices and tokens rounded to FP8 by loops over blocks, and their ledger."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from hybridengine.models.shapes import ModelShape
from hybridengine.planning.costs.memory import generation_bytes
from hybridengine.planning.switch.switch_cost import SwitchPricer
from hybridengine.topology.generation import GenerationGrid
from hybridengine.topology.grid import Grid
from hybridengine.topology.links import NodeMap
from hybridengine.topology.sizes import GenSizes, TrainSizes
from hybridengine.weights.hybrid_engine import Return
from tests.full.engines.quantized_ranks import BUCKET_ELEMENTS, PROMPTS, Trip, make_trips
from tests.gloo.ranks import RankLauncher
from tests.gloo.tiny_models import write_model

pytestmark = pytest.mark.timeout(600)

FUSED = {
    "self_attn.qkv_proj": tuple(f"self_attn.{part}_proj" for part in "qkv"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}
CASES = {
    "kept": ("qwen3", "2-2-1", "1-1", Return.KEPT),
    "kept, with biases": ("qwen2", "1-2-1", "1-1", Return.KEPT),
    "regathered": ("qwen3", "1-2-2", "1-2", Return.REGATHERED),
    "regathered by one replica": ("qwen3", "2-1-1", "1-1", Return.REGATHERED),
}
"""Name -> family, training and generation sizes, and the way back."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return a checkpoint's folder for each family."""
    sizes: dict[str, Any] = {
        "hidden_size": 256,
        "num_hidden_layers": 2,
        "intermediate_size": 512,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": 32,
        "max_position_embeddings": 256,
        "eos_token_id": None,
    }
    root = tmp_path_factory.mktemp("quantized")
    for family in ("qwen2", "qwen3"):
        write_model(root / family, family, False, **sizes)
    return {family: root / family for family in ("qwen2", "qwen3")}


@pytest.fixture(scope="module", params=CASES)
def trips(
    request: pytest.FixtureRequest,
    folders: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
    run_ranks: RankLauncher,
) -> tuple[str, list[list[Trip]], list[Path]]:
    """Return a case's name, the trips of its ranks, and the checkpoints before each of them."""
    family, train, gen, back = CASES[request.param]
    trained = tmp_path_factory.mktemp("trained") / "model"
    num_ranks = 1
    for size in train.split("-"):
        num_ranks *= int(size)
    ranks = run_ranks(num_ranks, make_trips, folders[family], (train, gen), back, trained, timeout_s=300)
    return request.param, ranks, [folders[family], trained]


def rounded(values: Tensor, rows: int) -> Tensor:
    """Return values in FP8 with a scale for each block of `rows` rows and 128 columns."""
    found = torch.empty_like(values, dtype=torch.float32)
    for top in range(0, values.size(0), rows):
        for left in range(0, values.size(1), 128):
            block = values[top : top + rows, left : left + 128].float()
            scale = block.abs().max().clamp(min=1e-10) / 448
            found[top : top + rows, left : left + 128] = (block / scale).to(
                torch.float8_e4m3fn
            ).float() * scale
    return found


class RoundedLinear(nn.Module):
    """A linear layer whose matrix and tokens are rounded."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.matrix, self.bias = rounded(linear.weight.detach(), 128), linear.bias

    def forward(self, tokens: Tensor) -> Tensor:
        flat = rounded(tokens.flatten(0, -2), 1)
        products = F.linear(flat, self.matrix).to(tokens.dtype)
        return (products if self.bias is None else products + self.bias).unflatten(0, tokens.shape[:-1])


def expected_log_probs(folder: Path, prompt: list[int], tokens: list[int], *, is_rounded: bool) -> Tensor:
    """Return transformers' log-probs of tokens that follow a prompt."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    for name, module in list(model.named_modules()):
        if is_rounded and isinstance(module, nn.Linear) and name.endswith("_proj"):
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, RoundedLinear(module))
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0].float()
    at = torch.arange(len(prompt) - 1, len(prompt) + len(tokens) - 1)
    return logits[at].log_softmax(-1)[torch.arange(len(tokens)), torch.tensor(tokens)]


def test_products_are_those_of_rounded_matrices_and_tokens(trips: tuple[str, list[list[Trip]], list[Path]]):
    """Exact but for the last bit of bfloat16: matrices have come through the switch and its conversion."""
    case, ranks, checkpoints = trips
    if CASES[case][2] != "1-1":
        return  # engines with shards, whose products are parts of these, draw the same tokens as their peers
    for number, checkpoint in enumerate(checkpoints):
        weights = load_file(checkpoint / "model.safetensors")
        for one in ranks:
            assert set(one[number].products) == {*FUSED, "self_attn.o_proj", "mlp.down_proj"}
            for name, (tokens, found) in one[number].products.items():
                parts = [f"model.layers.0.{part}.weight" for part in FUSED.get(name, (name,))]
                matrix = torch.cat([weights[part] for part in parts]).bfloat16()
                exact = F.linear(rounded(tokens, 1), rounded(matrix, 128))
                assert torch.allclose(found.float(), exact, rtol=2**-8, atol=1e-5), name
                assert not torch.allclose(
                    found.float(), F.linear(tokens, matrix).float(), rtol=2**-8, atol=1e-5
                )


def test_log_probs_are_nearer_to_those_with_rounded_matrices(trips: tuple[str, list[list[Trip]], list[Path]]):
    """In bfloat16, sums in another order change tokens, which FP8 then rounds otherwise: they are not the same."""
    _, ranks, checkpoints = trips
    for number, checkpoint in enumerate(checkpoints):
        found, same, plain = [], [], []
        for prompt, response in zip(PROMPTS, ranks[0][number].drawn, strict=True):
            found += response.log_probs
            same += expected_log_probs(checkpoint, prompt, response.token_ids, is_rounded=True).tolist()
            plain += expected_log_probs(checkpoint, prompt, response.token_ids, is_rounded=False).tolist()
        near, far = (
            (torch.tensor(found) - torch.tensor(other)).abs().mean().item() for other in (same, plain)
        )
        assert near < far, (near, far)
        for one in ranks:
            alike = [response.token_ids for response in one[number].drawn]
            assert alike == [response.token_ids for response in ranks[0][number].drawn], (
                "every rank has the weights"
            )


def test_training_weights_are_bitwise_those_before(trips: tuple[str, list[list[Trip]], list[Path]]):
    assert all(trip.is_unchanged for one in trips[1] for trip in one)


def test_the_ledger_counts_both_copies_or_what_is_gathered_again(
    trips: tuple[str, list[list[Trip]], list[Path]], folders: dict[str, Path]
):
    case, ranks, _ = trips
    family, train, gen, back = CASES[case]
    sizes, shape = GenSizes.parse(gen), ModelShape.from_folder(folders[family])
    generation = GenerationGrid(Grid(TrainSizes.parse(train)), sizes)
    pricer = SwitchPricer(shape, "bfloat16", 2 * BUCKET_ELEMENTS)
    cost = pricer.price(generation, NodeMap((generation.train.num_ranks,)))
    planned = generation_bytes(shape, int(train[0]), sizes, "bfloat16", "fp8")
    assert planned < 0.6 * generation_bytes(shape, int(train[0]), sizes, "bfloat16")
    for one in ranks:
        for trip in one:
            assert trip.engine_bytes == planned
            kept = trip.train_bytes if back is Return.KEPT else 0
            assert trip.to_generate.redundant_bytes == kept
            assert trip.to_generate.weight_bytes == trip.engine_bytes + kept
            assert trip.to_train.redundant_bytes == 0
            assert trip.to_train.weight_bytes == trip.train_bytes
            num_replicas = int(train[-1])
            received = trip.train_bytes * (num_replicas - 1) // num_replicas
            assert trip.to_train.received_bytes == (received if back is Return.REGATHERED else 0)
            whole = trip.engine_bytes + trip.train_bytes
            one_copy = whole if back is Return.KEPT else max(trip.engine_bytes, trip.train_bytes)
            assert one_copy <= trip.to_generate.peak_weight_bytes <= one_copy + 1.51 * cost.bucket_bytes_max
